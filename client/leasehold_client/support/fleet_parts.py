"""The parts of the bundle that the coordinator has, as far as the caller's role permits."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from google.protobuf.json_format import MessageToDict, SerializeToJsonError
from google.protobuf.message import Message

from leasehold_client.config import configured_coordinator, parse_address
from leasehold_client.contexts import find_context
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_client.support.host_parts import ERROR, GPU_LEASE, WORKLOAD
from leasehold_client.support.members import MEMBER_LIMIT_BYTES, Part, document
from leasehold_client.support.redaction import Fields, kept_fields

PERIOD: Final = timedelta(hours=1)
COUNT_LIMIT: Final = 5_000
"""Most commands and events."""

WORKER: Final[Fields] = {
    **dict.fromkeys(("worker_id", "name", "state", "epoch", "agent_version", "driver_version")),
    **dict.fromkeys(("cuda_version", "host", "capabilities", "gpu_count", "free_gpu_count")),
    **dict.fromkeys(("pending_claimers", "parked_workload_count", "last_seen_time", "resources")),
    **dict.fromkeys(("host_memory_available_bytes", "session_encrypted")),
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


def fleet_parts(coordinator: str | None, context: str | None) -> list[Part]:
    """The parts of the coordinator.

    Args:
        coordinator: Its address. None: as other verbs find it.
        context: Name of a context. None: as other verbs find it.
    """

    def part(name: str, what: str, read: Callable[[Client], Sequence[Message]], fields: Fields) -> Part:
        return Part(f"fleet/{name}.json", what, partial(_read, coordinator, context, read, fields))

    since = datetime.now(UTC) - PERIOD
    return [
        part("workers", "workers of the fleet", Client.workers, WORKER),
        part("gpus", "GPUs of the fleet", Client.gpus, GPU),
        part("workloads", "workloads without programs and variables", Client.workloads, WORKLOAD),
        part(
            "commands",
            f"the newest {COUNT_LIMIT} commands of the last hour, without their requests",
            lambda client: client.commands(COUNT_LIMIT, filter=f"create_time > {since.isoformat()}"),
            COMMAND,
        ),
        part(
            "events",
            f"the newest {COUNT_LIMIT} events of the last hour",
            lambda client: client.events("", COUNT_LIMIT, filter=f"time > {since.isoformat()}"),
            EVENT,
        ),
    ]


def _read(
    coordinator: str | None,
    context: str | None,
    read: Callable[[Client], Sequence[Message]],
    fields: Fields,
) -> bytes:
    found = find_context(context, coordinator)
    default = found.coordinator if found is not None else None
    address = parse_address(coordinator or default or configured_coordinator())
    with Client(address, context=found.name if found is not None else None) as client:
        messages = read(client)
    kept: list[object] = []
    size = 0
    for message in messages:
        size += message.ByteSize()
        if size > MEMBER_LIMIT_BYTES // 8:  # the names of fields make JSON several times as large
            break
        kept.append(kept_fields(_document(message), fields))
    return document({"count": len(messages), "entries": kept})


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
