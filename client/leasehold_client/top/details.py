"""All that is known of one row, as lines. Pure."""

from collections.abc import Mapping, Sequence
from typing import assert_never

from leasehold.v1 import errors_pb2, worker_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.worker_pb2 import Worker, WorkerState
from leasehold.v1.workload_pb2 import KernelHealth, MemberState, Workload

from leasehold_client.aio.command_watch import has_ended
from leasehold_client.arguments.gpu_names import gpu_place, with_places
from leasehold_client.arguments.policies import policy_text
from leasehold_client.byte_sizes import size_text
from leasehold_client.display.fleet_tables import cordon_text, gpu_reason
from leasehold_client.display.outcome import failure_lines, timing_line
from leasehold_client.display.tables import field_size, table_lines
from leasehold_client.display.terminal_text import one_line
from leasehold_client.messages import (
    PARKED,
    ago_text,
    duration_s,
    enum_name,
    is_partial,
    moment_text,
    operation_name,
    reason_name,
    workload_state,
)
from leasehold_client.top.parked_sizes import parked_size_text
from leasehold_client.top.row_text import parked_age, phase_text
from leasehold_client.top.rows import (
    ClaimsRow,
    CommandRow,
    HostRow,
    Row,
    SlotRow,
    WorkloadRow,
    waiting_claims,
)


def detail_lines(row: Row, places: Mapping[str, str], now_s: float) -> list[str]:
    """The facts about a row.

    Args:
        row: The row.
        places: Short names of GPUs by UUID.
        now_s: The present, in seconds of the Unix epoch.
    """
    match row:
        case HostRow():
            return _host_lines(row, now_s)
        case SlotRow():
            return _slot_lines(row, places, now_s)
        case WorkloadRow():
            return _workload_lines(row.workload, places, now_s)
        case ClaimsRow():
            return [
                "Programs of this host wait for GPUs: `leasehold exec`, and claims of the local API.",
                "`leasehold local leases` on the host shows each of them.",
            ]
        case CommandRow():
            lines = _command_lines(row.command, row.about, row.worker_name, now_s)
            return [with_places(line, places) for line in lines]
        case _:
            assert_never(row)


def row_title(row: Row) -> str:
    """The title of a row's details: kind and name of its object."""
    match row:
        case HostRow():
            return f"host {row.worker.name}"
        case SlotRow():
            return f"GPU {gpu_place(row.gpu)}"
        case WorkloadRow():
            return f"workload {row.workload.name}"
        case ClaimsRow():
            return f"waiting claims of {row.worker.name}"
        case CommandRow():
            return f"{operation_name(row.command)} of {row.about}"
        case _:
            assert_never(row)


def _facts(facts: Sequence[tuple[str, str]]) -> list[str]:
    """Aligned names and values. A fact without a value is left out."""
    return table_lines([(name, one_line(value)) for name, value in facts if value])


def _host_lines(row: HostRow, now_s: float) -> list[str]:
    worker = row.worker
    counts = f"{worker.free_gpu_count} of {worker.gpu_count} free" if worker.HasField("gpu_count") else "?"
    state = enum_name(WorkerState.Name, worker.state, "WORKER_STATE_")
    # A watch tells no new time of a worker in contact, so its last one would look old.
    if worker.state != worker_pb2.WORKER_STATE_CONNECTED:
        state += f", last seen {ago_text(worker.last_seen_time, now_s)}"
    lines = _facts(
        [
            ("state", state),
            ("cordon", cordon_text(worker.cordon) if worker.HasField("cordon") else ""),
            ("GPUs", counts),
            ("parked", ", ".join(f"{one.name} {parked_size_text(one)}" for one in row.parked)),
            ("waiting", _claims_text(waiting_claims(worker))),
            *_machine_facts(worker),
            ("driver", worker.driver_version or "?"),
            ("agent", worker.agent_version),
            ("host", f"{worker.host.hostname}, Linux {worker.host.kernel_release}"),
            ("labels", ", ".join(f"{key}={value}" for key, value in sorted(worker.labels.items()))),
            ("id", worker.worker_id),
        ]
    )
    missing = [one for one in worker.capabilities if not one.available]
    return [*lines, *(f"without {one.name}: {one_line(one.reason)}" for one in missing)]


def _machine_facts(worker: Worker) -> list[tuple[str, str]]:
    if not worker.HasField("resources"):
        return []
    machine = worker.resources
    cores = f"{machine.cpu_millicores_free / 1000:g} of {machine.cpu_millicores_total / 1000:g} cores free"
    memory = f"{size_text(machine.memory_free_bytes)} of {size_text(machine.memory_total_bytes)} free"
    disk = f"{size_text(machine.disk_free_bytes)} of {size_text(machine.disk_total_bytes)} free"
    return [("processors", cores), ("memory", memory), ("disk", disk)]


def _slot_lines(row: SlotRow, places: Mapping[str, str], now_s: float) -> list[str]:
    gpu, sample = row.gpu, row.sample
    busy = f"{sample.utilization_percent}%" if sample.HasField("utilization_percent") else "?"
    heat = f"{sample.temperature_celsius} C" if sample.HasField("temperature_celsius") else "?"
    used = f"{field_size(sample, 'memory_used_bytes')} of {field_size(gpu.gpu, 'memory_total_bytes')}"
    lines = _facts(
        [
            ("model", gpu.gpu.name),
            ("state", enum_name(SlotState.Name, gpu.lease.state, "SLOT_STATE_").lower()),
            ("since", ago_text(gpu.lease.since, now_s)),
            ("attention", gpu_reason(gpu.lease)),
            ("memory", used),
            ("busy", busy),
            ("temperature", heat),
            ("PCI", gpu.gpu.pci_bus_id),
            ("UUID", gpu.gpu.uuid),
        ]
    )
    if row.workload is None:
        return lines
    return [*lines, "", f"workload {row.workload.name}", *_workload_lines(row.workload, places, now_s)]


def _workload_lines(workload: Workload, places: Mapping[str, str], now_s: float) -> list[str]:
    status, spec = workload.status, workload.spec
    held = ", ".join(places.get(uuid, uuid) for uuid in status.lease.gpu_uuids)
    former = ", ".join(places.get(uuid, uuid) for uuid in status.parked_gpu_uuids)
    error = ""
    if status.HasField("error"):
        error = f"{with_places(status.error.message, places)} ({reason_name(status.error.reason)})"
    parked = f"{parked_size_text(workload)}, for {parked_age(workload, now_s)}"
    policy = policy_text(spec.eviction) if spec.HasField("eviction") else "default"
    kernel = status.kernel
    lines = _facts(
        [
            ("state", workload_state(workload)),
            ("error", error),
            ("GPUs", held),
            ("parked", parked if status.state in PARKED else ""),
            ("former GPUs", former),
            ("policy", "" if is_partial(workload) else policy),
            ("parked by", policy_text(status.parked_by) if status.HasField("parked_by") else ""),
            ("owner", workload.owner),
            ("user", workload.user),
            ("program", " ".join(spec.arguments)),
            ("created", moment_text(workload.create_time, now_s)),
            ("checkpoint", status.checkpoint_id),
            ("kernel", _kernel_text(kernel.kind, kernel.health) if status.HasField("kernel") else ""),
            ("hooks", str(len(spec.hooks)) if spec.hooks else ""),
            ("labels", ", ".join(f"{key}={value}" for key, value in sorted(workload.labels.items()))),
            ("id", workload.workload_id),
        ]
    )
    members = [
        [
            f"pid {member.pid}",
            enum_name(MemberState.Name, member.state, "MEMBER_STATE_"),
            ", ".join(
                f"{places.get(uuid, uuid)} {size_text(used)}"
                for uuid, used in sorted(member.device_memory_bytes.items())
            ),
        ]
        for member in status.members
    ]
    return [*lines, *table_lines(members)]


def _kernel_text(kind: str, health: KernelHealth.ValueType) -> str:
    return f"{kind}, {enum_name(KernelHealth.Name, health, 'KERNEL_HEALTH_').lower()}"


def _command_lines(command: Command, about: str, worker_name: str, now_s: float) -> list[str]:
    timeout, result = f"{duration_s(command.timeout):g} s, with the wait", command.result
    lines = _facts(
        [
            ("about", about),
            ("reason", command.operation.cordon.reason),
            ("worker", worker_name),
            ("state", enum_name(CommandState.Name, command.state, "COMMAND_STATE_")),
            ("phase", "" if has_ended(command.state) else phase_text(command)),
            ("created", moment_text(command.create_time, now_s)),
            ("timeout", timeout if command.HasField("timeout") else ""),
            ("by", command.actor),
            ("for", command.on_behalf_of),
            ("took", f"{duration_s(result.duration):.2f} s" if result.HasField("duration") else ""),
            ("phases", timing_line(command.result)),
            ("id", command.command_id),
        ]
    )
    if command.error.reason != errors_pb2.ERROR_REASON_UNSPECIFIED:
        return [*lines, "", *failure_lines(command)]
    return [*lines, *(f"warning: {warning}" for warning in command.result.warnings)]


def _claims_text(count: int) -> str:
    return f"{count} claim{'' if count == 1 else 's'}" if count else ""
