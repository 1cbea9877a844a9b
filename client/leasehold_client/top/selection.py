"""The target of a key: the workload, the command, the host or the GPU of a row. Pure."""

from typing import Final

from leasehold.v1.command_pb2 import Command
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.aio.command_watch import has_ended
from leasehold_client.errors import UsageError
from leasehold_client.messages import PARKED, operation_name
from leasehold_client.top.fleet_model import FleetModel
from leasehold_client.top.rows import ClaimsRow, CommandRow, HostRow, Row, SlotRow, WorkloadRow

_OTHER_LIST: Final = "the list of commands has the focus: press Tab, choose {kind}, and press {key} again"


def workload_of(row: Row | None, key: str) -> Workload:
    """The workload of a row.

    Args:
        row: The row. None: the list is empty.
        key: The pressed key, for the message.

    Raises:
        UsageError: The row has no workload.
    """
    match row:
        case SlotRow(workload=Workload() as workload) | WorkloadRow(workload=workload):
            return workload
        case CommandRow():
            raise UsageError(_OTHER_LIST.format(kind="a workload", key=key))
        case _:
            raise UsageError(f"choose a GPU with a workload, or a parked workload, and press {key} again")


def departure_of(row: Row | None) -> tuple[Workload, FleetGpu | None]:
    """The workload that a move begins with, and the GPU that it leaves. None: it is parked.

    Raises:
        UsageError: The row has no workload, or the workload holds no GPU and is not parked.
    """
    workload = workload_of(row, "m")
    if isinstance(row, SlotRow):
        return workload, row.gpu
    if workload.status.state not in PARKED:
        raise UsageError(f"{workload.name} holds no GPU: choose a workload that holds one, or a parked one")
    return workload, None


def cordon_target(row: Row | None) -> Worker | FleetGpu:
    """The host or the GPU of a row.

    Raises:
        UsageError: The row has neither.
    """
    match row:
        case HostRow():
            return row.worker
        case SlotRow():
            return row.gpu
        case CommandRow():
            raise UsageError(_OTHER_LIST.format(kind="a host or a GPU", key="c"))
        case _:
            raise UsageError("choose a host or a GPU, and press c again")


def has_own_cordon(target: Worker | FleetGpu, worker: Worker | None) -> bool:
    """Whether a worker or a GPU is itself cordoned.

    The coordinator gives a free GPU of a cordoned worker the worker's cordon, unless the GPU has its own.

    Args:
        target: The worker or GPU.
        worker: The worker of the GPU. None: not known.
    """
    if isinstance(target, Worker):
        return target.HasField("cordon")
    is_inherited = worker is not None and target.lease.cordon == worker.cordon
    return target.lease.HasField("cordon") and not is_inherited


def open_command(row: Row | None, model: FleetModel) -> Command:
    """The command of a row, or the oldest open command about its workload.

    Raises:
        UsageError: There is no command, or it has ended.
    """
    match row:
        case CommandRow():
            command: Command | None = row.command
        case SlotRow(workload=Workload() as workload) | WorkloadRow(workload=workload):
            command = model.open_command(workload.workload_id)
        case _:
            command = None
    if command is None:
        raise UsageError("choose an open command with Tab and the arrows, and press k again")
    if has_ended(command.state):
        raise UsageError(
            f"this {operation_name(command)} has ended: only an open command can be cancelled; choose another"
        )
    return command


def host_of(row: Row) -> str | None:
    """Id of the worker in whose block a row is. None: the row is a command."""
    match row:
        case HostRow() | ClaimsRow():
            return row.worker.worker_id
        case SlotRow():
            return row.gpu.worker_id
        case WorkloadRow():
            return row.workload.worker_id
        case CommandRow():
            return None
