"""The rows of the list: hosts, and below each its GPUs, its other workloads and its waiting claims. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from leasehold.v1 import lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.gpu_pb2 import GpuSample
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.arguments.gpu_names import places_text
from leasehold_client.messages import PARKED, enum_name, gpu_targets, workload_targets
from leasehold_client.top.fleet_model import FleetModel
from leasehold_client.top.parked_sizes import parked_size
from leasehold_client.top.plain_filter import contains_words

OPEN_HOSTS_LIMIT: Final = 64
"""Largest fleet whose hosts are open at first."""


@final
@dataclass(frozen=True, slots=True)
class HostRow:
    """A host, with all its GPUs and with the workloads that hold none of them."""

    worker: Worker
    gpus: Sequence[FleetGpu]
    others: Sequence[Workload]
    is_open: bool

    @property
    def key(self) -> str:
        """Identifies the row among all rows."""
        return f"host {self.worker.worker_id}"

    @property
    def parked(self) -> list[Workload]:
        """The parked workloads."""
        return [workload for workload in self.others if workload.status.state in PARKED]


@final
@dataclass(frozen=True, slots=True)
class SlotRow:
    """A GPU of a host, with its newest measurements and the workload that leases it."""

    gpu: FleetGpu
    sample: GpuSample
    workload: Workload | None

    @property
    def key(self) -> str:
        """Identifies the row among all rows."""
        return f"gpu {self.gpu.gpu.uuid}"


@final
@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """A workload without a lease, such as a parked one."""

    workload: Workload

    @property
    def key(self) -> str:
        """Identifies the row among all rows."""
        return f"workload {self.workload.workload_id}"


@final
@dataclass(frozen=True, slots=True)
class ClaimsRow:
    """The claims of a host's own programs that wait for GPUs."""

    worker: Worker

    @property
    def key(self) -> str:
        """Identifies the row among all rows."""
        return f"claims {self.worker.worker_id}"


@final
@dataclass(frozen=True, slots=True)
class CommandRow:
    """A command, with the names of its workloads and its worker."""

    command: Command
    about: str
    worker_name: str
    places: Mapping[str, str]

    @property
    def key(self) -> str:
        """Identifies the row among all rows."""
        return f"command {self.command.command_id}"


Row: TypeAlias = HostRow | SlotRow | WorkloadRow | ClaimsRow | CommandRow


@dataclass(frozen=True, slots=True)
class Matches:
    """The ids and UUIDs of what an expression of AIP-160 selects."""

    workers: frozenset[str]
    gpus: frozenset[str]
    workloads: frozenset[str]


@dataclass(frozen=True, slots=True)
class View:
    """The selection and the order of the list.

    Attributes:
        order: One of :data:`ORDERS`.
        words: Casefolded words that a row contains, itself or in its host's row. Empty: any.
        matches: What an expression selects. None: everything.
        opens_hosts: Whether hosts are open at first.
        toggled: Ids of workers whose hosts are the other way.
    """

    order: str = "name"
    words: tuple[str, ...] = ()
    matches: Matches | None = None
    opens_hosts: bool = True
    toggled: frozenset[str] = frozenset()


def is_reached(worker: Worker) -> bool:
    """Whether a worker is in contact. The free GPUs and claims of others are only last known ones."""
    return worker.state == worker_pb2.WORKER_STATE_CONNECTED


def waiting_claims(worker: Worker) -> int:
    """The number of claims that wait for GPUs of a host. 0: none, or the host is out of contact."""
    return worker.pending_claimers if is_reached(worker) else 0


def _free_gpus(row: HostRow) -> int:
    """The number of free GPUs of a host. 0: none, or the host is out of contact."""
    if not is_reached(row.worker):
        return 0
    return sum(one.lease.state == lease_pb2.SLOT_STATE_FREE for one in row.gpus)


def _parked_bytes(row: HostRow) -> int:
    return sum(parked_size(one).size or 0 for one in row.parked)


def _name(row: HostRow) -> str:
    return row.worker.name


ORDERS: Final[dict[str, Callable[[HostRow], Any]]] = {
    "name": _name,
    "most free GPUs": lambda row: (-_free_gpus(row), _name(row)),
    "most parked bytes": lambda row: (-_parked_bytes(row), _name(row)),
    "most waiting claims": lambda row: (-waiting_claims(row.worker), _name(row)),
    "out of contact first": lambda row: (is_reached(row.worker), _name(row)),
}
"""Orders of hosts: their names, and their keys of a sort."""


def fleet_rows(model: FleetModel, view: View) -> list[Row]:
    """The rows of the fleet. A host is shown if itself or anything on it matches the filter."""
    gpus = model.gpus_by_worker()
    holders = _holders(model)
    others = _others(model)
    chosen: list[tuple[HostRow, list[Row]]] = []
    for worker_id, worker in model.workers.values.items():
        is_open = view.opens_hosts != (worker_id in view.toggled)
        host = HostRow(worker, gpus.get(worker_id, ()), others.get(worker_id, ()), is_open)
        if (below := _selected(model, host, holders, view)) is not None:
            chosen.append((host, below))
    key = ORDERS[view.order]
    chosen.sort(key=lambda one: key(one[0]))
    return [row for host, below in chosen for row in (host, *below)]


def command_rows(model: FleetModel) -> list[Row]:
    """The open commands, the newest first, and then the newest ended ones."""
    open_commands = sorted(model.commands.values.values(), key=_age_key)
    ended = reversed(model.ended_commands.values())
    places = model.places()
    return [_command_row(model, command, places) for command in (*open_commands, *ended)]


def _age_key(command: Command) -> int:
    return -command.create_time.ToNanoseconds()


def command_about(model: FleetModel, command: Command, places: Mapping[str, str] | None = None) -> str:
    """Names of the workloads of a command, of its GPUs, or of its worker.

    Args:
        model: The fleet.
        command: The command.
        places: Short names of GPUs by UUID. None: those of the model.
    """
    if command.operation.WhichOneof("kind") == "run" and command.operation.run.name:
        return command.operation.run.name
    names = sorted(model.workload_name(one) for one in workload_targets(command))
    if uuids := gpu_targets(command):
        return places_text(uuids, model.places() if places is None else places)
    return ", ".join(names) or model.worker_name(command.worker_id)


def _command_row(model: FleetModel, command: Command, places: Mapping[str, str]) -> CommandRow:
    about = command_about(model, command, places)
    return CommandRow(command, about, model.worker_name(command.worker_id), places)


def _holders(model: FleetModel) -> dict[str, Workload]:
    """The workload with the lease of each leased GPU, by UUID."""
    return {
        uuid: workload
        for workload in model.workloads.values.values()
        for uuid in workload.status.lease.gpu_uuids
    }


def _others(model: FleetModel) -> dict[str, list[Workload]]:
    """The workloads without a lease of GPUs, by worker: parked, starting, or without need of a GPU."""
    found: dict[str, list[Workload]] = {}
    for workload in model.workloads.values.values():
        if not workload.status.lease.gpu_uuids:
            found.setdefault(workload.worker_id, []).append(workload)
    for workloads in found.values():
        workloads.sort(key=lambda one: one.name)
    return found


def _selected(model: FleetModel, host: HostRow, holders: dict[str, Workload], view: View) -> list[Row] | None:
    """The rows below a host. None: nothing of the host matches the filter."""
    is_filtered = bool(view.words) or view.matches is not None
    shows_all = not is_filtered or _host_matches(host, view)
    if shows_all and not host.is_open:
        return []
    slots = [
        SlotRow(gpu, model.sample(gpu.gpu.uuid), _holder(model, holders, gpu))
        for gpu in host.gpus
        if shows_all or _slot_matches(host, gpu, _holder(model, holders, gpu), view)
    ]
    others = [
        WorkloadRow(workload)
        for workload in host.others
        if shows_all or _workload_matches(host, workload, view)
    ]
    if not shows_all and not slots and not others:
        return None
    if not host.is_open:
        return []
    claims = [ClaimsRow(host.worker)] if waiting_claims(host.worker) else []
    return [*slots, *others, *claims]


def _holder(model: FleetModel, holders: dict[str, Workload], gpu: FleetGpu) -> Workload | None:
    """The workload of a slot, by the slot's lease, or by the workload's if the slot is older."""
    if gpu.lease.HasField("workload_id"):
        return model.workloads.values.get(gpu.lease.workload_id)
    return holders.get(gpu.gpu.uuid)


def _host_matches(host: HostRow, view: View) -> bool:
    if view.matches is not None:
        return host.worker.worker_id in view.matches.workers
    return contains_words(view.words, _host_texts(host))


def _slot_matches(host: HostRow, gpu: FleetGpu, workload: Workload | None, view: View) -> bool:
    if view.matches is not None:
        of_workload = workload is not None and workload.workload_id in view.matches.workloads
        return gpu.gpu.uuid in view.matches.gpus or of_workload
    state = enum_name(lease_pb2.SlotState.Name, gpu.lease.state, "SLOT_STATE_")
    own = (f"{gpu.worker_name}/{gpu.gpu.slot}", state, gpu.gpu.name, gpu.gpu.uuid, gpu.workload_name)
    of_workload_texts = _workload_texts(workload) if workload is not None else ()
    return contains_words(view.words, (*_host_texts(host), *own, *of_workload_texts))


def _workload_matches(host: HostRow, workload: Workload, view: View) -> bool:
    if view.matches is not None:
        return workload.workload_id in view.matches.workloads
    return contains_words(view.words, (*_host_texts(host), *_workload_texts(workload)))


def _host_texts(host: HostRow) -> Iterable[str]:
    state = enum_name(worker_pb2.WorkerState.Name, host.worker.state, "WORKER_STATE_")
    return (host.worker.name, state, "cordoned" if host.worker.HasField("cordon") else "")


def _workload_texts(workload: Workload) -> Iterable[str]:
    state = enum_name(workload_pb2.WorkloadState.Name, workload.status.state, "WORKLOAD_STATE_")
    parked = "parked" if workload.status.state in PARKED else ""
    return (workload.name, workload.user, workload.owner, state, parked, workload.workload_id)
