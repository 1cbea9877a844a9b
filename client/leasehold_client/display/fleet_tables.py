"""Tables of workers, GPUs and workloads."""

from collections.abc import Mapping, Sequence
from typing import Final

from leasehold.v1 import gpu_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload, WorkloadOrigin

from leasehold_client.arguments.gpu_names import gpu_place
from leasehold_client.arguments.policies import policy_text
from leasehold_client.byte_sizes import size_text
from leasehold_client.display.tables import Column, field_size, field_text
from leasehold_client.display.terminal_text import safe_cell
from leasehold_client.messages import PARKED, age_text, enum_name, is_partial, time_text, workload_state

UNREMARKABLE: Final = (gpu_pb2.GPU_HEALTH_UNSPECIFIED, gpu_pb2.GPU_HEALTH_OK)
STARTED_HERE: Final = (workload_pb2.WORKLOAD_ORIGIN_UNSPECIFIED, workload_pb2.WORKLOAD_ORIGIN_RUN)


WORKER_COLUMNS: Final[Sequence[Column[Worker]]] = (
    Column("NAME", lambda worker: worker.name, shrinks=True),
    Column("STATE", lambda worker: worker_state(worker), is_state=True),
    Column("GPUS", lambda worker: field_text(worker, "gpu_count")),
    Column("FREE", lambda worker: field_text(worker, "free_gpu_count")),
    Column("PARKED", lambda worker: field_text(worker, "parked_workload_count"), drop=3),
    Column("WAITING", lambda worker: field_text(worker, "pending_claimers"), is_wide=True),
    Column("CPU", lambda worker: _cpu(worker), drop=4),
    Column("MEMORY", lambda worker: _memory(worker), drop=5),
    Column("SEEN", lambda worker: age_text(worker.last_seen_time), drop=1),
    Column("DRIVER", lambda worker: worker.driver_version or "-", is_wide=True),
    Column("VERSION", lambda worker: worker.agent_version or "-", is_wide=True),
    Column("LABELS", lambda worker: labels_text(worker.labels), is_wide=True),
    Column("ID", lambda worker: worker.worker_id, is_wide=True),
    Column(
        "REASON",
        lambda worker: worker_reason(worker) or "-",
        drop=2,
        shrinks=True,
    ),
)
"""Columns of workers. SEEN is the time since the last report. REASON has a refusal, a cordon, and why no
command is accepted."""


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as KEY=VALUE,…, sorted. "-": none."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels)) or "-"


def worker_reason(worker: Worker) -> str:
    """Why a worker was refused, its cordon, and why it accepts no command. Empty: none of them."""
    parts = [f"refused: {safe_cell(worker.refusal)}"] if worker.refusal else []
    parts += [cordon_text(worker.cordon)] if worker.HasField("cordon") else []
    return "; ".join(filter(None, [*parts, no_commands_text(worker)]))


def no_commands_text(worker: Worker) -> str:
    """Why a worker accepts no command, such as on a full disk. Empty: it accepts commands."""
    refusals = [one.reason for one in worker.capabilities if one.name == "commands" and not one.available]
    return f"no commands: {safe_cell(refusals[0])}" if refusals else ""


def worker_state(worker: Worker) -> str:
    """The state of a worker, with a session without TLS and a cordon."""
    state = enum_name(worker_pb2.WorkerState.Name, worker.state, "WORKER_STATE_")
    if worker.HasField("session_encrypted") and not worker.session_encrypted:
        state += ",insecure"
    return f"{state},cordoned" if worker.HasField("cordon") else state


def _cpu(worker: Worker) -> str:
    """Free and total processor cores."""
    machine = worker.resources
    if not worker.HasField("resources"):
        return "?"
    return f"{machine.cpu_millicores_free / 1000:g}/{machine.cpu_millicores_total / 1000:g}"


def _memory(worker: Worker) -> str:
    """Free and total host memory."""
    machine = worker.resources
    if not worker.HasField("resources"):
        return "?"
    return f"{size_text(machine.memory_free_bytes)}/{size_text(machine.memory_total_bytes)}"


GPU_COLUMNS: Final[Sequence[Column[FleetGpu]]] = (
    Column("GPU", lambda gpu: gpu_place(gpu)),
    Column("STATE", lambda gpu: slot_state(gpu), is_state=True),
    Column("WORKLOAD", lambda gpu: gpu.workload_name or gpu.lease.workload_id or "-", shrinks=True),
    Column("USED", lambda gpu: field_size(gpu.lease.sample, "memory_used_bytes"), drop=1),
    Column("TOTAL", lambda gpu: field_size(gpu.lease.sample, "memory_total_bytes"), drop=4),
    Column("UTIL", lambda gpu: field_text(gpu.lease.sample, "utilization_percent", "%"), drop=5),
    Column("TEMP", lambda gpu: field_text(gpu.lease.sample, "temperature_celsius", "C"), drop=6),
    Column("SEEN", lambda gpu: age_text(gpu.report_time), drop=3),
    Column("NAME", lambda gpu: gpu.gpu.name, drop=7, shrinks=True),
    Column("UUID", lambda gpu: gpu.gpu.uuid, is_wide=True),
    Column("REASON", lambda gpu: gpu_reason(gpu.lease) or "-", drop=2, shrinks=True),
)
"""Columns of GPUs with their leases. SEEN is the time since the report, and REASON has health, cordons and
foreign processes."""


def slot_state(gpu: FleetGpu) -> str:
    """The state of a GPU's slot in lower case."""
    return enum_name(lease_pb2.SlotState.Name, gpu.lease.state, "SLOT_STATE_").lower()


def gpu_reason(lease: GpuLease) -> str:
    """Hold, health problem, cordon and foreign processes of a GPU, leased or not. Empty: none."""
    parts = []
    if lease.HasField("hold"):
        by = f" by {safe_cell(lease.hold.held_by)}" if lease.hold.held_by else ""
        name = f", hold {lease.hold.hold_id}" if lease.hold.hold_id else ""
        parts.append(f"held{by} until {time_text(lease.hold.expire_time)}{name}")
    if lease.health not in UNREMARKABLE:
        health = enum_name(gpu_pb2.GpuHealth.Name, lease.health, "GPU_HEALTH_")
        parts.append(f"{health}: {safe_cell(lease.health_reason)}" if lease.health_reason else health)
    if lease.HasField("cordon"):
        parts.append(cordon_text(lease.cordon))
    parts += [_foreign_text(process) for process in lease.foreign_processes]
    if lease.asleep_bytes:
        parts.append(f"sleeping workloads keep {size_text(lease.asleep_bytes)}")
    return "; ".join(parts)


def cordon_text(cordon: Cordon) -> str:
    """Operator and reason of a cordon."""
    by = f" by {safe_cell(cordon.cordoned_by)}" if cordon.cordoned_by else ""
    return f"cordoned{by}: {safe_cell(cordon.reason)}"


def _foreign_text(process: ForeignProcess) -> str:
    words = [f"pid {process.pid}"]
    words += [f"of {safe_cell(process.user)}"] if process.user else []
    words += [f"({safe_cell(process.command)})"] if process.command else []
    if process.HasField("device_memory_bytes"):
        words.append(f"holds {size_text(process.device_memory_bytes)}")
    if process.workload_id:
        words.append(f"of workload {safe_cell(process.workload_name)}, which does not lease it")
    return " ".join(words)


def workload_columns(places: Mapping[str, str]) -> Sequence[Column[Workload]]:
    """Columns of workloads.

    Args:
        places: Short names of GPUs, worker/slot, by UUID.
    """
    return (
        Column("NAME", lambda workload: workload.name, shrinks=True),
        Column("STATE", workload_state, is_state=True),
        Column("GPUS", lambda workload: _places(workload, places), shrinks=True),
        Column("OWNER", lambda workload: workload.owner or "-", drop=2, shrinks=True),
        Column("PARKED", _parked, drop=3),
        Column("AGE", lambda workload: age_text(workload.create_time), drop=1),
        Column("ORIGIN", origin_text, is_wide=True),
        Column("USER", lambda workload: workload.user or _no_value(workload), is_wide=True),
        Column("PRIORITY", _priority, is_wide=True),
        Column("EVICTION", eviction_text, is_wide=True),
        Column("PID", _pid, is_wide=True),
        Column("LABELS", _labels, is_wide=True),
        Column("CREATED", lambda workload: time_text(workload.create_time), is_wide=True),
        Column("ID", lambda workload: workload.workload_id, is_wide=True),
    )


def _places(workload: Workload, places: Mapping[str, str]) -> str:
    return ",".join(places.get(uuid, uuid) for uuid in workload.status.lease.gpu_uuids) or "-"


def _parked(workload: Workload) -> str:
    """Sizes of a suspended workload in host memory and on disk."""
    status = workload.status
    parts = [size_text(status.parked_bytes)] if status.HasField("parked_bytes") else []
    parts += [f"{size_text(status.disk_bytes)} on disk"] if status.HasField("disk_bytes") else []
    return ", ".join(parts) or (_no_value(workload) if status.state in PARKED else "-")


def eviction_text(workload: Workload) -> str:
    """Policy of the last suspend, or else of the spec. "-": neither; "?": unknown."""
    if workload.status.HasField("parked_by"):
        return policy_text(workload.status.parked_by)
    if workload.spec.HasField("eviction"):
        return policy_text(workload.spec.eviction)
    return _no_value(workload)


def _priority(workload: Workload) -> str:
    return "?" if is_partial(workload) else str(workload.spec.priority)


def _labels(workload: Workload) -> str:
    return "?" if is_partial(workload) else labels_text(workload.labels)


def _pid(workload: Workload) -> str:
    return str(workload.status.root_pid) if workload.status.HasField("root_pid") else _no_value(workload)


def _no_value(workload: Workload) -> str:
    """The text of an unset field, which may be hidden."""
    return "?" if is_partial(workload) else "-"


def origin_text(workload: Workload) -> str:
    """The origin of a workload, such as ``exec``. "?": unknown."""
    if is_partial(workload):
        return "?"
    if workload.origin in STARTED_HERE:
        return "run"
    return enum_name(WorkloadOrigin.Name, workload.origin, "WORKLOAD_ORIGIN_").lower()
