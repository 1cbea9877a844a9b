"""The fields that filters may name, for each kind of entry. docs/api.md has the same tables. Pure.

Values of environment variables may be secrets, and are no fields.
"""

from typing import Final

from leasehold.v1 import (
    audit_pb2,
    checkpoint_pb2,
    command_pb2,
    errors_pb2,
    event_pb2,
    gpu_pb2,
    lease_pb2,
    worker_pb2,
    workload_pb2,
)
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.command_pb2 import Command
from leasehold.v1.event_pb2 import Event
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.command_workloads import workload_ids
from leasehold_coordinator.lists.filter_fields import (
    Labels,
    Reference,
    Texts,
    choice,
    flag,
    moment,
    number,
    text,
    word,
)
from leasehold_coordinator.lists.filters import Fields

WORKER_STATE: Final = worker_pb2.WorkerState.DESCRIPTOR
OPERATIONS: Final = tuple(field.name for field in Operation.DESCRIPTOR.fields)

WORKERS: Final[Fields[Worker]] = {
    "worker": Reference("worker", lambda worker: (worker.worker_id, worker.name), has_name=True),
    "name": text(lambda worker: worker.name),
    "state": choice(WORKER_STATE, "WORKER_STATE_", lambda worker: worker.state),
    "labels": Labels(lambda worker: worker.labels),
    "hostname": text(lambda worker: worker.host.hostname),
    "agent_version": text(lambda worker: worker.agent_version),
    "driver_version": text(lambda worker: worker.driver_version),
    "capabilities": Texts(lambda worker: [one.name for one in worker.capabilities if one.available]),
    "gpu_count": number(lambda worker: worker.gpu_count if worker.HasField("gpu_count") else None),
    "free_gpu_count": number(
        lambda worker: worker.free_gpu_count if worker.HasField("free_gpu_count") else None
    ),
    "cordoned": flag(lambda worker: worker.HasField("cordon")),
    "last_seen_time": moment(
        lambda worker: worker.last_seen_time if worker.HasField("last_seen_time") else None
    ),
}

GPUS: Final[Fields[FleetGpu]] = {
    "worker": Reference("worker", lambda gpu: (gpu.worker_id, gpu.worker_name), has_name=True),
    "uuid": text(lambda gpu: gpu.gpu.uuid),
    "slot": number(lambda gpu: gpu.gpu.slot),
    "gpu_name": text(lambda gpu: gpu.gpu.name),
    "state": choice(lease_pb2.SlotState.DESCRIPTOR, "SLOT_STATE_", lambda gpu: gpu.lease.state),
    "workload": Reference(
        "workload", lambda gpu: _known(gpu.lease.workload_id, gpu.workload_name), has_name=True
    ),
    "health": choice(gpu_pb2.GpuHealth.DESCRIPTOR, "GPU_HEALTH_", lambda gpu: gpu.lease.health),
    "cordoned": flag(lambda gpu: gpu.lease.HasField("cordon")),
    "memory_total_bytes": number(
        lambda gpu: gpu.gpu.memory_total_bytes if gpu.gpu.HasField("memory_total_bytes") else None
    ),
    "compute_capability": text(lambda gpu: gpu.gpu.compute_capability),
    "units": number(lambda gpu: gpu.gpu.units),
}

WORKLOADS: Final[Fields[Workload]] = {
    "workload": Reference("workload", lambda workload: (workload.workload_id, workload.name), has_name=True),
    "worker": Reference("worker", lambda workload: _known(workload.worker_id)),
    "name": text(lambda workload: workload.name),
    "state": choice(
        workload_pb2.WorkloadState.DESCRIPTOR, "WORKLOAD_STATE_", lambda workload: workload.status.state
    ),
    "labels": Labels(lambda workload: workload.labels),
    "gpu_name": text(lambda workload: workload.spec.resources.gpu_name),
    "gpu_count": number(
        lambda workload: workload.spec.resources.gpu_count if workload.HasField("spec") else None
    ),
    "gpu_uuids": Texts(lambda workload: workload.status.lease.gpu_uuids),
    "priority": number(lambda workload: workload.spec.priority if workload.HasField("spec") else None),
    "origin": choice(
        workload_pb2.WorkloadOrigin.DESCRIPTOR, "WORKLOAD_ORIGIN_", lambda workload: workload.origin
    ),
    "user": text(lambda workload: workload.user),
    "owner": text(lambda workload: workload.owner),
    "ready": flag(lambda workload: workload.status.HasField("ready_time")),
    "create_time": moment(lambda workload: workload.create_time),
    "end_time": moment(
        lambda workload: workload.status.end_time if workload.status.HasField("end_time") else None
    ),
}

COMMANDS: Final[Fields[Command]] = {
    "command_id": text(lambda command: command.command_id),
    "request_id": text(lambda command: command.request_id),
    "actor": text(lambda command: command.actor),
    "worker": Reference("worker", lambda command: _known(command.worker_id)),
    "workload": Reference("workload", lambda command: tuple(workload_ids(command))),
    "operation": word(OPERATIONS, lambda command: command.operation.WhichOneof("kind")),
    "state": choice(command_pb2.CommandState.DESCRIPTOR, "COMMAND_STATE_", lambda command: command.state),
    "reason": choice(
        errors_pb2.ErrorReason.DESCRIPTOR, "ERROR_REASON_", lambda command: command.error.reason
    ),
    "create_time": moment(lambda command: command.create_time),
    "end_time": moment(lambda command: command.end_time if command.HasField("end_time") else None),
}

EVENTS: Final[Fields[Event]] = {
    "worker": Reference("worker", lambda event: _known(event.worker_id)),
    "worker_name": text(lambda event: event.worker_name),
    "workload": Reference("workload", lambda event: _known(event.workload_id)),
    "workload_name": text(lambda event: event.workload_name),
    "command_id": text(lambda event: event.command_id),
    "actor": text(lambda event: event.actor),
    "kind": choice(event_pb2.EventKind.DESCRIPTOR, "EVENT_KIND_", lambda event: event.kind),
    "message": text(lambda event: event.message),
    "time": moment(lambda event: event.time),
}

AUDIT: Final[Fields[AuditEntry]] = {
    "number": number(lambda entry: entry.number),
    "time": moment(lambda entry: entry.time),
    "identity": text(lambda entry: entry.identity),
    "address": text(lambda entry: entry.address),
    "on_behalf_of": text(lambda entry: entry.on_behalf_of),
    "method": text(lambda entry: entry.method),
    "resource": text(lambda entry: entry.resource),
    "arguments": text(lambda entry: entry.arguments),
    "outcome": choice(audit_pb2.AuditOutcome.DESCRIPTOR, "AUDIT_OUTCOME_", lambda entry: entry.outcome),
    "reason": choice(errors_pb2.ErrorReason.DESCRIPTOR, "ERROR_REASON_", lambda entry: entry.reason),
    "message": text(lambda entry: entry.message),
    "count": number(lambda entry: entry.count),
    "command_id": text(lambda entry: entry.command_id),
}

CHECKPOINTS: Final[Fields[Checkpoint]] = {
    "checkpoint_id": text(lambda checkpoint: checkpoint.checkpoint_id),
    "worker": Reference("worker", lambda checkpoint: _known(checkpoint.worker_id)),
    "workload": Reference(
        "workload", lambda checkpoint: _known(checkpoint.workload_id, checkpoint.workload_name), has_name=True
    ),
    "kind": choice(
        checkpoint_pb2.CheckpointKind.DESCRIPTOR, "CHECKPOINT_KIND_", lambda checkpoint: checkpoint.kind
    ),
    "create_time": moment(lambda checkpoint: checkpoint.create_time),
    "size_bytes": number(lambda checkpoint: checkpoint.size_bytes),
    "in_use": flag(lambda checkpoint: checkpoint.in_use),
    "in_use_unknown": flag(lambda checkpoint: checkpoint.in_use_unknown),
    "problem": text(lambda checkpoint: checkpoint.problem),
}


def _known(*names: str) -> tuple[str, ...]:
    """An id, and a name where there is one. Empty: the entry has none."""
    return tuple(name for name in names if name)
