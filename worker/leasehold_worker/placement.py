"""On which GPUs a parked workload wakes. Pure."""

from collections.abc import Collection, Mapping, Sequence

from leasehold.v1 import errors_pb2

from leasehold_worker.checkpoint.gpu_pairs import GpuPair
from leasehold_worker.errors import OperationError
from leasehold_worker.sizes import size_text


def choose_gpus(
    parked: Sequence[str],
    free: Sequence[str],
    chips: Mapping[str, str],
    free_bytes: Mapping[str, int],
    parked_bytes: Mapping[str, int],
    shared: Collection[str] = (),
    empty: Collection[str] = (),
) -> tuple[GpuPair, ...]:
    """Pairs each parked GPU with the one to wake on: the same if it is free, else the first that fits.

    Args:
        parked: GPUs that the workload held, in its order.
        free: GPUs that can be claimed, in slot order.
        chips: Chip by UUID of every GPU of the host.
        free_bytes: Free device memory by UUID; a GPU is missing where it is unknown.
        parked_bytes: Memory that each parked GPU's content needs; missing where it is unknown.
        shared: GPUs with processes of others.
        empty: GPUs that nobody uses, which do where the need is unknown.

    Raises:
        OperationError: NO_FREE_GPU where some have no place, INSUFFICIENT_DEVICE_MEMORY where the only
            places are too small.
    """
    left = list(free)
    memory = (free_bytes, parked_bytes, shared, empty)
    chosen = {uuid: uuid for uuid in parked if uuid in left and _fits(GpuPair(uuid, uuid), *memory)}
    left = [uuid for uuid in left if uuid not in chosen]
    for uuid in parked:
        if uuid in chosen:
            continue
        same_chip = [candidate for candidate in left if chips[candidate] == chips[uuid]]
        if not same_chip:
            raise OperationError(
                errors_pb2.ERROR_REASON_NO_FREE_GPU,
                f"no {chips[uuid]} is free to take the place of {uuid}: suspend or stop a workload first",
                {"gpu_uuid": uuid},
            )
        fitting = [candidate for candidate in same_chip if _fits(GpuPair(uuid, candidate), *memory)]
        if not fitting:
            check_memory((GpuPair(uuid, same_chip[0]),), *memory)
        chosen[uuid] = fitting[0]
        left.remove(fitting[0])
    return tuple(GpuPair(uuid, chosen[uuid]) for uuid in parked)


def check_memory(
    pairs: Sequence[GpuPair],
    free_bytes: Mapping[str, int],
    needed_bytes: Mapping[str, int],
    shared: Collection[str] = (),
    empty: Collection[str] = (),
) -> None:
    """Refuses destinations with too little free memory, or where that is unknown and others may use them.

    A restore that runs out of device memory wedges the process for ever (NVIDIA/cuda-checkpoint issue 44).

    Args:
        pairs: Where content is, and where it is to go.
        free_bytes: Free device memory by UUID; a GPU is missing where it is unknown.
        needed_bytes: Memory that the content of each GPU needs; missing where it is unknown.
        shared: GPUs with processes of others.
        empty: GPUs that nobody uses, which do where the need is unknown.

    Raises:
        OperationError: INSUFFICIENT_DEVICE_MEMORY.
    """
    for pair in pairs:
        if _fits(pair, free_bytes, needed_bytes, shared, empty):
            continue
        if pair.old_uuid not in needed_bytes:
            what = (
                f"NVML does not tell how much memory the workload needs on {pair.new_uuid}, and does not "
                "show that nobody uses that GPU: choose an empty GPU, or free that one"
            )
        elif pair.new_uuid in free_bytes:
            what = (
                f"{pair.new_uuid} has {size_text(free_bytes[pair.new_uuid])} free and the workload needs "
                f"{size_text(needed_bytes[pair.old_uuid])}: choose another GPU, or free memory on it"
            )
        else:
            what = (
                f"NVML does not tell how much memory {pair.new_uuid} has free, and lists processes of others "
                "on it: choose another GPU, or end those processes"
            )
        raise OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY, what, {"gpu_uuid": pair.new_uuid}
        )


def _fits(
    pair: GpuPair,
    free_bytes: Mapping[str, int],
    needed_bytes: Mapping[str, int],
    shared: Collection[str],
    empty: Collection[str],
) -> bool:
    needed = needed_bytes.get(pair.old_uuid)
    if needed is None:
        return pair.new_uuid in empty
    if pair.new_uuid not in free_bytes:
        return pair.new_uuid not in shared
    return free_bytes[pair.new_uuid] >= needed
