"""On which GPUs a parked workload wakes. Pure."""

from collections.abc import Mapping, Sequence

from leasehold.v1 import errors_pb2

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.facts import Room


def choose_gpus(
    parked: Sequence[str],
    free: Sequence[str],
    chips: Mapping[str, str],
    room: Room,
    parked_bytes: Mapping[str, int],
) -> tuple[GpuPair, ...]:
    """Pairs each parked GPU with the one to wake on: the same if it is free, else the first that fits.

    Args:
        parked: GPUs that the workload held, in its order.
        free: GPUs that can be claimed, in slot order.
        chips: Chip by UUID of every GPU of the host.
        room: What NVML says of device memory.
        parked_bytes: Memory that each parked GPU's content needs; missing where it is unknown.

    Raises:
        OperationError: NO_FREE_GPU where some have no place, INSUFFICIENT_DEVICE_MEMORY where the only
            places are too small.
    """
    left = list(free)
    chosen = {
        uuid: uuid for uuid in parked if uuid in left and _fits(GpuPair(uuid, uuid), room, parked_bytes)
    }
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
        fitting = [
            candidate for candidate in same_chip if _fits(GpuPair(uuid, candidate), room, parked_bytes)
        ]
        if not fitting:
            check_memory((GpuPair(uuid, same_chip[0]),), room, parked_bytes)
        chosen[uuid] = fitting[0]
        left.remove(fitting[0])
    return tuple(GpuPair(uuid, chosen[uuid]) for uuid in parked)


def check_memory(pairs: Sequence[GpuPair], room: Room, needed_bytes: Mapping[str, int]) -> None:
    """Refuses destinations with too little free memory, or where that is unknown and others may use them.

    A restore that runs out of device memory wedges the process for ever (NVIDIA/cuda-checkpoint issue 44).

    Args:
        pairs: Where content is, and where it is to go.
        room: What NVML says of device memory. An empty GPU does where the need is unknown.
        needed_bytes: Memory that the content of each GPU needs; missing where it is unknown.

    Raises:
        OperationError: INSUFFICIENT_DEVICE_MEMORY.
    """
    for pair in pairs:
        if _fits(pair, room, needed_bytes):
            continue
        if pair.old_uuid not in needed_bytes:
            what = (
                f"NVML does not tell how much memory the workload needs on {pair.new_uuid}, and does not "
                "show that nobody uses that GPU: choose an empty GPU, or free that one"
            )
        elif pair.new_uuid in room.free_bytes:
            what = (
                f"{pair.new_uuid} has {size_text(room.free_bytes[pair.new_uuid])} free and the workload "
                f"needs {size_text(needed_bytes[pair.old_uuid])}: choose another GPU, or free memory on it"
            )
        else:
            what = (
                f"NVML does not tell how much memory {pair.new_uuid} has free, and lists processes of others "
                "on it: choose another GPU, or end those processes"
            )
        raise OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY, what, {"gpu_uuid": pair.new_uuid}
        )


def _fits(pair: GpuPair, room: Room, needed_bytes: Mapping[str, int]) -> bool:
    needed = needed_bytes.get(pair.old_uuid)
    if needed is None:
        return pair.new_uuid in room.empty
    if pair.new_uuid not in room.free_bytes:
        return pair.new_uuid not in room.shared
    return room.free_bytes[pair.new_uuid] >= needed
