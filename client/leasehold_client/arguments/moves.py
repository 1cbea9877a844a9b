"""Options of ``remap``: which new GPU replaces which old GPU."""

from collections.abc import Sequence

from leasehold.v1 import workload_pb2
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.arguments.gpu_names import gpu_places, pair_in_order, resolve_list, resolve_pair
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, UsageError
from leasehold_client.messages import PARKED, Moves, workload_state


def check_options(workloads: Sequence[str], pairs: Sequence[str], to: str | None, *, swap: bool) -> None:
    """Refuses contradictory options before any call to the coordinator.

    Raises:
        UsageError: The options contradict each other.
    """
    if [bool(pairs), to is not None, swap].count(True) != 1:
        raise UsageError(
            "remap needs either --pair OLD=NEW or --to GPU,... or --swap: give exactly one of these options"
        )
    if to is not None and len(workloads) != 1:
        raise UsageError(
            f"--to moves one workload, and {len(workloads)} are named: move several with --pair or --swap"
        )
    if swap and len(workloads) != 2:
        raise UsageError(f"--swap takes two workloads, not {len(workloads)}: name two")


def find_moves(
    client: Client,
    names: Sequence[str],
    gpus: Sequence[FleetGpu],
    *,
    pairs: Sequence[str],
    to: str | None,
    swap: bool,
) -> Moves:
    """Resolves options that passed :func:`check_options`.

    Args:
        client: The client. Moves name workloads by id, since a name may change its owner.
        names: Names of the workloads.
        gpus: The GPUs of the fleet.
        pairs: Texts OLD=NEW. For a single workload, the worker checks the pairs.
        to: A list of GPUs.
        swap: Whether two workloads exchange their GPUs.

    Raises:
        UsageError: A name, a pair or a count is invalid.
        LeaseholdError: A workload is unknown or holds no GPU.
    """
    if pairs and len(names) == 1:
        return {names[0]: [resolve_pair(text, gpus) for text in pairs]}
    wanted = resolve_list(to, gpus) if to is not None else []
    resolved = [resolve_pair(text, gpus) for text in pairs]
    workloads = [client.workload(name) for name in names]
    held = [_held_gpus(name, workload) for name, workload in zip(names, workloads, strict=True)]
    ids = [workload.workload_id for workload in workloads]
    for number, workload_id in enumerate(ids):
        if workload_id in ids[:number]:
            raise UsageError(
                f"{names[ids.index(workload_id)]} and {names[number]} are the same workload: "
                "name each workload once"
            )
    if to is not None:
        return {ids[0]: pair_in_order(held[0], wanted)}
    if swap:
        return dict(zip(ids, _swapped(names, held), strict=True))
    found = _assign_pairs(names, held, dict(zip(pairs, resolved, strict=True)))
    return dict(zip(ids, found, strict=True))


def check_hosts(moves: Moves, names: Sequence[str], gpus: Sequence[FleetGpu]) -> None:
    """Refuses a move to GPUs of another worker. The worker itself knows only its own GPUs.

    Args:
        moves: The moves.
        names: Names of the workloads, in the order of the moves.
        gpus: The GPUs of the fleet.

    Raises:
        UsageError: A pair has GPUs of two workers.
    """
    known = {gpu.gpu.uuid: gpu for gpu in gpus}
    places = gpu_places(gpus)
    for name, pairs in zip(names, moves.values(), strict=True):
        for old, new in pairs:
            if old in known and new in known and known[old].worker_id != known[new].worker_id:
                raise UsageError(
                    f"{name} can't move from {places[old]} to {places[new]}: a running workload can't leave "
                    f"its worker; move and swap between GPUs of {known[old].worker_name}"
                )


def check_host(workload: Workload, name: str, gpu_uuids: Sequence[str], gpus: Sequence[FleetGpu]) -> None:
    """Refuses a restore on GPUs of another worker than the workload's own.

    Args:
        workload: The workload.
        name: Name of the workload, for messages.
        gpu_uuids: UUIDs of the GPUs to restore on.
        gpus: The GPUs of the fleet.

    Raises:
        UsageError: A GPU belongs to another worker.
    """
    known = {gpu.gpu.uuid: gpu for gpu in gpus}
    places = gpu_places(gpus)
    here = next((gpu.worker_name for gpu in gpus if gpu.worker_id == workload.worker_id), workload.worker_id)
    for uuid in gpu_uuids:
        if uuid in known and known[uuid].worker_id != workload.worker_id:
            raise UsageError(
                f"{name} can't be restored on {places[uuid]}: a suspended workload can't leave its worker, "
                f"and {known[uuid].worker_name} is another worker; name a GPU of {here}"
            )


def _held_gpus(name: str, workload: Workload) -> Sequence[str]:
    if not workload.status.HasField("lease"):
        remedy = "move workloads that run on GPUs"
        if workload.status.state in PARKED:
            remedy = f"restore it on other GPUs with `leasehold restore {name} --to GPU`"
        elif workload.status.state == workload_pb2.WORKLOAD_STATE_WEDGED:
            remedy = "stop it, nothing else helps"
        raise LeaseholdError(
            f"{name} is {workload_state(workload)} and holds no GPU, so it can't be moved: {remedy}",
            "WRONG_STATE",
        )
    return workload.status.lease.gpu_uuids


def _swapped(names: Sequence[str], held: Sequence[Sequence[str]]) -> list[list[tuple[str, str]]]:
    first, second = held
    if len(first) != len(second):
        raise UsageError(
            f"{names[0]} and {names[1]} hold {len(first)} and {len(second)} GPUs: only equal counts can be "
            "swapped; name each move with --pair"
        )
    return [list(zip(first, second, strict=True)), list(zip(second, first, strict=True))]


def _assign_pairs(
    names: Sequence[str], held: Sequence[Sequence[str]], pairs: dict[str, tuple[str, str]]
) -> list[list[tuple[str, str]]]:
    """Assigns each pair to the workload that holds its OLD."""
    found: list[list[tuple[str, str]]] = [[] for _ in names]
    for text, (old, new) in pairs.items():
        holders = [number for number, uuids in enumerate(held) if old in uuids]
        if not holders:
            raise UsageError(
                f"the pair {text!r} moves {old}, which none of {', '.join(names)} holds: name its "
                "workload, or leave the pair out"
            )
        found[holders[0]].append((old, new))
    for name, own_pairs in zip(names, found, strict=True):
        if not own_pairs:
            raise UsageError(f"no --pair moves a GPU of {name}: add a pair, or leave {name} out")
    return found
