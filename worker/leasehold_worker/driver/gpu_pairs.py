"""The map from the old GPUs of a process to its new ones. Pure.

The driver wants a pair for every GPU that the process could see when it initialised, used or not, and
``CUDA_VISIBLE_DEVICES`` does not shrink that set (NVIDIA/cuda-python issue 1983). So a move from A to B has
to be written as a permutation of all GPUs of the host, within each chip.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError


@dataclass(frozen=True, slots=True)
class GpuPair:
    """``new_uuid`` replaces ``old_uuid``. Both as NVML writes them."""

    old_uuid: str
    new_uuid: str


def complete_pairs(pairs: Iterable[GpuPair], chips: Mapping[str, str]) -> tuple[GpuPair, ...]:
    """Completes pairs to a permutation over every GPU of the host.

    GPUs outside of the pairs stay where they are if possible; displaced ones take the remaining places.

    Args:
        pairs: The pairs of the move.
        chips: Chip name by UUID of every GPU of the host.

    Returns:
        One pair per GPU, in the order of ``chips``; empty where every GPU would stay, because the driver's
        plain way is the safer one.

    Raises:
        OperationError: UNKNOWN_GPU, DUPLICATE_GPU or INCOMPATIBLE_GPU.
    """
    wanted = tuple(pairs)
    _check(wanted, chips)
    mapping = {pair.old_uuid: pair.new_uuid for pair in wanted}
    taken = set(mapping.values())
    for uuid in chips:
        if uuid not in mapping and uuid not in taken:
            mapping[uuid] = uuid
            taken.add(uuid)
    for chip in dict.fromkeys(chips.values()):
        left = [uuid for uuid in chips if chips[uuid] == chip and uuid not in taken]
        displaced = [uuid for uuid in chips if chips[uuid] == chip and uuid not in mapping]
        mapping.update(zip(displaced, left, strict=True))
    if all(old == new for old, new in mapping.items()):
        return ()
    return tuple(GpuPair(uuid, mapping[uuid]) for uuid in chips)


def moved(gpu_uuids: Iterable[str], pairs: Sequence[GpuPair]) -> tuple[str, ...]:
    """The destinations of GPUs, in the same order."""
    destinations = {pair.old_uuid: pair.new_uuid for pair in pairs}
    return tuple(destinations.get(gpu_uuid, gpu_uuid) for gpu_uuid in gpu_uuids)


def rebase_pairs(pairs: Sequence[GpuPair], displacement: Sequence[GpuPair]) -> tuple[GpuPair, ...]:
    """The pairs for a process that the driver has on other GPUs than the pairs name.

    Args:
        pairs: Complete, from the supposed GPUs of the process; empty if all stay.
        displacement: Complete, from those GPUs to the actual ones; empty if they are the same.
    """
    if not displacement:
        return tuple(pairs)
    destinations = {pair.old_uuid: pair.new_uuid for pair in pairs}
    rebased = tuple(
        GpuPair(place.new_uuid, destinations.get(place.old_uuid, place.old_uuid)) for place in displacement
    )
    return () if all(pair.old_uuid == pair.new_uuid for pair in rebased) else rebased


def _check(pairs: Sequence[GpuPair], chips: Mapping[str, str]) -> None:
    for uuid in (uuid for pair in pairs for uuid in (pair.old_uuid, pair.new_uuid)):
        if uuid not in chips:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                f"{uuid} is not a GPU of this host, and a workload can't move to another "
                f"host: name one of {', '.join(chips) or 'none, as it has no GPU'}",
                {"gpu_uuid": uuid},
            )
    for side, uuids in (
        ("source", [pair.old_uuid for pair in pairs]),
        ("destination", [pair.new_uuid for pair in pairs]),
    ):
        uuid, count = Counter(uuids).most_common(1)[0] if uuids else ("", 0)
        if count > 1:
            raise OperationError(
                errors_pb2.ERROR_REASON_DUPLICATE_GPU,
                f"{uuid} is the {side} of {count} pairs: name it once per side",
                {"gpu_uuid": uuid},
            )
    for pair in pairs:
        if chips[pair.old_uuid] != chips[pair.new_uuid]:
            raise OperationError(
                errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU,
                f"{pair.new_uuid} is a {chips[pair.new_uuid]} and can't replace "
                f"{pair.old_uuid}, a {chips[pair.old_uuid]}: the driver moves a process only "
                "between GPUs of the same model",
                {"gpu_uuid": pair.new_uuid},
            )
