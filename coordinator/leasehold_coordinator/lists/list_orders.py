"""The fields by which lists can be sorted, and their default orders. docs/api.md has the same table. Pure.

What the store lists is sorted by columns that never change. Workers and GPUs are sorted in memory.
"""

from typing import Final

from leasehold.v1 import lease_pb2, worker_pb2
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.command_pb2 import Command
from leasehold.v1.event_pb2 import Event
from leasehold.v1.lease_pb2 import LeaseSpan
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.lists.filter_fields import Scalar, choice, moment, number, text
from leasehold_coordinator.lists.pages import Orders, SortKey

_WORKER_NAME: Final[Scalar[Worker]] = text(lambda worker: worker.name)
_GPU_WORKER: Final[Scalar[FleetGpu]] = text(lambda gpu: gpu.worker_name)
_GPU_SLOT: Final[Scalar[FleetGpu]] = number(lambda gpu: gpu.gpu.slot)
_WORKLOAD_CREATED: Final[Scalar[Workload]] = moment(lambda workload: workload.create_time)
_COMMAND_CREATED: Final[Scalar[Command]] = moment(lambda command: command.create_time)
_EVENT_ID: Final[Scalar[Event]] = text(lambda event: event.event_id)
"""The ids of events are in the order of their times."""
_AUDIT_NUMBER: Final[Scalar[AuditEntry]] = number(lambda entry: entry.number)

WORKERS: Final[Orders[Worker]] = Orders(
    {
        "name": _WORKER_NAME,
        "state": choice(worker_pb2.WorkerState.DESCRIPTOR, "WORKER_STATE_", lambda worker: worker.state),
        "hostname": text(lambda worker: worker.host.hostname),
        "gpu_count": number(lambda worker: worker.gpu_count if worker.HasField("gpu_count") else None),
        "free_gpu_count": number(
            lambda worker: worker.free_gpu_count if worker.HasField("free_gpu_count") else None
        ),
        "last_seen_time": moment(
            lambda worker: worker.last_seen_time if worker.HasField("last_seen_time") else None
        ),
    },
    (SortKey("name", _WORKER_NAME),),
    SortKey("worker_id", text(lambda worker: worker.worker_id)),
)

GPUS: Final[Orders[FleetGpu]] = Orders(
    {
        "worker": _GPU_WORKER,
        "slot": _GPU_SLOT,
        "gpu_name": text(lambda gpu: gpu.gpu.name),
        "state": choice(lease_pb2.SlotState.DESCRIPTOR, "SLOT_STATE_", lambda gpu: gpu.lease.state),
        "memory_total_bytes": number(
            lambda gpu: gpu.gpu.memory_total_bytes if gpu.gpu.HasField("memory_total_bytes") else None
        ),
    },
    (
        SortKey("worker", _GPU_WORKER),
        SortKey("worker_id", text(lambda gpu: gpu.worker_id)),
        SortKey("slot", _GPU_SLOT),
    ),
    SortKey("uuid", text(lambda gpu: gpu.gpu.uuid)),
)

WORKLOADS: Final[Orders[Workload]] = Orders(
    {"create_time": _WORKLOAD_CREATED, "name": text(lambda workload: workload.name)},
    (SortKey("create_time", _WORKLOAD_CREATED, is_descending=True),),
    SortKey("workload_id", text(lambda workload: workload.workload_id)),
)

COMMANDS: Final[Orders[Command]] = Orders(
    {"create_time": _COMMAND_CREATED},
    (SortKey("create_time", _COMMAND_CREATED, is_descending=True),),
    SortKey("command_id", text(lambda command: command.command_id)),
)

EVENTS: Final[Orders[Event]] = Orders(
    {"time": _EVENT_ID}, (SortKey("time", _EVENT_ID, is_descending=True),), None
)

_SPAN_END: Final[Scalar[LeaseSpan]] = moment(
    lambda span: span.end_time if span.HasField("end_time") else None
)
LEASE_SPANS: Final[Orders[LeaseSpan]] = Orders(
    {"end_time": _SPAN_END},
    (SortKey("end_time", _SPAN_END, is_descending=True),),
    SortKey("span_id", text(lambda span: span.span_id), is_descending=True),
)

AUDIT: Final[Orders[AuditEntry]] = Orders(
    {"number": _AUDIT_NUMBER}, (SortKey("number", _AUDIT_NUMBER, is_descending=True),), None
)
