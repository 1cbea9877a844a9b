"""Device memory of destinations: whether the content of a GPU fits on another. Pure."""

from collections.abc import Mapping, Sequence

from leasehold.v1 import errors_pb2

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.facts import FreeMemory


def check_memory(pairs: Sequence[GpuPair], room: FreeMemory, needed_bytes: Mapping[str, int]) -> None:
    """Refuses destinations with too little free memory, or with unknown free memory and other users.

    A restore that runs out of device memory wedges the process forever (NVIDIA/cuda-checkpoint issue 44).

    Args:
        pairs: Old and new GPUs.
        room: Device memory as NVML reports it. An empty GPU suits an unknown need.
        needed_bytes: Memory that the content of each GPU needs; missing if unknown.

    Raises:
        OperationError: INSUFFICIENT_DEVICE_MEMORY.
    """
    for pair in pairs:
        if fits(pair, room, needed_bytes):
            continue
        if pair.old_uuid not in needed_bytes:
            what = (
                f"NVML does not report how much memory the workload needs on {pair.new_uuid}, "
                "nor that the GPU is unused: choose an empty GPU, or free that one"
            )
        elif pair.new_uuid in room.free_bytes:
            what = (
                f"the workload needs {size_text(needed_bytes[pair.old_uuid])}, and "
                f"{pair.new_uuid} has {size_text(room.free_bytes[pair.new_uuid])} free: "
                "choose another GPU, or free memory on it"
            )
        else:
            what = (
                f"NVML does not report how much memory {pair.new_uuid} has free, and lists "
                "other processes on it: choose another GPU, or end those processes"
            )
        raise OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY, what, {"gpu_uuid": pair.new_uuid}
        )


def fits(pair: GpuPair, room: FreeMemory, needed_bytes: Mapping[str, int]) -> bool:
    """Whether the content of the old GPU fits on the new one. An unknown need fits on an empty GPU only."""
    needed = needed_bytes.get(pair.old_uuid)
    if needed is None:
        return pair.new_uuid in room.empty
    if pair.new_uuid not in room.free_bytes:
        return pair.new_uuid not in room.shared
    return room.free_bytes[pair.new_uuid] >= needed
