"""What is known of GPUs, as values. What NVML can't say is None, never zero."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What seldom changes about a GPU. Field names and units are those of ``gpu.proto``."""

    uuid: str
    name: str
    memory_total_bytes: int | None
    compute_capability: str | None
    pci_bus_id: str | None
    pci_device_id: str | None
    serial: str | None
    mig_enabled: bool | None
    persistence_mode: bool | None
    numa_node: int | None
    minor_number: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What was measured on a GPU just now. Field names and units are those of ``gpu.proto``."""

    lost: bool = False
    utilization_percent: int | None = None
    encoder_utilization_percent: int | None = None
    decoder_utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: int | None = None
    ecc_uncorrected_errors: int | None = None

    @property
    def memory_free_bytes(self) -> int | None:
        """Memory that nobody uses."""
        if self.memory_total_bytes is None or self.memory_used_bytes is None:
            return None
        return self.memory_total_bytes - self.memory_used_bytes


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Who uses the memory of a GPU.

    Attributes:
        used_bytes: By everybody. None: NVML can't say.
        processes: By process id. One is there even where its memory is unknown (None).
    """

    used_bytes: int | None
    processes: Mapping[int, int | None]

    def held_bytes(self, pids: Iterable[int]) -> int | None:
        """Memory of some processes. It is that of everybody where NVML does not tell it by process.

        None: NVML can't say that either.
        """
        sizes = [self.processes[pid] for pid in pids if pid in self.processes]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else self.used_bytes

    @property
    def unexplained_bytes(self) -> int | None:
        """Memory in use by nobody who is listed. None: NVML can't say."""
        sizes = [size for size in self.processes.values() if size is not None]
        if self.used_bytes is None or len(sizes) < len(self.processes):
            return None
        return self.used_bytes - sum(sizes)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The device memory that a restore may take, from one reading of NVML.

    Attributes:
        free_bytes: Free device memory by GPU UUID, less a margin on shared GPUs. A GPU is missing where NVML
            can't say.
        shared: UUIDs of the GPUs on which NVML lists processes that are not one's own.
        empty: UUIDs of the GPUs that NVML shows to be used by nobody else.
    """

    free_bytes: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SystemVersions:
    """Versions of what is installed. None: it isn't, or NVML couldn't say."""

    driver_version: str | None = None
    cuda_version: int | None = None
    nvml_version: str | None = None
