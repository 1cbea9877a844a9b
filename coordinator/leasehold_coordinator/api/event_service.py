"""EventService: the log of events."""

from typing import final

from leasehold.v1.event_service_pb2 import ListEventsRequest, ListEventsResponse
from leasehold.v1.event_service_pb2_grpc import EventServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.fleet.filter_reader import read_filter
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.lists import list_fields, list_orders
from leasehold_coordinator.lists.paging import page_request


@final
class EventService(EventServiceServicer):
    """Serves events from the store."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def ListEvents(self, request: ListEventsRequest, context: Context) -> ListEventsResponse:
        wanted = await read_filter(self.fleet, request.filter, list_fields.EVENTS)
        worker_id = self.fleet.registry.find(request.worker).hello.worker_id if request.worker else None
        workload_id = None
        if request.workload:
            workload_id = (await self.fleet.find_workload(request.workload)).workload_id
        order = list_orders.EVENTS.parse(request.order_by)
        asked = page_request(request, order, worker_id or "", workload_id or "")
        await self.fleet.events.flush()
        page = await self.fleet.store.list_events(asked, wanted, worker_id=worker_id, workload_id=workload_id)
        return ListEventsResponse(events=page.items, next_page_token=asked.token(page.last))
