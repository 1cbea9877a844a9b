"""EventService: the log of events."""

from typing import final

from leasehold.v1.event_service_pb2 import ListEventsRequest, ListEventsResponse
from leasehold.v1.event_service_pb2_grpc import EventServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.core.paging import next_token, page_of
from leasehold_coordinator.fleet.fleet import Fleet


@final
class EventService(EventServiceServicer):
    """Serves events from the store."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def ListEvents(self, request: ListEventsRequest, context: Context) -> ListEventsResponse:
        offset, size = page_of(request.page_size, request.page_token)
        worker_id = self.fleet.registry.find(request.worker).hello.worker_id if request.worker else None
        workload_id = None
        if request.workload:
            workload_id = (await self.fleet.find_workload(request.workload)).workload_id
        await self.fleet.events.flush()
        page = await self.fleet.store.list_events(
            worker_id=worker_id, workload_id=workload_id, offset=offset, size=size
        )
        return ListEventsResponse(
            events=page.readable, next_page_token=next_token(offset, len(page.items), more=page.more)
        )
