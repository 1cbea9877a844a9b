"""Descriptions: all about one object, as fields and sections for people."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.checkpoint_pb2 import Checkpoint, CheckpointKind
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.eviction_pb2 import PROCESS_STRATEGY_STOP
from leasehold.v1.gpu_pb2 import GpuHealth
from leasehold.v1.worker_pb2 import FleetGpu, Worker, WorkerState
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_EXITED, MemberState, Workload

from leasehold_client.arguments.gpu_names import gpu_place, with_places
from leasehold_client.arguments.policies import policy_text
from leasehold_client.byte_sizes import size_text
from leasehold_client.coordinator.command_watch import has_ended
from leasehold_client.display import terminal
from leasehold_client.display.fleet_tables import (
    cordon_text,
    gpu_reason,
    labels_text,
    origin_text,
    slot_state,
)
from leasehold_client.display.outcome import failure_lines, timing_line
from leasehold_client.display.standard_output import echo_escaped
from leasehold_client.display.tables import field_size, field_text
from leasehold_client.display.terminal_text import safe_cell
from leasehold_client.messages import (
    actor_text,
    command_state,
    duration_s,
    enum_name,
    is_partial,
    moment_text,
    operation_name,
    workload_state,
)

NONE: Final = "-"


@final
@dataclass(slots=True)
class Description:
    """Fields of an object, in order.

    Attributes:
        fields: Name and text of each field. A text that is empty is not shown.
        state: Name of the field with the state, which has a colour.
    """

    fields: list[tuple[str, str]] = field(default_factory=list)
    state: str = "State"

    def add(self, name: str, text: object) -> None:
        """Adds a field."""
        self.fields.append((name, str(text)))

    def add_time(self, name: str, moment: Timestamp) -> None:
        """Adds a time with its zone and its distance from now, unless it is unset."""
        self.add(name, "" if moment_text(moment) == NONE else moment_text(moment))

    def echo(self) -> None:
        """Prints the fields, aligned."""
        shown = [(safe_cell(name), safe_cell(text)) for name, text in self.fields if text]
        width = max((len(name) for name, _ in shown), default=0) + 2
        for name, safe in shown:
            if name == self.state and terminal.has_colour():
                safe = terminal.coloured(safe, safe)
            echo_escaped(f"{f'{name}:'.ljust(width)} {safe}")


def describe_workload(workload: Workload, worker: str, places: Mapping[str, str]) -> Description:
    """The fields of a workload.

    Args:
        workload: The workload.
        worker: Name of its worker.
        places: Short names of GPUs by UUID.
    """
    shown = Description()
    spec, status, is_whole = workload.spec, workload.status, not is_partial(workload)
    shown.add("Name", workload.name)
    shown.add("Id", workload.workload_id)
    shown.add("State", workload_state(workload))
    if status.HasField("error"):
        shown.add("Error", with_places(status.error.message, places))
    shown.add("Worker", worker)
    shown.add("Owner", workload.owner or NONE)
    shown.add("Unix user", workload.user)
    shown.add("Origin", origin_text(workload) if is_whole else "")
    shown.add("Program", " ".join(spec.arguments))
    shown.add("Directory", spec.working_directory)
    shown.add("Variables", ", ".join(sorted([*spec.environment, *spec.secret_environment])))
    shown.add("GPUs", _gpus(status.lease.gpu_uuids, places) or NONE)
    shown.add("Former GPUs", _gpus(status.parked_gpu_uuids, places))
    shown.add("Needs", _needs(workload))
    shown.add("Priority", spec.priority if spec.HasField("priority") else "")
    if spec.HasField("helper"):
        end = "stopped" if spec.helper.process_strategy == PROCESS_STRATEGY_STOP else "suspended"
        grace_s = duration_s(spec.helper.grace) if spec.helper.HasField("grace") else 10
        shown.add("Preemptible", f"{end} {grace_s:g} s after a yield request")
    shown.add("Eviction policy", policy_text(spec.eviction) if is_whole else "")
    shown.add("Suspended by", policy_text(status.parked_by) if status.HasField("parked_by") else "")
    shown.add("In host memory", size_text(status.parked_bytes) if status.HasField("parked_bytes") else "")
    shown.add("On disk", size_text(status.disk_bytes) if status.HasField("disk_bytes") else "")
    shown.add("Checkpoint", status.checkpoint_id)
    shown.add("Hooks", ", ".join(f"{hook.name} ({hook.WhichOneof('action')})" for hook in spec.hooks))
    if status.HasField("kernel"):
        shown.add("Application", f"{status.kernel.kind} {status.kernel.kernel_id}")
    shown.add("Labels", labels_text(workload.labels) if is_whole else "")
    shown.add("Annotations", labels_text(workload.annotations) if workload.annotations else "")
    shown.add_time("Created", workload.create_time)
    shown.add_time("Started", status.start_time)
    shown.add_time("Ready", status.ready_time)
    shown.add_time("Suspended", status.park_time)
    shown.add_time("Ended", status.end_time)
    if status.state == WORKLOAD_STATE_EXITED and status.HasField("end_time") and not status.HasField("exit"):
        shown.add("Exit", "unknown: only the parent of the program learns it")
    shown.add("First process", status.root_pid if status.HasField("root_pid") else "")
    shown.add("Generation", status.generation if is_whole else "")
    for member in status.members:
        used = ", ".join(
            f"{places.get(uuid, uuid)} {size_text(used_bytes)}"
            for uuid, used_bytes in sorted(member.device_memory_bytes.items())
        )
        state = enum_name(MemberState.Name, member.state, "MEMBER_STATE_")
        shown.add(f"Process {member.pid}", f"{state}{f', {used}' if used else ''}")
    return shown


def _gpus(uuids: Iterable[str], places: Mapping[str, str]) -> str:
    return ", ".join(f"{places[uuid]} ({uuid})" if uuid in places else uuid for uuid in uuids)


def _needs(workload: Workload) -> str:
    needed = workload.spec.resources
    parts = [f"{needed.gpu_count} GPU{'' if needed.gpu_count == 1 else 's'}"] if needed.gpu_count else []
    parts += [f"{needed.gpu_name}"] if needed.HasField("gpu_name") else []
    parts += (
        [f"{size_text(needed.gpu_memory_bytes)} on each GPU"] if needed.HasField("gpu_memory_bytes") else []
    )
    parts += [f"{needed.gpu_units} GPU units"] if needed.HasField("gpu_units") else []
    parts += [f"{needed.cpu_millicores / 1000:g} cores"] if needed.HasField("cpu_millicores") else []
    parts += [f"{size_text(needed.memory_bytes)} memory"] if needed.HasField("memory_bytes") else []
    parts += [f"{size_text(needed.disk_bytes)} disk"] if needed.HasField("disk_bytes") else []
    return ", ".join(parts)


def describe_worker(worker: Worker) -> Description:
    """The fields of a worker."""
    shown = Description()
    state = enum_name(WorkerState.Name, worker.state, "WORKER_STATE_")
    shown.add("Name", worker.name)
    shown.add("Id", worker.worker_id)
    shown.add("State", f"{state},cordoned" if worker.HasField("cordon") else state)
    if worker.HasField("cordon"):
        shown.add("Cordon", cordon_text(worker.cordon))
    shown.add("Refused", worker.refusal)
    if worker.HasField("session_encrypted"):
        shown.add("Session", f"{'TLS' if worker.session_encrypted else 'without TLS'}, epoch {worker.epoch}")
    shown.add_time("Seen", worker.last_seen_time)
    shown.add("Agent", worker.agent_version)
    shown.add("Driver", worker.driver_version)
    if worker.HasField("cuda_version"):
        shown.add("CUDA", f"{worker.cuda_version // 1000}.{worker.cuda_version % 1000 // 10}")
    host = worker.host
    shown.add("Host", ", ".join(filter(None, [host.hostname, host.architecture, host.kernel_release])))
    for name, counted in (
        ("GPUs", "gpu_count"),
        ("Free GPUs", "free_gpu_count"),
        ("Suspended workloads", "parked_workload_count"),
        ("Waiting claims", "pending_claimers"),
    ):
        shown.add(name, field_text(worker, counted))
    if worker.HasField("resources"):
        machine = worker.resources
        cores = (machine.cpu_millicores_free / 1000, machine.cpu_millicores_total / 1000)
        shown.add("Cores", f"{cores[0]:g} of {cores[1]:g} free")
        shown.add(
            "Memory",
            f"{size_text(machine.memory_free_bytes)} of {size_text(machine.memory_total_bytes)} free",
        )
        shown.add(
            "Disk", f"{size_text(machine.disk_free_bytes)} of {size_text(machine.disk_total_bytes)} free"
        )
    shown.add("Labels", labels_text(worker.labels))
    for capability in worker.capabilities:
        text = "yes" if capability.available else f"no: {capability.reason}"
        shown.add(f"Capability {capability.name}", text)
    return shown


def describe_gpu(gpu: FleetGpu) -> Description:
    """The fields of a GPU with its lease."""
    shown = Description()
    lease, sample, device = gpu.lease, gpu.lease.sample, gpu.gpu
    shown.add("Name", gpu_place(gpu))
    shown.add("UUID", device.uuid)
    shown.add("State", slot_state(gpu))
    shown.add_time("Seen", gpu.report_time)
    shown.add("Reason", gpu_reason(lease))
    shown.add("Workload", gpu.workload_name or lease.workload_id or NONE)
    shown.add_time("Since", lease.since)
    shown.add("Health", enum_name(GpuHealth.Name, lease.health, "GPU_HEALTH_"))
    shown.add("Product", device.name)
    for name, known in (
        ("Compute capability", "compute_capability"),
        ("PCI address", "pci_bus_id"),
        ("Serial number", "serial"),
        ("NUMA node", "numa_node"),
        ("MIG", "mig_enabled"),
        ("Persistence mode", "persistence_mode"),
    ):
        shown.add(name, field_text(device, known, unknown=""))
    shown.add("Units", device.units or "")
    used, total = field_size(sample, "memory_used_bytes"), field_size(sample, "memory_total_bytes")
    shown.add("Memory", f"{used} of {total} used")
    for name, known, unit in (
        ("Utilization", "utilization_percent", "%"),
        ("Temperature", "temperature_celsius", " C"),
        ("Uncorrected errors", "ecc_uncorrected_errors", ""),
    ):
        shown.add(name, field_text(sample, known, unit))
    shown.add_time("Measured", sample.sample_time)
    return shown


def describe_command(
    command: Command, about: str, places: Mapping[str, str], preempted: Iterable[str]
) -> Description:
    """The fields of a command.

    Args:
        command: The command.
        about: Names of its workload, GPUs or worker.
        places: Short names of GPUs by UUID.
        preempted: Names of the workloads that it suspended first.
    """
    shown = Description()
    result = command.result
    shown.add("Id", command.command_id)
    shown.add("Operation", operation_name(command))
    shown.add("About", about)
    shown.add("Reason", command.operation.cordon.reason)
    shown.add("State", command_state(command))
    shown.add("Phase", command.phase)
    if command.cancel_requested and not has_ended(command.state):
        shown.add("Cancellation", "requested")
    elif command.cancel_requested and command.state == COMMAND_STATE_SUCCEEDED:
        shown.add("Cancellation", "requested too late")
    shown.add("Actor", actor_text(command))
    shown.add("Owners", ", ".join(command.owners))
    shown.add_time("Created", command.create_time)
    shown.add_time("Changed", command.update_time)
    shown.add_time("Ended", command.end_time)
    shown.add("Timeout", f"{duration_s(command.timeout):g} s" if command.HasField("timeout") else "")
    if command.HasField("error"):
        for number, line in enumerate(failure_lines(command)):
            shown.add("Error" if not number else f"Error {number + 1}", with_places(line, places))
    if command.HasField("result"):
        has_duration = result.HasField("duration")
        shown.add("Duration", f"{duration_s(result.duration):.2f} s" if has_duration else "")
        shown.add("Phases", timing_line(result))
        shown.add("Policy", policy_text(result.policy) if result.HasField("policy") else "")
        shown.add("Released GPUs", _gpus(result.released_gpu_uuids, places))
        shown.add("Claimed GPUs", _gpus(result.claimed_gpu_uuids, places))
        shown.add("Preempted", ", ".join(preempted))
        shown.add("Checkpoint", result.checkpoint_id)
        shown.add("Hold", result.hold_id)
    return shown


def describe_checkpoint(checkpoint: Checkpoint, worker: str) -> Description:
    """The fields of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        worker: Name of the worker that has the checkpoint.
    """
    shown = Description()
    shown.add("Id", checkpoint.checkpoint_id)
    shown.add("Kind", enum_name(CheckpointKind.Name, checkpoint.kind, "CHECKPOINT_KIND_").lower())
    shown.add("Problem", checkpoint.problem)
    shown.add("Workload", checkpoint.workload_name or checkpoint.workload_id)
    shown.add("Owner", checkpoint.owner)
    shown.add("Worker", worker)
    shown.add("Size", size_text(checkpoint.size_bytes))
    in_use = "yes" if checkpoint.in_use else "no"
    shown.add("In use", "unknown" if checkpoint.in_use_unknown else in_use)
    shown.add_time("Created", checkpoint.create_time)
    for name in sorted(checkpoint.custom):
        shown.add(name, checkpoint.custom[name])
    return shown


def heading(text: str) -> str:
    """The line above a section, after an empty line."""
    return f"\n{text}:"


SECTION_LIMIT: Final = 10
"""Most commands or events of a description."""
