"""Keys of requests. A key tells a repeated request from another request with the same id."""

from dataclasses import dataclass
from typing import final

from google.protobuf.message import Message
from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command

from leasehold_coordinator.access.secret_vault import SecretVault
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.request_ids import scoped
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import caller, on_behalf_of
from leasehold_coordinator.fleet.fleet_reader import FleetReader


@final
@dataclass(frozen=True, slots=True)
class RequestKey:
    """The id of a request, bound to its method and content (AIP-155). Each identity has ids of its own.

    Attributes:
        request_id: The id that the client chose. Empty: the request is not idempotent.
        scoped_id: The id with the caller's identity. Empty: there is no id.
        digest: Keyed digest of every field, timeouts included, and of the message's type: each method has a
            type of its own. Empty if there is no id.
    """

    request_id: str
    scoped_id: str
    digest: bytes

    @classmethod
    def of(cls, vault: SecretVault, request_id: str, request: Message) -> "RequestKey":
        """The key of a request, which has this id."""
        if not request_id:
            return cls("", "", b"")
        content = request.SerializeToString(deterministic=True)
        digest = vault.digest(f"{request.DESCRIPTOR.full_name}\0".encode() + content)
        return cls(request_id, scoped(caller(), on_behalf_of(), request_id), digest)

    def require_same(self, earlier: StoredCommand) -> None:
        """Refuses a request whose id belongs to another request.

        Raises:
            FleetError: REQUEST_ID_REUSED.
        """
        if earlier.request_digest == self.digest:
            return
        kind = earlier.command.operation.WhichOneof("kind")
        raise FleetError(
            errors_pb2.ERROR_REASON_REQUEST_ID_REUSED,
            f"request id {self.request_id!r} belongs to another request, which created command "
            f"{earlier.command.command_id} ({kind}): repeat a request unchanged, and give another request "
            "another id",
            field="request_id",
            command_id=earlier.command.command_id,
        )


async def find_repeated(fleet: FleetReader, key: RequestKey) -> Command | None:
    """The command that an earlier sending of the same request created.

    Raises:
        FleetError: REQUEST_ID_REUSED, another request has the id.
    """
    if not key.request_id:
        return None
    stored = fleet.ledger.of_request(key.scoped_id)
    if stored is None:
        stored = await fleet.store.find_request(key.scoped_id)
    if stored is None:
        return None
    key.require_same(stored)
    return await fleet.find_command(stored.command.command_id)
