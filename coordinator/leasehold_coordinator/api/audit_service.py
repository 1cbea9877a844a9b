"""AuditService: the audit, and the proof that nobody changed it."""

from contextlib import suppress
from typing import final

from leasehold.v1 import errors_pb2
from leasehold.v1.audit_service_pb2 import (
    ListAuditEntriesRequest,
    ListAuditEntriesResponse,
    VerifyAuditRequest,
    VerifyAuditResponse,
)
from leasehold.v1.audit_service_pb2_grpc import AuditServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_refusals import AuditRefusals
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.pages import page_request
from leasehold_coordinator.storage.audit_chain import Link


@final
class AuditService(AuditServiceServicer):
    """Serves the audit from the store."""

    def __init__(self, fleet: FleetReader, refusals: AuditRefusals) -> None:
        self.fleet = fleet
        self._refusals = refusals

    async def ListAuditEntries(
        self, request: ListAuditEntriesRequest, context: Context
    ) -> ListAuditEntriesResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.AUDIT)
        asked = page_request(request, list_orders.AUDIT.parse(request.order_by))
        with suppress(FleetError):  # a full disk does not stop reads
            await self._refusals.flush()
        page = await self.fleet.store.lists.audit(asked, wanted)
        return ListAuditEntriesResponse(entries=page.items, next_page_token=asked.token(page.last))

    async def VerifyAudit(self, request: VerifyAuditRequest, context: Context) -> VerifyAuditResponse:
        part = await self.fleet.store.check_audit(_link(request.page_token))
        return VerifyAuditResponse(
            entry_count=part.count,
            last_number=part.last.number,
            last_hash=part.last.hash,
            broken=part.broken,
            next_page_token="" if part.is_last else f"{part.last.number}.{part.last.hash.hex()}",
        )


def _link(token: str) -> Link | None:
    """The entry after which a page begins. None: the first page.

    Raises:
        FleetError: INVALID_TOKEN.
    """
    if not token:
        return None
    number, _, digest = token[:128].partition(".")
    try:
        if number.isdecimal() and number.isascii() and len(number) < 19:
            return Link(int(number), bytes.fromhex(digest))
    except ValueError:
        pass
    raise FleetError(
        errors_pb2.ERROR_REASON_INVALID_TOKEN,
        f"the page token {token[:64]!r} is not of this call: verify again, from the start",
        field="page_token",
    )
