"""Page tokens, page sizes and orders."""

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold.v1 import errors_pb2, worker_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.event_service_pb2 import ListEventsRequest
from leasehold.v1.fleet_service_pb2 import ListGpusRequest, ListWorkersRequest
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.worker_pb2 import Worker
from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.lists import list_orders, pages
from leasehold_coordinator.lists.pages import TOKEN_LIMIT, PageRequest, Position, page_request

from tests.examples import PATIENT

WORKLOADS = list_orders.WORKLOADS.parse("")
REQUEST = ListWorkloadsRequest(filter="state = RUNNING", worker="alpha", page_size=10)


def continued(token: str, **fields: Any) -> PageRequest[Any]:
    """The page of a request with the token, whose other fields may differ from those of REQUEST."""
    request = ListWorkloadsRequest()
    request.CopyFrom(REQUEST)
    request.page_token = token
    for name, value in fields.items():
        setattr(request, name, value)
    return page_request(request, list_orders.WORKLOADS.parse(request.order_by), "k-1")


def token_at(position: Position) -> str:
    return page_request(REQUEST, WORKLOADS, "k-1").token(position)


def refused(request: Any, order: Any, *parents: str) -> None:
    with pytest.raises(FleetError, match="keep filter, order_by and all else") as error:
        page_request(request, order, *parents)
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN
    assert error.value.metadata["field"] == "page_token"


@PATIENT
@given(st.integers(-(2**63) + 1, 2**63 - 1), st.text(max_size=130))
def test_a_token_is_read_as_it_was_written(time_ns: int, workload_id: str) -> None:
    token = token_at((time_ns, workload_id))
    assert continued(token).after == (time_ns, workload_id)
    assert continued(token, page_size=7).after == (time_ns, workload_id), "pages may differ in size"


def test_the_last_page_has_no_token() -> None:
    assert page_request(REQUEST, WORKLOADS, "k-1").token(None) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"filter": "state = EXITED"},
        {"filter": ""},
        {"order_by": "create_time desc"},
        {"order_by": "name"},
        {"include_ended": True},
        {"worker": ""},
    ],
)
def test_a_token_is_of_one_list_with_its_filter_and_order(fields: dict[str, Any]) -> None:
    token = token_at((5, "w-1"))
    with pytest.raises(FleetError) as error:
        continued(token, **fields)
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN


def test_a_token_is_of_the_worker_that_its_name_meant() -> None:
    request = ListWorkloadsRequest(worker="alpha", page_token=token_at((5, "w-1")))
    refused(request, WORKLOADS, "k-2")


def test_a_token_of_one_method_is_refused_by_all_others() -> None:
    lists: list[tuple[Any, Any, Position]] = [
        (ListWorkersRequest, list_orders.WORKERS, ("alpha", "k-1")),
        (ListGpusRequest, list_orders.GPUS, ("alpha", "k-1", 0, "GPU-1")),
        (ListWorkloadsRequest, list_orders.WORKLOADS, (5, "w-1")),
        (ListCommandsRequest, list_orders.COMMANDS, (5, "c-1")),
        (ListEventsRequest, list_orders.EVENTS, ("e-1",)),
    ]
    for kind, orders, position in lists:
        token = page_request(kind(), orders.parse("")).token(position)
        for other, other_orders, _ in lists:
            request, order = other(page_token=token), other_orders.parse("")
            if other is kind:
                assert page_request(request, order).after == position
            else:
                refused(request, order)


def forged(*parts: object) -> str:
    """A token with a right digest."""
    data = msgspec.msgpack.encode(parts)
    bound_to = page_request(REQUEST, WORKLOADS, "k-1").bound_to
    return base64.urlsafe_b64encode(pages._digest(bound_to, data) + data).decode()


@pytest.mark.parametrize(
    "token",
    ["?", "é", "NQ==", "nonsense", "A" * 5_000, "A" * (TOKEN_LIMIT + 4), token_at((5, "w-1"))[:-4], "=" * 16]
    + [forged(), forged(5), forged("5", "w-1"), forged(5, 6), forged(5, "w-1", 1), forged(2**63, "w-1")]
    + [forged([5], "w-1"), forged(5.5, "w-1"), forged(5, b"w-1"), forged(5, "x" * TOKEN_LIMIT)],
)
def test_a_made_up_token_is_refused(token: str) -> None:
    request = ListWorkloadsRequest()
    request.CopyFrom(REQUEST)
    request.page_token = token
    refused(request, WORKLOADS, "k-1")


@PATIENT
@given(st.integers(0, 200), st.integers(1, 255))
def test_a_damaged_token_is_refused(place: int, change: int) -> None:
    data = bytearray(base64.urlsafe_b64decode(token_at((5, "w-1"))))
    data[place % len(data)] ^= change
    request = ListWorkloadsRequest()
    request.CopyFrom(REQUEST)
    request.page_token = base64.urlsafe_b64encode(data).decode()
    refused(request, WORKLOADS, "k-1")


@pytest.mark.parametrize(("asked", "size"), [(0, 100), (1, 1), (1000, 1000), (1001, 1000), (2**31 - 1, 1000)])
def test_the_size_of_a_page(asked: int, size: int) -> None:
    assert page_request(ListWorkersRequest(page_size=asked), list_orders.WORKERS.parse("")).size == size


def test_a_page_fits_into_a_message_and_has_one_entry_at_least() -> None:
    big = [Command(phase="x" * 4_000_000), Command(phase="y")]
    assert pages.page_within(big, 5) == big[:1]
    assert pages.page_within([GpuLease()] * 9, 5) == [GpuLease()] * 5


@pytest.mark.parametrize(
    ("order_by", "names"),
    [
        ("", "a b c d"),
        ("name desc", "d c b a"),
        ("free_gpu_count", "c b a d"),
        ("free_gpu_count desc", "a d b c"),
        (" free_gpu_count desc ,  name desc ", "d a b c"),
        ("state, name desc", "d b c a"),
    ],
)
def test_entries_are_sorted_by_each_field_in_its_direction(order_by: str, names: str) -> None:
    connected, stale = worker_pb2.WORKER_STATE_CONNECTED, worker_pb2.WORKER_STATE_STALE
    workers = [
        Worker(name="a", worker_id="k-1", state=stale, free_gpu_count=8),
        Worker(name="b", worker_id="k-2", state=connected, free_gpu_count=0),
        Worker(name="c", worker_id="k-3", state=stale),  # unknown is not 0
        Worker(name="d", worker_id="k-4", state=connected, free_gpu_count=8),
    ]
    order = list_orders.WORKERS.parse(order_by)
    found = sorted(workers, key=lambda worker: order.rank(order.position(worker)))
    assert " ".join(worker.name for worker in found) == names


@pytest.mark.parametrize("text", ["x", "name asc", "name,", ",", "name, name", "name desc desc", "n" * 300])
def test_an_order_that_is_refused(text: str) -> None:
    with pytest.raises(FleetError) as error:
        list_orders.WORKERS.parse(text)
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    assert error.value.metadata["field"] == "order_by"
    match = "256 fit" if len(text) > 256 else "write different fields of free_gpu_count, gpu_count, hostname"
    assert match in error.value.message
