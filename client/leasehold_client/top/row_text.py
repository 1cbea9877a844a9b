"""Rows as pieces of text, for any width. Each state has a letter and a word, not only a colour. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple, assert_never

from leasehold.v1 import command_pb2, gpu_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandResult
from leasehold.v1.gpu_pb2 import GpuHealth, GpuSample
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.worker_pb2 import FleetGpu, WorkerState
from leasehold.v1.workload_pb2 import Workload, WorkloadState

from leasehold_client.aio.command_watch import has_ended
from leasehold_client.arguments.gpu_names import with_places
from leasehold_client.arguments.policies import policy_text
from leasehold_client.byte_sizes import size_text
from leasehold_client.display.fleet_tables import UNREMARKABLE, cordon_text, gpu_reason, no_commands_text
from leasehold_client.display.outcome import failure_text, seconds_text, timing_line
from leasehold_client.display.terminal import shortened
from leasehold_client.messages import (
    PARKED,
    actor_text,
    age_text,
    ago_text,
    command_state,
    duration_s,
    enum_name,
    operation_name,
    span_text,
    workload_state,
)
from leasehold_client.top.parked_sizes import parked_size, parked_size_text
from leasehold_client.top.rows import (
    ClaimsRow,
    CommandRow,
    HostRow,
    Row,
    SlotRow,
    WorkloadRow,
    waiting_claims,
)

LONG_NAMES: Final = 120
"""Width in columns from which names have more room."""

WIDE: Final = 180
"""Width in columns from which rows have further columns."""

REST: Final = 0
"""Width of a piece that takes the rest of its line."""


class Piece(NamedTuple):
    """A part of a line.

    Attributes:
        text: The text, from peers too: escape it.
        width: Width in columns. :data:`REST`: the rest of the line.
        style: A style of rich, with colours of the terminal's own palette.
    """

    text: str
    width: int = REST
    style: str = ""


class _Look(NamedTuple):
    letter: str
    style: str


_SLOTS: Final[dict[SlotState.ValueType, _Look]] = {
    lease_pb2.SLOT_STATE_FREE: _Look(".", "green"),
    lease_pb2.SLOT_STATE_RESERVED: _Look("r", "cyan"),
    lease_pb2.SLOT_STATE_LEASED: _Look("#", "bold blue"),
    lease_pb2.SLOT_STATE_CORDONED: _Look("c", "yellow"),
    lease_pb2.SLOT_STATE_UNHEALTHY: _Look("!", "bold red"),
    lease_pb2.SLOT_STATE_FOREIGN: _Look("f", "magenta"),
}
_UNKNOWN: Final = _Look("?", "yellow")

LEGEND: Final = (
    "# leased   . free   r reserved   c cordoned",
    "! unhealthy   f foreign process   ? unknown",
    "P parked   W waiting",
)
"""The letters."""

_WORKERS: Final[dict[WorkerState.ValueType, str]] = {
    worker_pb2.WORKER_STATE_CONNECTED: "green",
    worker_pb2.WORKER_STATE_STALE: "yellow",
    worker_pb2.WORKER_STATE_LOST: "bold red",
    worker_pb2.WORKER_STATE_UNCONFIRMED: "yellow",
    worker_pb2.WORKER_STATE_DISCONNECTED: "yellow",
}

_BAD_STATES: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_WEDGED,
        workload_pb2.WORKLOAD_STATE_UNKNOWN,
        workload_pb2.WORKLOAD_STATE_FAILED,
    }
)

_GIB: Final = 2**30


def row_pieces(row: Row, now_s: float, width: int) -> list[Piece]:
    """The pieces of a row.

    Args:
        row: The row.
        now_s: The present, in seconds of the Unix epoch.
        width: Width of the line in columns.
    """
    match row:
        case HostRow():
            return _host_pieces(row, now_s, width)
        case SlotRow():
            return _slot_pieces(row, now_s, width)
        case WorkloadRow():
            return _workload_pieces(row.workload, now_s, width)
        case ClaimsRow():
            count = row.worker.pending_claimers
            text = f"{count} claim{' waits' if count == 1 else 's wait'} for GPUs of this host"
            return [Piece("      W waiting   ", 18, "bold yellow"), Piece(text)]
        case CommandRow():
            return _command_pieces(row, now_s, width)
        case _:
            assert_never(row)


def _name_width(width: int) -> int:
    return 30 if width >= LONG_NAMES else 15


def _host_pieces(row: HostRow, now_s: float, width: int) -> list[Piece]:
    worker = row.worker
    state = enum_name(worker_pb2.WorkerState.Name, worker.state, "WORKER_STATE_").lower()
    is_connected = worker.state == worker_pb2.WORKER_STATE_CONNECTED
    looks = [_SLOTS.get(gpu.lease.state, _UNKNOWN) for gpu in row.gpus]
    free = f"{worker.free_gpu_count}/{worker.gpu_count} free" if worker.HasField("gpu_count") else "GPUs: ?"
    facts = [free]
    if row.parked:
        facts.append(parked_text(row.parked))
    if waiting := waiting_claims(worker):
        facts.append(f"{waiting} waiting")
    if not is_connected:
        facts.append(f"seen {ago_text(worker.last_seen_time, now_s)}")
    if worker.HasField("cordon"):
        facts.append(cordon_text(worker.cordon))
    if no_commands := no_commands_text(worker):
        facts.append(no_commands)
    if width >= WIDE:
        if worker.HasField("host_memory_available_bytes"):
            facts.append(f"{size_text(worker.host_memory_available_bytes)} host memory available")
        facts.append(f"driver {worker.driver_version}" if worker.driver_version else "no driver known")
    pieces = [
        Piece("- " if row.is_open else "+ ", 2, "bold"),
        Piece(worker.name, _name_width(width), "bold"),
        Piece(" ", 1),
        Piece(state.upper() if not is_connected else state, 13, _WORKERS.get(worker.state, "")),
    ]
    pieces += [Piece(look.letter, 1, look.style) for look in looks]
    return [*pieces, Piece("  ", 2), Piece(", ".join(facts))]


def _slot_pieces(row: SlotRow, now_s: float, width: int) -> list[Piece]:
    gpu = row.gpu
    look = _SLOTS.get(gpu.lease.state, _UNKNOWN)
    state = enum_name(lease_pb2.SlotState.Name, gpu.lease.state, "SLOT_STATE_").lower()
    holder = gpu.workload_name or gpu.lease.workload_id or "-"
    reason = gpu_reason(gpu.lease)
    pieces = [
        Piece("  ", 2),
        Piece(f"{gpu.gpu.slot:>3}", 4),
        Piece(f"{look.letter} {state}", 12, look.style),
        Piece(holder, _name_width(width)),
        Piece(" ", 1),
    ]
    if width < WIDE and reason:  # a problem matters more than measurements
        return [*pieces, Piece(reason, style="yellow")]
    pieces += _sample_pieces(row.sample, gpu)
    pieces.append(Piece(f" {age_text(gpu.lease.since, now_s)}", 12))
    if width < WIDE:
        return [*pieces, Piece(_state_beside(row.workload), style=_workload_style(row.workload))]
    health = "ok" if gpu.lease.health == gpu_pb2.GPU_HEALTH_OK else _health(gpu)
    is_well = gpu.lease.health in UNREMARKABLE
    return [
        *pieces,
        Piece(health, 13, "" if is_well else "bold red"),
        Piece(_state_beside(row.workload), 18, _workload_style(row.workload)),
        Piece(_policy(row.workload), 22),
        Piece(gpu.gpu.name, 24),
        Piece(reason, style="yellow"),
    ]


def _health(gpu: FleetGpu) -> str:
    if gpu.lease.health == gpu_pb2.GPU_HEALTH_UNSPECIFIED:
        return "health ?"
    return enum_name(GpuHealth.Name, gpu.lease.health, "GPU_HEALTH_")


def _sample_pieces(sample: GpuSample, gpu: FleetGpu) -> list[Piece]:
    """Memory, utilisation and temperature. "?": unknown."""
    used = f"{sample.memory_used_bytes / _GIB:.1f}" if sample.HasField("memory_used_bytes") else "?"
    known = sample if sample.HasField("memory_total_bytes") else gpu.gpu
    total = f"{known.memory_total_bytes / _GIB:.0f}" if known.HasField("memory_total_bytes") else "?"
    busy = f"{sample.utilization_percent}%" if sample.HasField("utilization_percent") else "?"
    heat = f"{sample.temperature_celsius} C" if sample.HasField("temperature_celsius") else "?"
    return [Piece(f"{used}/{total} GiB", 13), Piece(f"{busy:>4}", 5), Piece(f"{heat:>5}", 6)]


def _state_beside(workload: Workload | None) -> str:
    """The state of a slot's workload, unless it runs and is ready."""
    if workload is None:
        return ""
    state = workload_state(workload)
    return "" if state == "RUNNING" else state


def _workload_style(workload: Workload | None) -> str:
    if workload is None:
        return ""
    return "bold red" if workload.status.state in _BAD_STATES else "cyan"


def _policy(workload: Workload | None) -> str:
    if workload is None or not workload.spec.HasField("eviction"):
        return ""
    return policy_text(workload.spec.eviction)


def _workload_pieces(workload: Workload, now_s: float, width: int) -> list[Piece]:
    is_parked = workload.status.state in PARKED
    word = enum_name(WorkloadState.Name, workload.status.state, "WORKLOAD_STATE_").lower()
    age = age_text(workload.create_time, now_s)
    if is_parked:
        age = parked_age(workload, now_s)
    pieces = [
        Piece("", 3),
        Piece(f"P {word}" if is_parked else f"- {word}", 15, _workload_style(workload)),
        Piece(workload.name, _name_width(width)),
        Piece(" ", 1),
        Piece(parked_size_text(workload) if is_parked else "holds no GPU", 25),
        Piece(age, 10),
    ]
    state = workload_state(workload)
    if width < WIDE:
        return [*pieces, Piece("" if state == word.upper() else state)]
    by = policy_text(workload.status.parked_by) if workload.status.HasField("parked_by") else ""
    return [*pieces, Piece(state, 31, _workload_style(workload)), Piece(by)]


def parked_age(workload: Workload, now_s: float) -> str:
    """The time since the suspend. "?": unknown."""
    return age_text(workload.status.park_time, now_s) if workload.status.HasField("park_time") else "?"


def parked_text(parked: Sequence[Workload]) -> str:
    """The number of parked workloads with the sum of their bytes. Those of others have unknown sizes."""
    known = [size for one in parked if (size := parked_size(one).size) is not None]
    count, unknown = f"{len(parked)} parked", len(parked) - len(known)
    if not known:
        return f"{count}, size unknown"
    return f"{count}, {size_text(sum(known))}" + (f" and {unknown} of unknown size" if unknown else "")


def _command_pieces(row: CommandRow, now_s: float, width: int) -> list[Piece]:
    command = row.command
    is_over = has_ended(command.state)
    state = command_state(command)
    style = _COMMANDS.get(command.state, "bold red" if is_over else "bold cyan")
    begun_s = command.create_time.seconds
    since = span_text(now_s - begun_s)
    if is_over:
        since = ago_text(command.end_time, now_s) if command.HasField("end_time") else "?"
    pieces = [
        Piece("  ", 2),
        Piece(shortened(operation_name(command), 10), 11),
        Piece(row.about, _name_width(width)),
        Piece(" ", 1),
        Piece(state, 11, style),
        Piece(since if begun_s else "?", 12),
    ]
    if width >= WIDE:
        pieces += [Piece(row.worker_name, 20), Piece(" ", 1), Piece(actor_text(command), 24), Piece(" ", 1)]
    return [*pieces, Piece(with_places(progress_text(command), row.places))]


def progress_text(command: Command) -> str:
    """The phase of an open command, the phases of a successful one with their rates, or the failure."""
    if not has_ended(command.state):
        progress = phase_text(command)
        return f"{progress}, cancellation requested" if command.cancel_requested else progress
    if command.state == command_pb2.COMMAND_STATE_SUCCEEDED:
        return _success_text(command.result) if command.HasField("result") else "?"
    return failure_text(command)


def phase_text(command: Command) -> str:
    """The phase of an open command. "?": a running one whose phase is hidden."""
    is_running = command.state == command_pb2.COMMAND_STATE_RUNNING
    return command.phase or ("?" if is_running else "waits for its worker")


def _success_text(result: CommandResult) -> str:
    if result.already_there:
        return "nothing to do"
    took = f"took {seconds_text(duration_s(result.duration))}" if result.HasField("duration") else "took ?"
    return f"{took}: {phases}" if (phases := timing_line(result)) else took


_COMMANDS: Final[dict[int, str]] = {
    command_pb2.COMMAND_STATE_SUCCEEDED: "green",
    command_pb2.COMMAND_STATE_CANCELLED: "yellow",
    command_pb2.COMMAND_STATE_UNKNOWN: "bold yellow",
}
