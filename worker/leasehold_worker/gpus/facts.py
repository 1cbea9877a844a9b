"""Facts of GPUs, as values. A fact that NVML does not report is None, never zero."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts of a GPU that seldom change. Field names and units are those of ``gpu.proto``."""

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
    """Current measurements of a GPU. Field names and units are those of ``gpu.proto``."""

    lost: bool = False
    utilization_percent: int | None = None
    encoder_utilization_percent: int | None = None
    decoder_utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: int | None = None
    ecc_uncorrected_errors: int | None = None


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The users of a GPU's memory.

    Attributes:
        used_bytes: Bytes of all processes. None: unknown to NVML.
        processes: Bytes by process id. None: unknown to NVML.
    """

    used_bytes: int | None
    processes: Mapping[int, int | None]

    def held_bytes(self, pids: Iterable[int]) -> int | None:
        """Memory of some processes, or of all processes if NVML does not report it by process.

        None: unknown to NVML.
        """
        sizes = [self.processes[pid] for pid in pids if pid in self.processes]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else self.used_bytes

    @property
    def unexplained_bytes(self) -> int | None:
        """Memory in use by no listed process. None: unknown to NVML."""
        sizes = [size for size in self.processes.values() if size is not None]
        if self.used_bytes is None or len(sizes) < len(self.processes):
            return None
        return self.used_bytes - sum(sizes)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The device memory available to a restore, from one reading of NVML.

    Attributes:
        free_bytes: Free device memory by GPU UUID, less a margin on shared GPUs. A GPU unknown to NVML is
            missing.
        shared: UUIDs of the GPUs on which NVML lists other processes.
        empty: UUIDs of the GPUs without other users, according to NVML.
    """

    free_bytes: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SystemVersions:
    """Versions of the installed software. None: it is missing, or unknown to NVML."""

    driver_version: str | None = None
    cuda_version: int | None = None
    nvml_version: str | None = None
