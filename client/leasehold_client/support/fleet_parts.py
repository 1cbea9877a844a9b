"""The parts of the bundle that the coordinator has, as far as the caller's role permits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

from google.protobuf.json_format import MessageToDict, SerializeToJsonError
from google.protobuf.message import Message
from leasehold.v1.command_service_pb2 import ListCommandsRequest, ListCommandsResponse
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.event_service_pb2 import ListEventsRequest, ListEventsResponse
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.fleet_service_pb2 import (
    ListGpusRequest,
    ListGpusResponse,
    ListWorkersRequest,
    ListWorkersResponse,
)
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest, ListWorkloadsResponse
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub

from leasehold_client.contexts import chosen_coordinator
from leasehold_client.coordinator.connection import Connection
from leasehold_client.errors import LeaseholdError
from leasehold_client.support.host_parts import ERROR, GPU_LEASE, WORKLOAD
from leasehold_client.support.members import MEMBER_LIMIT_BYTES, Part, document
from leasehold_client.support.redaction import Fields, kept_fields

PERIOD: Final = timedelta(hours=1)
COUNT_LIMIT: Final = 5_000
"""Most entries of a list."""

LIST_LIMIT_BYTES: Final = MEMBER_LIMIT_BYTES // 8
"""Most bytes of the kept entries of a list: the names of fields make JSON several times as large."""

TRAFFIC_LIMIT_BYTES: Final = MEMBER_LIMIT_BYTES
"""Bytes of a list after which no further page is read."""

PAGE_LIMIT: Final = 100
"""Most pages of a list. With a filter, the coordinator may send many pages without entries."""

WORKER: Final[Fields] = {
    **dict.fromkeys(("worker_id", "name", "state", "epoch", "agent_version", "driver_version")),
    **dict.fromkeys(("cuda_version", "host", "capabilities", "gpu_count", "free_gpu_count")),
    **dict.fromkeys(("pending_claimers", "parked_workload_count", "last_seen_time", "resources")),
    **dict.fromkeys(("host_memory_available_bytes", "session_encrypted", "refusal")),
}
GPU: Final[Fields] = {
    **dict.fromkeys(("worker_id", "worker_name", "gpu", "workload_name", "report_time")),
    "lease": GPU_LEASE,
}
COMMAND: Final[Fields] = {
    **dict.fromkeys(("command_id", "worker_id", "workload_id", "state", "phase", "timeout")),
    **dict.fromkeys(("create_time", "update_time", "end_time", "revision")),
    "result": {
        **dict.fromkeys(("already_there", "applied_pairs", "released_gpu_uuids", "claimed_gpu_uuids")),
        **dict.fromkeys(("duration", "warnings", "phases", "policy", "checkpoint_id", "disk_bytes")),
        "members": {
            **dict.fromkeys(("workload_id", "pid", "state_before", "state_after", "phases", "rolled_back")),
            "error": ERROR,
        },
    },
    "error": ERROR,
    "operation_kind": None,
}
EVENT: Final[Fields] = dict.fromkeys(
    ("event_id", "time", "kind", "worker_id", "worker_name", "workload_id", "command_id", "message")
)


Page: TypeAlias = (
    ListWorkersResponse | ListGpusResponse | ListWorkloadsResponse | ListCommandsResponse | ListEventsResponse
)
Pages: TypeAlias = Callable[[Connection], Iterator[Page]]


def fleet_parts(coordinator: str | None, context: str | None) -> list[Part]:
    """The parts of the coordinator.

    Args:
        coordinator: Its address. None: as other verbs find it.
        context: Name of a context. None: as other verbs find it.
    """

    def part(name: str, what: str, pages: Pages, fields: Fields) -> Part:
        return Part(f"fleet/{name}.json", what, partial(_read, coordinator, context, name, pages, fields))

    since = (datetime.now(UTC) - PERIOD).isoformat()
    return [
        part(
            "workers",
            "workers of the fleet",
            lambda to: to.pages(FleetServiceStub(to.channel).ListWorkers, ListWorkersRequest()),
            WORKER,
        ),
        part(
            "gpus",
            "GPUs of the fleet",
            lambda to: to.pages(FleetServiceStub(to.channel).ListGpus, ListGpusRequest()),
            GPU,
        ),
        part(
            "workloads",
            "workloads without programs and variables",
            lambda to: to.pages(WorkloadServiceStub(to.channel).ListWorkloads, ListWorkloadsRequest()),
            WORKLOAD,
        ),
        part(
            "commands",
            f"the newest {COUNT_LIMIT} commands of the last hour, without their requests",
            lambda to: to.pages(
                CommandServiceStub(to.channel).ListCommands,
                ListCommandsRequest(filter=f"create_time > {since}"),
            ),
            COMMAND,
        ),
        part(
            "events",
            f"the newest {COUNT_LIMIT} events of the last hour",
            lambda to: to.pages(
                EventServiceStub(to.channel).ListEvents, ListEventsRequest(filter=f"time > {since}")
            ),
            EVENT,
        ),
    ]


def _read(coordinator: str | None, context: str | None, name: str, pages: Pages, fields: Fields) -> bytes:
    address, found = chosen_coordinator(coordinator, context)
    connection = Connection(address, context=found.name if found is not None else None)
    try:
        messages, is_whole = _bounded(name, pages(connection))
    finally:
        connection.close()
    kept: list[object] = []
    size = 0
    for message in messages:
        size += message.ByteSize()
        if size > LIST_LIMIT_BYTES:
            break
        kept.append(kept_fields(_document(message), fields))
    return document({"is_whole": is_whole and len(kept) == len(messages), "entries": kept})


def _bounded(name: str, pages: Iterable[Page]) -> tuple[list[Message], bool]:
    """The first entries of a list, and whether they are the whole list.

    A coordinator that is hostile or has a defect sends pages without an end, or fills pages with unknown
    fields. So pages and their bytes have bounds too.

    Args:
        name: The field of the pages with the entries.
        pages: The pages, each of which is read when the iteration reaches it.
    """
    messages: list[Message] = []
    size = 0
    is_last = False
    for page in islice(pages, PAGE_LIMIT):
        entries: Sequence[Message] = getattr(page, name)
        messages += entries
        size += page.ByteSize()
        is_last = not page.next_page_token
        if len(messages) >= COUNT_LIMIT or size > TRAFFIC_LIMIT_BYTES:
            break
    return messages[:COUNT_LIMIT], is_last and len(messages) <= COUNT_LIMIT


def _document(message: Message) -> dict[str, object]:
    try:
        told: dict[str, object] = MessageToDict(message, preserving_proto_field_name=True)
    except SerializeToJsonError as error:  # such as a time after the year 9999
        raise LeaseholdError(f"an entry is no JSON: {error}") from error
    if isinstance(operation := told.get("operation"), dict):
        told["operation_kind"] = next(iter(operation), "")
    if told.get("kind") == "EVENT_KIND_GPU_FOREIGN":  # its message has command lines of others' processes
        told.pop("message", None)
    return told
