"""Tables of workers, GPUs and workloads."""

from collections.abc import Iterable
from typing import Final

from leasehold.v1 import gpu_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload, WorkloadOrigin

from leasehold_client.arguments.gpu_names import gpu_place, gpu_places
from leasehold_client.arguments.policies import policy_text
from leasehold_client.byte_sizes import size_text
from leasehold_client.display.tables import echo_table, field_size
from leasehold_client.display.terminal_text import one_line
from leasehold_client.messages import enum_name, time_text, workload_state

UNREMARKABLE: Final = (gpu_pb2.GPU_HEALTH_UNSPECIFIED, gpu_pb2.GPU_HEALTH_OK)
STARTED_HERE: Final = (workload_pb2.WORKLOAD_ORIGIN_UNSPECIFIED, workload_pb2.WORKLOAD_ORIGIN_RUN)


def echo_workers(workers: Iterable[Worker]) -> None:
    """Prints a table of workers. The last column has the reason of a cordon."""
    echo_table(
        ["NAME", "STATE", "GPUS", "FREE", "PARKED", "CPU", "MEMORY", "DRIVER", "SEEN", "ID", "REASON"],
        [
            [
                worker.name,
                _worker_state(worker),
                str(worker.gpu_count) if worker.HasField("gpu_count") else "?",
                str(worker.free_gpu_count) if worker.HasField("free_gpu_count") else "?",
                str(worker.parked_workload_count) if worker.HasField("parked_workload_count") else "?",
                *_machine_cells(worker),
                worker.driver_version or "-",
                time_text(worker.last_seen_time),
                worker.worker_id,
                cordon_text(worker.cordon) if worker.HasField("cordon") else "-",
            ]
            for worker in workers
        ],
    )


def _worker_state(worker: Worker) -> str:
    state = enum_name(worker_pb2.WorkerState.Name, worker.state, "WORKER_STATE_")
    if worker.HasField("session_encrypted") and not worker.session_encrypted:
        state += ",insecure"
    return f"{state},cordoned" if worker.HasField("cordon") else state


def _machine_cells(worker: Worker) -> list[str]:
    """Free and total processor cores, and free and total host memory."""
    if not worker.HasField("resources"):
        return ["?", "?"]
    machine = worker.resources
    return [
        f"{machine.cpu_millicores_free / 1000:g}/{machine.cpu_millicores_total / 1000:g}",
        f"{size_text(machine.memory_free_bytes)}/{size_text(machine.memory_total_bytes)}",
    ]


def echo_gpus(gpus: Iterable[FleetGpu]) -> None:
    """Prints a table of GPUs with their leases. The last column has health, cordons and intruders."""
    echo_table(
        ["GPU", "STATE", "WORKLOAD", "USED", "TOTAL", "UTIL", "TEMP", "NAME", "UUID", "REASON"],
        [
            [
                gpu_place(gpu),
                enum_name(lease_pb2.SlotState.Name, gpu.lease.state, "SLOT_STATE_").lower(),
                gpu.workload_name or gpu.lease.workload_id or "-",
                *_sample_cells(gpu.lease.sample),
                gpu.gpu.name,
                gpu.gpu.uuid,
                gpu_reason(gpu.lease) or "-",
            ]
            for gpu in gpus
        ],
    )


def _sample_cells(sample: gpu_pb2.GpuSample) -> list[str]:
    return [
        field_size(sample, "memory_used_bytes"),
        field_size(sample, "memory_total_bytes"),
        f"{sample.utilization_percent}%" if sample.HasField("utilization_percent") else "?",
        f"{sample.temperature_celsius}C" if sample.HasField("temperature_celsius") else "?",
    ]


def gpu_reason(lease: GpuLease) -> str:
    """Hold, health problem, cordon and foreign processes of a GPU, leased or not. Empty: none."""
    parts = []
    if lease.HasField("hold"):
        by = f" by {one_line(lease.hold.held_by)}" if lease.hold.held_by else ""
        name = f", hold {lease.hold.hold_id}" if lease.hold.hold_id else ""
        parts.append(f"held{by} until {time_text(lease.hold.expire_time)}{name}")
    if lease.health not in UNREMARKABLE:
        health = enum_name(gpu_pb2.GpuHealth.Name, lease.health, "GPU_HEALTH_")
        parts.append(f"{health}: {one_line(lease.health_reason)}" if lease.health_reason else health)
    if lease.HasField("cordon"):
        parts.append(cordon_text(lease.cordon))
    parts += [_foreign_text(process) for process in lease.foreign_processes]
    if lease.asleep_bytes:
        parts.append(f"sleeping workloads keep {size_text(lease.asleep_bytes)}")
    return "; ".join(parts)


def cordon_text(cordon: Cordon) -> str:
    """Operator and reason of a cordon."""
    by = f" by {one_line(cordon.cordoned_by)}" if cordon.cordoned_by else ""
    return f"cordoned{by}: {one_line(cordon.reason)}"


def _foreign_text(process: ForeignProcess) -> str:
    words = [f"pid {process.pid}"]
    words += [f"of {one_line(process.user)}"] if process.user else []
    words += [f"({one_line(process.command)})"] if process.command else []
    if process.HasField("device_memory_bytes"):
        words.append(f"holds {size_text(process.device_memory_bytes)}")
    if process.workload_id:
        words.append(f"of workload {one_line(process.workload_name)}, which does not lease it")
    return " ".join(words)


def echo_workloads(workloads: Iterable[Workload], gpus: Iterable[FleetGpu]) -> None:
    """Prints a table of workloads, with their GPUs as worker/slot.

    The column ORIGIN is shown if a worker did not start all of the workloads, USER then too and for several
    users, OWNER for several owners, and EVICTION if a workload has a policy.
    """
    places = gpu_places(gpus)
    listed = list(workloads)
    columns: list[tuple[str, list[str]]] = [
        ("NAME", [workload.name for workload in listed]),
        ("STATE", [workload_state(workload) for workload in listed]),
        ("GPUS", [_places(workload, places) for workload in listed]),
        ("PARKED", [_parked(workload) for workload in listed]),
        ("PID", [_pid(workload) for workload in listed]),
        ("CREATED", [time_text(workload.create_time) for workload in listed]),
        ("ID", [workload.workload_id for workload in listed]),
    ]
    if any(
        workload.spec.HasField("eviction") or workload.status.HasField("parked_by") for workload in listed
    ):
        columns.insert(4, ("EVICTION", [_eviction(workload) for workload in listed]))
    is_mixed = any(workload.origin not in STARTED_HERE for workload in listed)
    if is_mixed or len({workload.user for workload in listed if workload.user}) > 1:
        columns.insert(2, ("USER", [workload.user or "-" for workload in listed]))
    if len({workload.owner for workload in listed if workload.owner}) > 1:
        columns.insert(2, ("OWNER", [workload.owner or "-" for workload in listed]))
    if is_mixed:
        columns.insert(2, ("ORIGIN", [_origin(workload) for workload in listed]))
    cells = [cells for _, cells in columns]
    echo_table([heading for heading, _ in columns], zip(*cells, strict=True))


def _places(workload: Workload, places: dict[str, str]) -> str:
    return ",".join(places.get(uuid, uuid) for uuid in workload.status.lease.gpu_uuids) or "-"


def _parked(workload: Workload) -> str:
    """Sizes of a suspended workload in host memory and on disk."""
    status = workload.status
    parts = [size_text(status.parked_bytes)] if status.HasField("parked_bytes") else []
    parts += [f"{size_text(status.disk_bytes)} on disk"] if status.HasField("disk_bytes") else []
    return ", ".join(parts) or "-"


def _eviction(workload: Workload) -> str:
    """Policy of the last suspend, or else of the spec. "-": neither."""
    if workload.status.HasField("parked_by"):
        return policy_text(workload.status.parked_by)
    return policy_text(workload.spec.eviction) if workload.spec.HasField("eviction") else "-"


def _pid(workload: Workload) -> str:
    return str(workload.status.root_pid) if workload.status.HasField("root_pid") else "-"


def _origin(workload: Workload) -> str:
    if workload.origin in STARTED_HERE:
        return "run"
    return enum_name(WorkloadOrigin.Name, workload.origin, "WORKLOAD_ORIGIN_").lower()
