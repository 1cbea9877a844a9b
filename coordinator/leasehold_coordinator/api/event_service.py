"""EventService: the log of events, and the history of leases."""

from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.event_service_pb2 import (
    ListEventsRequest,
    ListEventsResponse,
    ListLeaseHistoryRequest,
    ListLeaseHistoryResponse,
    WatchEventsRequest,
    WatchEventsResponse,
)
from leasehold.v1.event_service_pb2_grpc import EventServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.watch_stream import watch
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.event_log import Events
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.lease_history import LeaseHistory
from leasehold_coordinator.fleet.permissions import current_views
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.filters import matches
from leasehold_coordinator.lists.pages import page_request
from leasehold_coordinator.storage.schema import OPEN_END_NS
from leasehold_coordinator.timestamps import is_storable


@final
class EventService(EventServiceServicer):
    """Serves events and lease spans from the store."""

    def __init__(self, fleet: FleetReader, events: Events, history: LeaseHistory) -> None:
        self.fleet = fleet
        self._events = events
        self._history = history

    async def ListEvents(self, request: ListEventsRequest, context: Context) -> ListEventsResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.EVENTS)
        worker_id, workload_id = await self.fleet.find_parents(request.worker, request.workload)
        order = list_orders.EVENTS.parse(request.order_by)
        asked = page_request(request, order, worker_id or "", workload_id or "")
        with suppress(FleetError):  # a full disk does not stop reads
            await self._events.flush()
        page = await self.fleet.store.lists.events(
            asked, wanted, current_views().event, worker_id=worker_id, workload_id=workload_id
        )
        return ListEventsResponse(events=page.items, next_page_token=asked.token(page.last))

    async def WatchEvents(
        self, request: WatchEventsRequest, context: Context
    ) -> AsyncIterator[WatchEventsResponse]:
        wanted = await read_filter(self.fleet, request.filter, list_fields.EVENTS)
        worker_id, workload_id = await self.fleet.find_parents(request.worker, request.workload)

        views = current_views()

        def view(response: WatchEventsResponse) -> WatchEventsResponse:
            if views.are_whole or not response.HasField("event"):
                return response
            return WatchEventsResponse(event=views.event(response.event))

        def wants(response: WatchEventsResponse) -> bool:
            event = response.event
            return worker_id in (None, event.worker_id) and workload_id in (None, event.workload_id)

        def passes(response: WatchEventsResponse) -> bool:
            return matches(wanted, views.event(response.event))

        responses = watch(
            self.fleet.event_hub,
            WatchEventsResponse,
            request.resume_token,
            wants=wants,
            passes=passes,
            scope=views.scope,
            view=view,
        )
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def ListLeaseHistory(
        self, request: ListLeaseHistoryRequest, context: Context
    ) -> ListLeaseHistoryResponse:
        worker_id, workload_id = await self.fleet.find_parents(request.worker, request.workload)
        start_ns = _bound_ns("start_time", request.start_time) if request.HasField("start_time") else 0
        end_ns = _bound_ns("end_time", request.end_time) if request.HasField("end_time") else OPEN_END_NS
        asked = page_request(request, list_orders.LEASE_SPANS.parse(""), worker_id or "", workload_id or "")
        with suppress(FleetError):  # a full disk does not stop reads
            await self._history.flush()
        page = await self.fleet.store.lists.lease_spans(
            asked,
            current_views().lease_span,
            (start_ns, end_ns),
            worker_id=worker_id,
            workload_id=workload_id,
            gpu_uuid=request.gpu_uuid or None,
            parked=request.parked if request.HasField("parked") else None,
        )
        return ListLeaseHistoryResponse(spans=page.items, next_page_token=asked.token(page.last))


def _bound_ns(field: str, moment: Timestamp) -> int:
    """A bound of the history.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    if not is_storable(moment):
        raise invalid(field, f"invalid {field}: give a time between the years 1677 and 2262")
    nanoseconds: int = moment.ToNanoseconds()
    return nanoseconds
