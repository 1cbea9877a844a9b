"""Role bindings: which identity has which roles. The rules of bindings, and the bindings in memory."""

import re
from collections.abc import Iterable
from typing import Final, final

from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding

from leasehold_coordinator.access.identities import Identity, Kind, parse_identity
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.errors import invalid

BINDING_LIMIT: Final = 10_000
"""Most bindings. A list of them fits into one response."""

ON_BEHALF_OF: Final = access_service_pb2.ROLE_ON_BEHALF_OF
_KINDS: Final = (Kind.LOCAL, Kind.USER, Kind.SERVICE)
_PATTERN: Final = re.compile(rf"{Kind.USER}/[A-Za-z0-9._@*-]{{1,64}}")


def binding_key(binding: RoleBinding) -> str:
    """The key of a binding: equal bindings have equal keys."""
    role = access_service_pb2.Role.Name(binding.role).removeprefix("ROLE_").lower()
    return " ".join(part for part in (binding.identity, role, binding.users) if part)


def check_binding(binding: RoleBinding) -> None:
    """Refuses an invalid binding.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    try:
        identity = parse_identity(binding.identity, _KINDS)
    except ValueError as error:
        raise invalid("binding.identity", str(error)) from None
    if identity.kind not in _KINDS:
        raise invalid(
            "binding.identity",
            f"{identity} can't have a role: a worker has its session only; name local/LOGIN, user/NAME or "
            "service/NAME",
        )
    if binding.role not in access_service_pb2.Role.values() or not binding.role:
        raise invalid(
            "binding.role",
            f"{binding.role} is no role: give viewer, user, operator, admin or on_behalf_of",
        )
    if binding.role == ON_BEHALF_OF:
        if identity.kind is not Kind.SERVICE:
            raise invalid("binding.identity", f"{identity} is no service: only service/NAME acts for users")
        if not _PATTERN.fullmatch(binding.users):
            raise invalid(
                "binding.users",
                f"{binding.users[:100]!r} is no pattern of users: write user/NAME, with '*' for any part of "
                "a name",
            )
    elif binding.users:
        raise invalid("binding.users", "only on_behalf_of has a pattern of users: leave it out")


@final
class Bindings:
    """The role bindings in memory."""

    def __init__(self) -> None:
        self._bindings: dict[str, RoleBinding] = {}
        self._keys: dict[str, set[str]] = {}
        """Keys of the bindings of each identity."""

    def __len__(self) -> int:
        return len(self._bindings)

    def load(self, stored: Iterable[RoleBinding]) -> None:
        """Adds the stored bindings."""
        for binding in stored:
            self.put(binding)

    def get(self, key: str) -> RoleBinding | None:
        """The binding with a key of :func:`binding_key`."""
        return self._bindings.get(key)

    def all(self) -> list[RoleBinding]:
        """All bindings, by identity and role."""
        return sorted(self._bindings.values(), key=lambda one: (one.identity, one.role, one.users))

    def put(self, binding: RoleBinding) -> None:
        """Adds a binding."""
        key = binding_key(binding)
        self._bindings[key] = binding
        self._keys.setdefault(binding.identity, set()).add(key)

    def remove(self, binding: RoleBinding) -> None:
        """Removes a binding, if it is there."""
        key = binding_key(binding)
        if self._bindings.pop(key, None) is None:
            return
        keys = self._keys[binding.identity]
        keys.discard(key)
        if not keys:
            del self._keys[binding.identity]

    def role(self, identity: Identity) -> Role:
        """The strongest role that is bound to an identity."""
        roles = (binding.role for binding in self._of(identity) if binding.role != ON_BEHALF_OF)
        return Role(max(roles, default=0))

    def has_role(self, identity: str, role: Role) -> bool:
        """Whether an identity, as KIND/NAME, has a binding to a role or a stronger one."""
        bound = (self._bindings[key].role for key in self._keys.get(identity, ()))
        return any(role <= each != ON_BEHALF_OF for each in bound)

    def may_act_for(self, service: Identity, user: Identity) -> bool:
        """Whether a service has a binding for a user."""
        return any(
            binding.role == ON_BEHALF_OF and user.matches(binding.users) for binding in self._of(service)
        )

    def _of(self, identity: Identity) -> Iterable[RoleBinding]:
        return (self._bindings[key] for key in self._keys.get(str(identity), ()))
