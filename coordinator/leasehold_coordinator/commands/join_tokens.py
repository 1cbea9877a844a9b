"""Creates, lists and deletes join tokens."""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.v1.enrolment_service_pb2 import (
    CreateJoinTokenRequest,
    CreateJoinTokenResponse,
    JoinTicket,
    JoinToken,
)

from leasehold_coordinator.access.identities import Kind
from leasehold_coordinator.access.join_tokens import (
    SECRET_BYTES,
    StoredJoinToken,
    check_pattern,
    secret_digest,
    ticket_text,
)
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.audit_entries import change_rows
from leasehold_coordinator.fleet.callers import caller, current_caller
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.enrolment_rows import binding_row, join_token_row
from leasehold_coordinator.storage.rows import Gone
from leasehold_coordinator.storage.write_health import look_at
from leasehold_coordinator.timestamps import timestamp

logger = logging.getLogger(__name__)

TOKEN_LIMIT: Final = 1_000
"""Most join tokens at once."""

USES_LIMIT: Final = 256
"""Most identities that may join by one token."""

DEFAULT_LIFE_S: Final = 3_600.0
LIFE_LIMIT_S: Final = 7 * 86_400.0


@final
class JoinTokenChanges:
    """Creates and deletes join tokens, one at a time.

    Args:
        fleet: The known state.
        authorities: The certificates of the CA, in DER, by which the enrolment listener is verified.
        is_admin: Whether an identity, as KIND/NAME, is an admin by a binding or as a Unix user.
    """

    def __init__(
        self, fleet: Fleet, authorities: Callable[[], Sequence[bytes]], is_admin: Callable[[str], bool]
    ) -> None:
        self._fleet = fleet
        self._authorities = authorities
        self._is_admin = is_admin
        self.address = ""
        """HOST:PORT of the enrolment listener, as a joining host reaches it. Empty: there is none."""
        self.kinds: frozenset[str] = frozenset()
        """Kinds whose listener asks for certificates, which none on loopback does."""
        self._undeleted: dict[str, StoredJoinToken] = {}
        """Deleted tokens, by id, that the disk still has. A restart would accept them again."""

    async def create(self, request: CreateJoinTokenRequest) -> CreateJoinTokenResponse:
        """Creates a token. Only the response has the secret.

        Raises:
            FleetError: INVALID_ARGUMENT, UNSUPPORTED_CAPABILITY, TOO_MANY_JOIN_TOKENS or STORAGE_UNAVAILABLE.
        """
        life_s = _check(request)
        kind = request.identity.partition("/")[0]
        option = "--worker-listen" if kind == Kind.WORKER else "--listen"
        if not self.address:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                "the coordinator has no listener for enrolment, so nobody could use the token: start it with "
                f"{option} on an address off loopback",
            )
        if kind not in self.kinds:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                f"the coordinator's address for a {kind} is on loopback, where nobody needs a certificate: "
                f"start the coordinator with {option} on an address off loopback",
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        now_ns = self._fleet.store.highest_time_ns
        token = JoinToken(
            join_token_id=f"jt-{secrets.token_hex(6)}",
            identity=request.identity,
            uses_left=request.uses or 1,
            create_time=timestamp(now_ns),
            expire_time=timestamp(now_ns + int(life_s * 1e9)),
            creator=caller(),
            replace=request.replace,
            creator_claimed=self._is_claimed(),
        )
        stored = StoredJoinToken(token, secret_digest(secret))

        async def store() -> None:
            async with self._fleet.enrolling:
                await self._delete_expired()
                if len(self._fleet.join_tokens) >= TOKEN_LIMIT:
                    raise FleetError(
                        errors_pb2.ERROR_REASON_TOO_MANY_JOIN_TOKENS,
                        f"{TOKEN_LIMIT} join tokens exist, which is the limit: `leasehold token delete` some",
                    )
                await self._fleet.store.write(
                    join_token_row(stored), *change_rows(f"join_token/{token.join_token_id}")
                )
                self._fleet.join_tokens.put(stored)

        await self._fleet.store.health.unless_stalled(store(), look_at("token list"))
        logger.info("%s created the join token %s for %s", caller(), token.join_token_id, token.identity)
        ticket = JoinTicket(
            address=self.address,
            ca_certificates=self._authorities(),
            secret=secret,
            identity=token.identity,
        )
        return CreateJoinTokenResponse(join_token=token, ticket=ticket_text(ticket))

    def _is_claimed(self) -> bool:
        """Whether the caller is an admin only by the claim of a token."""
        found = current_caller()
        return found is not None and found.claimed_role is Role.ADMIN and not self._is_admin(caller())

    def all(self) -> list[JoinToken]:
        """The tokens that have not expired, by id."""
        now_ns = self._fleet.store.highest_time_ns
        return [stored.token for stored in self._fleet.join_tokens if not stored.has_expired(now_ns)]

    async def delete(self, join_token_id: str) -> JoinToken:
        """Deletes a token, and returns the token.

        Raises:
            FleetError: UNKNOWN_JOIN_TOKEN. STORAGE_UNAVAILABLE, and a deletion that has begun is effective
                until a restart. A repetition stores the deletion.
        """

        async def delete() -> JoinToken:
            async with self._fleet.enrolling:
                stored = self._fleet.join_tokens.get(join_token_id) or self._undeleted.get(join_token_id)
                if stored is None:
                    raise FleetError(
                        errors_pb2.ERROR_REASON_UNKNOWN_JOIN_TOKEN,
                        f"no join token has the id {join_token_id[:64]!r}: `leasehold token list` has the "
                        "ids",
                        field="join_token_id",
                    )
                self._fleet.join_tokens.remove(join_token_id)  # refused from now on, also if the disk fails
                self._undeleted[join_token_id] = stored
                gone = Gone(schema.join_tokens, join_token_id)
                try:
                    await self._fleet.store.write(gone, *change_rows(f"join_token/{join_token_id}"))
                except FleetError as error:
                    raise FleetError(
                        error.reason,
                        f"the join token {join_token_id} is deleted, but only until the coordinator "
                        f"restarts: {error.message}; then repeat the command",
                        retry_after_s=error.retry_after_s,
                    ) from error
                del self._undeleted[join_token_id]
                return stored.token

        token = await self._fleet.store.health.unless_stalled(delete())
        logger.info("%s deleted the join token %s", caller(), join_token_id)
        return token

    async def unbind_gpu(self, gpu_uuid: str) -> str:
        """Unbinds a GPU from the identity of its worker, and returns the identity.

        Raises:
            FleetError: UNKNOWN_GPU, WORKER_CONNECTED or STORAGE_UNAVAILABLE.
        """

        async def unbind() -> str:
            async with self._fleet.enrolling:
                binding = self._fleet.bindings.of_gpu(gpu_uuid)
                if binding is None:
                    raise FleetError(
                        errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                        f"the GPU {gpu_uuid[:64]!r} belongs to no enrolled worker, and nothing was changed: "
                        "`leasehold get gpus -o wide` shows whole UUIDs",
                        field="gpu_uuid",
                    )
                owner = self._fleet.registry.owner(gpu_uuid)
                if owner is not None and owner.hello.worker_id in self._fleet.sessions:
                    raise FleetError(
                        errors_pb2.ERROR_REASON_WORKER_CONNECTED,
                        f"worker {owner.hello.name} is connected and has the GPU, which belongs to "
                        f"worker/{binding.name}: stop the worker, or take the GPU out of its host, first",
                        worker=owner.hello.worker_id,
                    )
                left = replace(binding, gpu_uuids=binding.gpu_uuids - {gpu_uuid})
                await self._fleet.store.write(binding_row(left), *change_rows(f"gpu/{gpu_uuid}"))
                self._fleet.bindings.put(left)
                return f"{Kind.WORKER}/{left.name}"

        identity = await self._fleet.store.health.unless_stalled(unbind(), look_at("get gpus"))
        logger.info("%s unbound the GPU %s from %s", caller(), gpu_uuid, identity)
        return identity

    async def _delete_expired(self) -> None:
        now_ns = self._fleet.store.highest_time_ns
        tokens = (*self._fleet.join_tokens, *self._undeleted.values())
        expired = [one.token.join_token_id for one in tokens if one.has_expired(now_ns)]
        if expired:
            await self._fleet.store.write(*(Gone(schema.join_tokens, one) for one in expired))
            for join_token_id in expired:
                self._fleet.join_tokens.remove(join_token_id)
                self._undeleted.pop(join_token_id, None)


def _check(request: CreateJoinTokenRequest) -> float:
    """Checks a request, and returns the life of the token in seconds.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    try:
        is_pattern = check_pattern(request.identity)
    except ValueError as error:
        raise invalid("identity", str(error)) from error
    if request.identity.startswith(f"{Kind.WORKER}/") and "@" in request.identity:
        raise invalid("identity", f"{request.identity!r} has '@', which the name of a worker can't have")
    if request.replace and is_pattern:
        raise invalid(
            "replace",
            f"a token for the pattern {request.identity!r} can't replace certificates: name one identity",
        )
    if request.uses > USES_LIMIT or (request.uses > 1 and not is_pattern):
        raise invalid(
            "uses",
            f"{request.uses} uses are too many: at most {USES_LIMIT} for a pattern, and 1 for one name",
        )
    life_s = request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else DEFAULT_LIFE_S
    if not 1 <= life_s <= LIFE_LIMIT_S:
        raise invalid("ttl", f"a life of {life_s:g} s is out of range: give 1 s to 7 days")
    return life_s
