"""Pages of the store's lists, without the services."""

from typing import TypeVar

from google.protobuf.message import Message
from leasehold.v1.event_pb2 import Event
from leasehold.v1.workload_pb2 import Workload
from leasehold_coordinator.lists import list_orders
from leasehold_coordinator.lists.filters import Filter
from leasehold_coordinator.lists.pages import Orders, Page, PageRequest, Position
from leasehold_coordinator.storage.store import Store

M = TypeVar("M", bound=Message)


def as_is(one: M) -> M:
    """The view of a caller who sees everything."""
    return one


def page_of(
    orders: Orders[M], size: int = 100, after: Position | None = None, order_by: str = ""
) -> PageRequest[M]:
    """The page behind a position."""
    return PageRequest(size, orders.parse(order_by), after, b"a test")


async def all_events(store: Store, worker_id: str | None = None) -> list[Event]:
    """The newest 100 events, of one worker or all."""
    page = page_of(list_orders.EVENTS)
    return list(
        (await store.lists.events(page, Filter(), as_is, worker_id=worker_id, workload_id=None)).items
    )


async def some_workloads(
    store: Store,
    size: int = 100,
    after: Position | None = None,
    *,
    include_ended: bool = True,
    worker_id: str | None = None,
) -> Page[Workload]:
    """A page of workloads."""
    page = page_of(list_orders.WORKLOADS, size, after)
    return await store.lists.workloads(
        page, Filter(), as_is, include_ended=include_ended, worker_id=worker_id
    )
