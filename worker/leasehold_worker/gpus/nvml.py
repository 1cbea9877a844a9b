"""NVML's answers as plain values: the only module that imports pynvml.

A value that NVML does not report is None, never zero, and no error. This module has no deadlines and no
locks: :mod:`leasehold_worker.gpus.inventory` has them.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NewType, final

import pynvml

from leasehold_worker.gpus.facts import GpuFacts, GpuReading, GpuUsage, SystemVersions
from leasehold_worker.gpus.health import HealthReading

logger = logging.getLogger(__name__)

Handle = NewType("Handle", object)
"""NVML's handle of a GPU."""

_ECC_UNCORRECTED: Final = 1
_ECC_VOLATILE: Final = 0
_VALUE_NOT_AVAILABLE: Final = 2**64 - 1
"""NVML's value for the used memory of a process that it can't see into."""
_MOST_XIDS: Final = 64
"""Xids that are taken at once: a broken GPU may report them without end."""
_UNSUPPORTED: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
_RETIREMENT_CAUSES: Final = (
    pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
    pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
)


@dataclass(frozen=True, slots=True)
class Examination:
    """The health reading of one GPU, with its gaps.

    Attributes:
        reading: The reading.
        lacks: Values that NVML did not report, each with the reason.
    """

    reading: HealthReading
    lacks: Mapping[str, str]


def open_nvml() -> str | None:
    """Loads NVML. Returns why it can't be used. None: it can."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    return None


def read_versions() -> SystemVersions:
    """Versions of the installed software."""
    return SystemVersions(
        driver_version=_soft(pynvml.nvmlSystemGetDriverVersion),
        cuda_version=_soft(pynvml.nvmlSystemGetCudaDriverVersion_v2),
        nvml_version=_soft(pynvml.nvmlSystemGetNVMLVersion),
    )


def find_handles() -> tuple[dict[str, Handle], tuple[str, ...]]:
    """NVML's handles by UUID, and the reasons why GPUs without an answer are left out."""
    handles: dict[str, Handle] = {}
    left_out: list[str] = []
    for index in range(_soft(pynvml.nvmlDeviceGetCount) or 0):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            handles[pynvml.nvmlDeviceGetUUID(handle)] = handle
        except pynvml.NVMLError as error:
            logger.warning("excluded GPU %d of NVML from the pool: %s", index, error)
            left_out.append(f"GPU {index} of NVML: {error}")
    return handles, tuple(left_out)


def read_facts(uuid: str, handle: Handle) -> GpuFacts:
    """Facts of a GPU that seldom change."""
    memory = _soft(_memory, handle)
    capability = _soft(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = _soft(pynvml.nvmlDeviceGetPciInfo_v3, handle)
    serial = _soft(pynvml.nvmlDeviceGetSerial, handle)
    facts = GpuFacts(
        uuid=uuid,
        name=_soft(pynvml.nvmlDeviceGetName, handle) or "unknown",
        memory_total_bytes=memory and memory.total,
        compute_capability=capability and f"{capability[0]}.{capability[1]}",
        pci_bus_id=pci and _text(pci.busId),
        pci_device_id=pci and f"0x{pci.pciDeviceId:08X}",
        # Boards without one report "0".
        serial=serial if serial != "0" else None,
        mig_enabled=None,
        persistence_mode=None,
        numa_node=_numa_node(_text(pci.busId)) if pci else None,
        minor_number=_soft(pynvml.nvmlDeviceGetMinorNumber, handle),
    )
    return with_modes(facts, handle)


def with_modes(facts: GpuFacts, handle: Handle) -> GpuFacts:
    """The facts with the current modes. A mode that NVML does not report stays as it was."""
    mig = _soft(pynvml.nvmlDeviceGetMigMode, handle)
    persistence = _soft(pynvml.nvmlDeviceGetPersistenceMode, handle)
    return replace(
        facts,
        mig_enabled=facts.mig_enabled if mig is None else mig[0] == 1,
        persistence_mode=facts.persistence_mode if persistence is None else persistence == 1,
    )


def read_mig(handle: Handle) -> bool | None:
    """Whether MIG is on now."""
    mode = _soft(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else bool(mode[0] == 1)


def read_mps_pids(handle: Handle) -> frozenset[int]:
    """Process ids of the clients of MPS on a GPU."""
    found = _soft(pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle)
    return frozenset(process.pid for process in found or ())


def read_usage(handle: Handle) -> GpuUsage | None:
    """The users of a GPU's memory. None: NVML can't list its processes."""
    processes = _soft(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    memory = _soft(_memory, handle)
    if processes is None:
        return None
    return GpuUsage(
        memory and memory.used, {process.pid: _known(process.usedGpuMemory) for process in processes}
    )


def read_free_bytes(handle: Handle) -> int | None:
    """Free memory of a GPU. None: unknown to NVML."""
    memory = _soft(_memory, handle)
    return None if memory is None else int(memory.free)


def read_lost(handle: Handle) -> bool:
    """Whether NVML reports that a GPU has fallen off the bus."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return bool(error.value == pynvml.NVML_ERROR_GPU_IS_LOST)
    return False


def read_sample(handle: Handle) -> GpuReading:
    """Measures a GPU."""
    try:
        memory = _memory(handle)
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


def examine(handle: Handle) -> Examination:
    """Reads all values that a GPU's health depends on."""
    patient = _Patient(handle)
    lacks: dict[str, str] = {}
    ecc = patient.ask(pynvml.nvmlDeviceGetTotalEccErrors, _ECC_UNCORRECTED, _ECC_VOLATILE)
    if ecc is None:
        lacks["uncorrectable memory errors"] = patient.problem
    # A chip has the one or the other: rows are remapped from Ampere on.
    rows = patient.ask(pynvml.nvmlDeviceGetRemappedRows)
    rows_problem = "" if patient.unsupported else patient.problem
    pending = patient.ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
    if rows is None and pending is None:
        lacks["row remaps and retired pages"] = rows_problem or patient.problem
    pages = [patient.ask(pynvml.nvmlDeviceGetRetiredPages, cause) for cause in _RETIREMENT_CAUSES]
    clocks = patient.ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
    if clocks is None:
        # Its name before driver 535.
        clocks = patient.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    if clocks is None:
        lacks["throttling"] = patient.problem
    mig = patient.ask(pynvml.nvmlDeviceGetMigMode)
    if mig is None and not patient.unsupported:  # without MIG support, no reading is missing
        lacks["MIG mode"] = patient.problem
    reading = HealthReading(
        lost=patient.lost,
        reset_required=patient.reset_required,
        ecc_uncorrected_errors=ecc,
        row_remap_pending=None if rows is None else bool(rows[2]),
        row_remap_failed=None if rows is None else bool(rows[3]),
        retired_pages=None if None in pages else sum(map(len, pages)),
        retired_pages_pending=None if pending is None else bool(pending),
        mig_enabled=None if mig is None else mig[0] == 1,
        throttle_reasons=clocks,
    )
    return Examination(reading, {} if reading.lost or reading.reset_required else lacks)


class _Patient:
    """A GPU under examination, with the reason of missing answers."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.problem = ""
        """The error of the last question without an answer."""
        self.unsupported = False
        """Whether the GPU or the library does not support that question."""
        self.lost = False
        self.reset_required = False

    def ask(self, function: Callable[..., Any], *arguments: int) -> Any:
        try:
            return function(self._handle, *arguments)
        except pynvml.NVMLError as error:
            self.problem = str(error)
            self.unsupported = error.value in _UNSUPPORTED
            self.lost |= error.value == pynvml.NVML_ERROR_GPU_IS_LOST
            self.reset_required |= error.value == pynvml.NVML_ERROR_RESET_REQUIRED
            return None


@dataclass(frozen=True, slots=True)
class XidWait:
    """The result of waiting for Xids.

    Attributes:
        xids: UUID and Xid of each event, in their order. Empty: none came in time.
        unavailable_reason: Why none can come now. Empty: they can.
    """

    xids: tuple[tuple[str, int], ...] = ()
    unavailable_reason: str = ""


@final
class XidEvents:
    """NVML's Xid events of some GPUs, from their registration on. Not thread-safe."""

    def __init__(self, handles: Mapping[str, Handle]) -> None:
        self._handles = handles
        self._uuids = {_address(handle): uuid for uuid, handle in handles.items()}
        self._set: Any = None
        self._registered: set[str] = set()
        self.problems: dict[str, str] = {}
        """Why a GPU has no events, by UUID. Lost GPUs are left out. A change replaces the whole dict."""

    @property
    def complete(self) -> bool:
        """Whether all GPUs are registered."""
        return self._registered == self._handles.keys()

    def register(self) -> str:
        """Registers GPUs that are not registered. Returns why none is. Empty: events can come."""
        problem = ""
        problems: dict[str, str] = {}
        try:
            if self._set is None:
                self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            self.problems = dict.fromkeys(self._handles, str(error))
            return str(error)
        for uuid in self._handles.keys() - self._registered:
            try:
                pynvml.nvmlDeviceRegisterEvents(
                    self._handles[uuid], pynvml.nvmlEventTypeXidCriticalError, self._set
                )
            except pynvml.NVMLError as error:
                problem = str(error)
                if error.value != pynvml.NVML_ERROR_GPU_IS_LOST:
                    problems[uuid] = problem
            else:
                self._registered.add(uuid)
        self.problems = problems
        return "" if self._registered else problem

    def wait(self, timeout_s: float) -> XidWait:
        """Waits for an Xid, and takes simultaneous ones. After a failure all GPUs are registered again."""
        found: list[tuple[str, int]] = []
        try:
            while len(found) < _MOST_XIDS:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0 if found else round(timeout_s * 1000))
                # A GPU that is lost can't be asked for its UUID.
                uuid = self._uuids.get(_address(event.device)) or _soft(
                    pynvml.nvmlDeviceGetUUID, event.device
                )
                if uuid is not None:
                    found.append((uuid, int(event.eventData)))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                if error.value != pynvml.NVML_ERROR_GPU_IS_LOST:
                    self.problems = dict.fromkeys(self._handles, str(error))
                _soft(pynvml.nvmlEventSetFree, self._set)
                self._set = None
                self._registered.clear()
                return XidWait(tuple(found), str(error))
        return XidWait(tuple(found))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _memory(handle: Handle) -> Any:
    """Memory of a GPU. The driver's reserve is neither used nor free, where NVML tells it apart.

    NVML's first structure counts the reserve as used: 480 MiB on an empty H100 (seen, driver 580.159.04).
    """
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value not in _UNSUPPORTED:
            raise
    return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _soft(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls NVML; None after an error."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        logger.debug("%s: %s", getattr(function, "__name__", "NVML"), error)
        return None


def _known(memory_bytes: int | None) -> int | None:
    return None if memory_bytes in (None, _VALUE_NOT_AVAILABLE) else memory_bytes


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def _numa_node(pci_bus_id: str) -> int | None:
    """The NUMA node in sysfs, where -1 means that there is only one. A PCI domain there has four digits."""
    path = Path("/sys/bus/pci/devices") / pci_bus_id.lower()[4:] / "numa_node"
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
