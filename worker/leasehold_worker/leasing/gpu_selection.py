"""The choice of GPUs for a request. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import GpuPreference


@dataclass(frozen=True, slots=True)
class PoolGpu:
    """The properties of a GPU that requests can name.

    Attributes:
        uuid: NVML's UUID.
        name: Product name; equal names are the same chip.
        memory_bytes: Its memory. None: unknown.
        units: Its throughput units.
        numa_node: Its NUMA node. None: the host has only one, or it is unknown.
    """

    uuid: str
    name: str = ""
    memory_bytes: int | None = None
    units: int = 1
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """Requested GPUs, all or none.

    Attributes:
        count: Number of GPUs.
        memory_bytes: Least memory of each.
        name: Product name of each. Empty: any.
        gpu_uuids: Permitted GPUs. Empty: any.
        units: Least throughput units of all together. 0: any.
        acceptable_units: Units that each may have. Empty: any.
        preference: Preference among matching GPUs.
        preferred: Former GPUs of the holder.
        allow_foreign: GPUs with foreign processes match, too.
    """

    count: int
    memory_bytes: int = 0
    name: str = ""
    gpu_uuids: tuple[str, ...] = ()
    units: int = 0
    acceptable_units: frozenset[int] = frozenset()
    preference: GpuPreference.ValueType = workload_pb2.GPU_PREFERENCE_UNSPECIFIED
    preferred: tuple[str, ...] = ()
    allow_foreign: bool = False

    def allows(self, gpu: PoolGpu) -> bool:
        """Whether a GPU matches, leased or not. An unknown memory size does not match."""
        return (
            (not self.memory_bytes or (gpu.memory_bytes or 0) >= self.memory_bytes)
            and self.name in ("", gpu.name)
            and (not self.gpu_uuids or gpu.uuid in self.gpu_uuids)
            and (not self.acceptable_units or gpu.units in self.acceptable_units)
        )


def choose(
    gpus: Sequence[PoolGpu], request: GpuRequest, free_bytes: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The GPUs for a request. Without a preference, those in the lowest slots.

    For units, the GPUs go first whose units suffice with the smallest sum.

    Args:
        gpus: Available GPUs, in slot order.
        request: The request.
        free_bytes: Free memory by UUID; a GPU without a known value is missing.

    Returns:
        Their UUIDs, or None if there are too few.
    """
    fitting = [gpu for gpu in gpus if request.allows(gpu)]
    if len(fitting) < request.count:
        return None
    ordered = _in_order(fitting, request, free_bytes)
    if not request.units:
        return tuple(gpu.uuid for gpu in ordered[: request.count])
    by_units = _first_by_units(ordered, request.count)
    enough = [units for units in by_units if units >= request.units]
    return by_units[min(enough)] if enough else None


def _first_by_units(gpus: Sequence[PoolGpu], count: int) -> dict[int, tuple[str, ...]]:
    """The first choice of so many GPUs for each sum of units.

    The number of sums is small, since GPUs have few kinds. 8 of 16 GPUs have 12,870 combinations.
    """
    first: list[dict[int, tuple[str, ...]]] = [{0: ()}, *({} for _ in range(count))]
    """By number of GPUs: the first choice among the later GPUs for each sum."""
    for gpu in reversed(gpus):
        for number in range(count, 0, -1):
            for units, chosen in first[number - 1].items():
                # A choice that begins with this GPU goes before all choices of later GPUs.
                first[number][units + gpu.units] = (gpu.uuid, *chosen)
    return first[count]


def _in_order(gpus: list[PoolGpu], request: GpuRequest, free_bytes: Mapping[str, int]) -> list[PoolGpu]:
    """Sorts by preference, and by slot among equals."""
    match request.preference:
        case workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE:
            return sorted(gpus, key=lambda gpu: gpu.uuid not in request.preferred)
        case workload_pb2.GPU_PREFERENCE_MOST_FREE_MEMORY:
            return sorted(gpus, key=lambda gpu: -free_bytes.get(gpu.uuid, 0))
        case workload_pb2.GPU_PREFERENCE_SAME_NUMA_NODE:
            nodes = [gpu.numa_node for gpu in gpus if gpu.numa_node is not None]
            roomy = next((node for node in nodes if nodes.count(node) >= request.count), None)
            return sorted(gpus, key=lambda gpu: roomy is None or gpu.numa_node != roomy)
        case _:
            return gpus
