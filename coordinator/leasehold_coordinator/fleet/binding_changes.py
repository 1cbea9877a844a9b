"""Changes of role bindings: stored first, then effective."""

import asyncio
import logging
from collections.abc import Callable
from typing import final

from leasehold.v1 import errors_pb2
from leasehold.v1.access_service_pb2 import RoleBinding

from leasehold_coordinator.access.bindings import BINDING_LIMIT, Bindings, binding_key, check_binding
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import change_rows
from leasehold_coordinator.fleet.callers import caller, current_caller
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import Gone, binding_row
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.storage.write_health import look_at
from leasehold_coordinator.timestamps import now_timestamp

logger = logging.getLogger(__name__)


@final
class BindingChanges:
    """Grants and revokes roles, one after the other.

    Args:
        store: The store.
        bindings: The bindings in memory.
        on_change: Called after each change of the bindings in memory, in the same turn of the loop.
    """

    def __init__(self, store: Store, bindings: Bindings, on_change: Callable[[], None]) -> None:
        self._store = store
        self._bindings = bindings
        self._on_change = on_change
        self._changing = asyncio.Lock()

    async def grant(self, wanted: RoleBinding) -> RoleBinding:
        """Stores a binding. An equal binding stays as it is.

        Returns:
            The stored binding.

        Raises:
            FleetError: INVALID_ARGUMENT or STORAGE_UNAVAILABLE; TOO_MANY_BINDINGS. Nothing has changed.
        """
        check_binding(wanted)
        return await self._store.health.unless_stalled(self._grant(wanted), look_at("access list"))

    async def _grant(self, wanted: RoleBinding) -> RoleBinding:
        async with self._changing:
            self._require_admin()
            before = self._bindings.get(binding_key(wanted))
            if before is not None:
                return before
            if len(self._bindings) >= BINDING_LIMIT:
                raise FleetError(
                    errors_pb2.ERROR_REASON_TOO_MANY_BINDINGS,
                    f"there are {BINDING_LIMIT} role bindings, which is the limit: revoke some first",
                )
            binding = RoleBinding(
                identity=wanted.identity,
                role=wanted.role,
                users=wanted.users,
                granted_by=caller(),
                grant_time=now_timestamp(),
            )
            await self._store.write(binding_row(binding), *change_rows(f"binding/{binding_key(binding)}"))
            self._bindings.put(binding)
            self._on_change()
            logger.info("%s granted %s", binding.granted_by, binding_key(binding))
            return binding

    async def revoke(self, wanted: RoleBinding) -> None:
        """Deletes a binding.

        Raises:
            FleetError: INVALID_ARGUMENT, UNKNOWN_BINDING or STORAGE_UNAVAILABLE. Nothing has changed.
        """
        check_binding(wanted)
        await self._store.health.unless_stalled(self._revoke(wanted), look_at("access list"))

    async def _revoke(self, wanted: RoleBinding) -> None:
        async with self._changing:
            self._require_admin()
            key = binding_key(wanted)
            if self._bindings.get(key) is None:
                raise FleetError(
                    errors_pb2.ERROR_REASON_UNKNOWN_BINDING,
                    f"there is no role binding {key!r}: `leasehold access list` lists them",
                    field="binding",
                )
            await self._store.write(Gone(schema.role_bindings, key), *change_rows(f"binding/{key}"))
            self._bindings.remove(wanted)
            self._on_change()
            logger.info("%s revoked %s", caller(), key)

    def _require_admin(self) -> None:
        """Refuses a caller who was an admin at the beginning of the call, and whose role was revoked since.

        Raises:
            FleetError: NOT_PERMITTED.
        """
        found = current_caller()
        if found is None or found.is_local_admin:
            return
        if max(self._bindings.role(found.identity), found.claimed_role) < Role.ADMIN:
            raise FleetError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"{found.identity} is no admin any more: ask an admin",
                identity=str(found.identity),
            )
