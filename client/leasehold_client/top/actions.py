"""Operations that a key begins: what each would do, its plan, and the call that creates its command."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import Role
from leasehold.v1.command_pb2 import Command
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.aio.client import AsyncClient
from leasehold_client.arguments.gpu_names import gpu_place
from leasehold_client.arguments.moves import check_host, check_hosts
from leasehold_client.errors import UsageError
from leasehold_client.messages import operation_name
from leasehold_client.top.effects import cancel_effect, stop_effect
from leasehold_client.top.fleet_model import FleetModel

USER: Final = access_service_pb2.ROLE_USER
OPERATOR: Final = access_service_pb2.ROLE_OPERATOR


@dataclass(frozen=True, slots=True)
class Action:
    """An operation that waits for its confirmation.

    Attributes:
        verb: The verb of the command line, such as ``suspend``.
        about: Names of the workloads, GPUs or workers.
        role: The weakest role that permits the operation.
        execute: Creates the command.
        plan: Asks for the plan. None: the operation has none.
        effect: Tells the effect in the present state of the fleet, for people. Raises UsageError if there is
            nothing left to do. None: the plan tells the effect.
    """

    verb: str
    about: str
    role: Role.ValueType
    execute: Callable[[], Awaitable[Command]]
    plan: Callable[[], Awaitable[Plan]] | None = None
    effect: Callable[[], str] | None = None


def suspend(client: AsyncClient, workload: Workload) -> Action:
    """Suspends a workload with the policy of its spec."""
    return Action(
        "suspend",
        workload.name,
        USER,
        partial(client.suspend, workload.workload_id),
        partial(client.plan_suspend, workload.workload_id),
    )


def restore(
    client: AsyncClient, workload: Workload, target: FleetGpu | None = None, known: Sequence[FleetGpu] = ()
) -> Action:
    """Restores a parked workload.

    Args:
        client: The client.
        workload: The workload.
        target: Its GPU. None: its former GPUs if they are free, else others.
        known: GPUs of its host, for messages.

    Raises:
        UsageError: The GPU belongs to another worker, or the workload needs several GPUs.
    """
    uuids = [target.gpu.uuid] if target is not None else []
    count = len(workload.status.parked_gpu_uuids)
    if target is not None and count > 1:
        raise UsageError(
            f"{workload.name} needs {count} GPUs: press r to restore it, or name all of them with "
            f"`leasehold restore {workload.name} --to GPU,...`"
        )
    if target is not None:
        check_host(workload, workload.name, uuids, [target, *known])
    return Action(
        "restore",
        workload.name,
        USER,
        partial(client.restore, workload.workload_id, gpu_uuids=uuids),
        partial(client.plan_restore, workload.workload_id, gpu_uuids=uuids),
    )


def move(
    client: AsyncClient, workload: Workload, source: FleetGpu, target: FleetGpu, holder: Workload | None
) -> Action:
    """Moves a running workload from one GPU to another. Two workloads exchange the GPUs.

    Args:
        client: The client.
        workload: The workload that leases the source.
        source: The GPU that it leaves.
        target: The GPU that it gets.
        holder: The workload that leases the target, and gets the source. None: nobody.

    Raises:
        UsageError: Source and target are the same, or on two hosts.
    """
    old, new = source.gpu.uuid, target.gpu.uuid
    if old == new:
        raise UsageError(f"{workload.name} is on {gpu_place(source)} already: choose another slot")
    moves = {workload.workload_id: [(old, new)]}
    names = [workload.name]
    if holder is not None and holder.workload_id == workload.workload_id:
        moves[workload.workload_id].append((new, old))
    elif holder is not None:
        moves[holder.workload_id] = [(new, old)]
        names.append(holder.name)
    check_hosts(moves, names, [source, target])
    return Action(
        "remap", ", ".join(names), USER, partial(client.remap, moves), partial(client.plan_remap, moves)
    )


def stop(client: AsyncClient, model: FleetModel, workload: Workload) -> Action:
    """Stops a workload."""
    execute = partial(client.stop, workload.workload_id)
    return Action("stop", workload.name, USER, execute, effect=partial(stop_effect, model, workload))


def cordon(client: AsyncClient, target: Worker | FleetGpu, reason: str, cordoned_by: str) -> Action:
    """Cordons a whole worker, or one GPU."""
    about, uuids = _target(target)
    execute = partial(client.cordon, target.worker_id, uuids, reason=reason, cordoned_by=cordoned_by)
    effect = f"{about} accepts no new work: {reason}. Leases stay."
    return Action("cordon", about, OPERATOR, execute, effect=lambda: effect)


def uncordon(client: AsyncClient, target: Worker | FleetGpu, *, is_worker_cordoned: bool) -> Action:
    """Uncordons a whole worker, or one GPU, whose worker may be cordoned."""
    about, uuids = _target(target)
    effect = f"{about} accepts work again."
    if isinstance(target, Worker):
        effect += " GPUs with a cordon of their own stay cordoned."
    elif is_worker_cordoned:
        effect = f"{about} loses its own cordon. Its worker stays cordoned, so the GPU accepts no work yet."
    execute = partial(client.uncordon, target.worker_id, uuids)
    return Action("uncordon", about, OPERATOR, execute, effect=lambda: effect)


def cancel(client: AsyncClient, model: FleetModel, command: Command, about: str) -> Action:
    """Cancels a command that has not ended."""
    return Action(
        "cancel",
        f"{operation_name(command)} of {about}",
        USER,
        partial(client.cancel, command.command_id),
        effect=partial(cancel_effect, model, command, about),
    )


def _target(target: Worker | FleetGpu) -> tuple[str, list[str]]:
    """Name of a worker or GPU, and the UUIDs of the operation."""
    if isinstance(target, Worker):
        return f"worker {target.name}", []
    return gpu_place(target), [target.gpu.uuid]
