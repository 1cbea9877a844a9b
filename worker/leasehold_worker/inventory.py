"""What NVML says of this host's GPUs, by UUID. What it can't say is None, never zero, and never an error.

NVML ignores CUDA_VISIBLE_DEVICES and knows nothing of CUDA's order, so nothing here goes by index. Every
method blocks for some milliseconds: call it in a thread.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import pynvml

logger = logging.getLogger(__name__)

_ECC_UNCORRECTED: Final = 1
_ECC_VOLATILE: Final = 0
_VALUE_NOT_AVAILABLE: Final = 2**64 - 1
"""What NVML writes for the used memory of a process that it can't see into."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What does not change about a GPU. Field names and units are those of ``gpu.proto``."""

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
class SystemVersions:
    """Versions of what is installed. None: it isn't, or NVML couldn't say."""

    driver_version: str | None = None
    cuda_version: int | None = None
    nvml_version: str | None = None


@final
class Inventory:
    """The GPUs of this host. On a host without NVML it is empty."""

    def __init__(self) -> None:
        # pynvml's first look-up of each symbol is not safe among threads.
        self._lock = threading.Lock()
        self.unavailable_reason: str | None = None
        """Why NVML can't be used. None: it can."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.unavailable_reason = str(error)
            logger.warning("no NVML (%s): this host counts as one without GPUs", error)
            self.versions = SystemVersions()
            self._handles: dict[str, Any] = {}
            self.gpus: tuple[GpuFacts, ...] = ()
            return
        self.versions = SystemVersions(
            driver_version=_soft(pynvml.nvmlSystemGetDriverVersion),
            cuda_version=_soft(pynvml.nvmlSystemGetCudaDriverVersion_v2),
            nvml_version=_soft(pynvml.nvmlSystemGetNVMLVersion),
        )
        self._handles = _find_handles()
        self.gpus = tuple(_read_facts(uuid, handle) for uuid, handle in self._handles.items())

    @property
    def chips(self) -> dict[str, str]:
        """Chip of every GPU by UUID, in slot order. GPUs with equal product names have the same chip."""
        return {gpu.uuid: gpu.name for gpu in self.gpus}

    def read(self) -> dict[str, GpuReading]:
        """Measures every GPU."""
        with self._lock:
            return {uuid: _read_sample(handle) for uuid, handle in self._handles.items()}

    def process_memory(self) -> dict[str, dict[int, int | None]]:
        """Device memory by GPU UUID and pid, in bytes. A pid is there even where its memory is unknown.

        A GPU is missing where NVML can't list its processes.
        """
        found: dict[str, dict[int, int | None]] = {}
        with self._lock:
            for uuid, handle in self._handles.items():
                processes = _soft(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
                if processes is not None:
                    found[uuid] = {process.pid: _known(process.usedGpuMemory) for process in processes}
        return found


def _find_handles() -> dict[str, Any]:
    """NVML's handles by UUID. A GPU that does not answer is left out: its name on the wire is not known."""
    handles: dict[str, Any] = {}
    for index in range(_soft(pynvml.nvmlDeviceGetCount) or 0):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            handles[pynvml.nvmlDeviceGetUUID(handle)] = handle
        except pynvml.NVMLError as error:
            logger.warning("NVML's GPU %d is left out of the pool: %s", index, error)
    return handles


def _soft(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls NVML; None where it answers an error."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        logger.debug("%s: %s", getattr(function, "__name__", "NVML"), error)
        return None


def _known(memory_bytes: int | None) -> int | None:
    return None if memory_bytes in (None, _VALUE_NOT_AVAILABLE) else memory_bytes


def _read_facts(uuid: str, handle: Any) -> GpuFacts:
    memory = _soft(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _soft(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = _soft(pynvml.nvmlDeviceGetPciInfo_v3, handle)
    mig = _soft(pynvml.nvmlDeviceGetMigMode, handle)
    persistence = _soft(pynvml.nvmlDeviceGetPersistenceMode, handle)
    serial = _soft(pynvml.nvmlDeviceGetSerial, handle)
    return GpuFacts(
        uuid=uuid,
        name=_soft(pynvml.nvmlDeviceGetName, handle) or "unknown",
        memory_total_bytes=memory and memory.total,
        compute_capability=capability and f"{capability[0]}.{capability[1]}",
        pci_bus_id=pci and _text(pci.busId),
        pci_device_id=pci and f"0x{pci.pciDeviceId:08X}",
        # Boards without one report "0".
        serial=serial if serial != "0" else None,
        mig_enabled=None if mig is None else mig[0] == 1,
        persistence_mode=None if persistence is None else persistence == 1,
        numa_node=_numa_node(_text(pci.busId)) if pci else None,
    )


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def _numa_node(pci_bus_id: str) -> int | None:
    """What the kernel says; it writes -1 where there is one node only. Its PCI domain has four digits."""
    path = Path("/sys/bus/pci/devices") / pci_bus_id.lower()[4:] / "numa_node"
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_sample(handle: Any) -> GpuReading:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return GpuReading(lost=error.value == pynvml.NVML_ERROR_GPU_IS_LOST)
    utilization = _soft(pynvml.nvmlDeviceGetUtilizationRates, handle)
    encoder = _soft(pynvml.nvmlDeviceGetEncoderUtilization, handle)
    decoder = _soft(pynvml.nvmlDeviceGetDecoderUtilization, handle)
    return GpuReading(
        utilization_percent=utilization and utilization.gpu,
        encoder_utilization_percent=encoder and encoder[0],
        decoder_utilization_percent=decoder and decoder[0],
        memory_used_bytes=memory.used,
        memory_total_bytes=memory.total,
        temperature_celsius=_soft(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        ecc_uncorrected_errors=_soft(
            pynvml.nvmlDeviceGetTotalEccErrors, handle, _ECC_UNCORRECTED, _ECC_VOLATILE
        ),
    )
