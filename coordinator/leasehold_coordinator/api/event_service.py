"""EventService: the log of events."""

from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import final

from leasehold.v1.event_service_pb2 import (
    ListEventsRequest,
    ListEventsResponse,
    WatchEventsRequest,
    WatchEventsResponse,
)
from leasehold.v1.event_service_pb2_grpc import EventServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.watch_stream import watch
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.event_log import Events
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.fleet.permissions import current_views
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.filters import matches
from leasehold_coordinator.lists.pages import page_request


@final
class EventService(EventServiceServicer):
    """Serves events from the store."""

    def __init__(self, fleet: FleetReader, events: Events) -> None:
        self.fleet = fleet
        self._events = events

    async def ListEvents(self, request: ListEventsRequest, context: Context) -> ListEventsResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.EVENTS)
        worker_id, workload_id = await self.fleet.find_parents(request.worker, request.workload)
        order = list_orders.EVENTS.parse(request.order_by)
        asked = page_request(request, order, worker_id or "", workload_id or "")
        with suppress(FleetError):  # a full disk does not stop reads
            await self._events.flush()
        page = await self.fleet.store.list_events(
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
            is_of_parents = worker_id in (None, event.worker_id) and workload_id in (None, event.workload_id)
            return is_of_parents and matches(wanted, views.event(event))

        responses = watch(
            self.fleet.event_hub,
            WatchEventsResponse,
            request.resume_token,
            wants=wants,
            scope=views.scope,
            view=view,
        )
        async with aclosing(responses):
            async for response in responses:
                yield response
