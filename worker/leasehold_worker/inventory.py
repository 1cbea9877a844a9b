"""What NVML says of this host's GPUs, by UUID. What it can't say is None, never zero, and never an error.

NVML ignores CUDA_VISIBLE_DEVICES and knows nothing of CUDA's order, so nothing here goes by index. Every
method blocks for some milliseconds, and never for much longer than :data:`ANSWER_TIMEOUT_S`: call it in a
thread.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, final

import pynvml
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 10.0
"""How long NVML may take: with a driver that hangs it never answers. One that was that late is not asked
again before it has answered."""

_ECC_UNCORRECTED: Final = 1
_ECC_VOLATILE: Final = 0
SHARED_MARGIN_BYTES: Final = 2**26
"""Memory on a GPU that others may take while a restore is on its way there: 64 MiB."""

_VALUE_NOT_AVAILABLE: Final = 2**64 - 1
"""What NVML writes for the used memory of a process that it can't see into."""


Answer = TypeVar("Answer")


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

    @property
    def unexplained_bytes(self) -> int | None:
        """Memory in use by nobody who is listed. None: NVML can't say."""
        sizes = [size for size in self.processes.values() if size is not None]
        if self.used_bytes is None or len(sizes) < len(self.processes):
            return None
        return self.used_bytes - sum(sizes)


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
        self._overdue = threading.Event()
        """Set unless a question was not answered in time, and still is not."""
        self._overdue.set()
        self.unavailable_reason: str | None = None
        """Why NVML can't be used. None: it can."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.unavailable_reason = str(error)
            logger.warning("no NVML (%s): this host counts as one without GPUs", error)
            self.versions = SystemVersions()
            self._handles: dict[str, Any] = {}
            self.left_out: tuple[str, ...] = ()
            """GPUs that did not answer, each with why: their names on the wire are not known."""
            self.gpus: tuple[GpuFacts, ...] = ()
            return
        self.versions = SystemVersions(
            driver_version=_soft(pynvml.nvmlSystemGetDriverVersion),
            cuda_version=_soft(pynvml.nvmlSystemGetCudaDriverVersion_v2),
            nvml_version=_soft(pynvml.nvmlSystemGetNVMLVersion),
        )
        self._handles, self.left_out = _find_handles()
        self.gpus = tuple(_read_facts(uuid, handle) for uuid, handle in self._handles.items())

    @property
    def chips(self) -> dict[str, str]:
        """Chip of every GPU by UUID, in slot order. GPUs with equal product names have the same chip."""
        return {gpu.uuid: gpu.name for gpu in self.gpus}

    @property
    def minors(self) -> dict[str, int]:
        """N of /dev/nvidiaN by GPU UUID. A GPU is missing where NVML can't say."""
        return {gpu.uuid: gpu.minor_number for gpu in self.gpus if gpu.minor_number is not None}

    def mig_enabled(self) -> frozenset[str]:
        """UUIDs of the GPUs with MIG on now: it can be turned on at any time.

        Raises:
            OperationError: DRIVER_TIMEOUT.
        """
        modes = self._ask(
            lambda: {
                uuid: _soft(pynvml.nvmlDeviceGetMigMode, handle) for uuid, handle in self._handles.items()
            }
        )
        return frozenset(uuid for uuid, mode in modes.items() if mode is not None and mode[0] == 1)

    def mps_pids(self) -> frozenset[int]:
        """Process ids of the clients of MPS.

        Raises:
            OperationError: DRIVER_TIMEOUT.
        """
        found = self._ask(
            lambda: [
                _soft(pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle)
                for handle in self._handles.values()
            ]
        )
        return frozenset(process.pid for processes in found for process in processes or ())

    def read(self) -> dict[str, GpuReading]:
        """Measures every GPU, and looks at those facts that an operator may change."""
        try:
            return self._ask(self._read)
        except OperationError:
            return {uuid: GpuReading() for uuid in self._handles}

    def free_bytes(self, own_pids: Collection[int]) -> dict[str, int]:
        """Free device memory by GPU UUID, less a margin where processes run that are not one's own.

        A GPU is missing where NVML can't say.

        Raises:
            OperationError: DRIVER_TIMEOUT: what does not fit there is lost, so nobody may guess.
        """
        free = {uuid: reading.memory_free_bytes for uuid, reading in self._ask(self._read).items()}
        usage = self._ask(self._usage)
        shared = {uuid for uuid, gpu in usage.items() if gpu.processes.keys() - set(own_pids)}
        return {
            uuid: max(0, free_bytes - SHARED_MARGIN_BYTES) if uuid in shared else free_bytes
            for uuid, free_bytes in free.items()
            if free_bytes is not None
        }

    def usage(self) -> dict[str, GpuUsage]:
        """Who uses the memory of each GPU, by UUID. A GPU is missing where NVML can't list its processes."""
        try:
            return self._ask(self._usage)
        except OperationError:
            return {}

    def answers(self) -> bool:
        """Whether NVML says who uses the GPUs, or at least that it can't."""
        try:
            self._ask(self._usage)
        except OperationError:
            return False
        return True

    def _read(self) -> dict[str, GpuReading]:
        self.gpus = tuple(_with_modes(gpu, self._handles[gpu.uuid]) for gpu in self.gpus)
        return {uuid: _read_sample(handle) for uuid, handle in self._handles.items()}

    def _usage(self) -> dict[str, GpuUsage]:
        found: dict[str, GpuUsage] = {}
        for uuid, handle in self._handles.items():
            processes = _soft(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
            memory = _soft(pynvml.nvmlDeviceGetMemoryInfo, handle)
            if processes is not None:
                found[uuid] = GpuUsage(
                    memory and memory.used,
                    {process.pid: _known(process.usedGpuMemory) for process in processes},
                )
        return found

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Asks NVML, one question at a time, in a thread that is left behind where it hangs.

        Raises:
            OperationError: DRIVER_TIMEOUT.
        """
        if not self._overdue.is_set() or not self._lock.acquire(timeout=ANSWER_TIMEOUT_S):
            raise _unanswered()
        future: Future[Answer] = Future()
        done = threading.Event()

        def ask() -> None:
            try:
                future.set_result(question())
            except BaseException as error:  # noqa: BLE001 - raised where it was asked
                future.set_exception(error)
            self._lock.release()
            done.set()

        try:
            threading.Thread(target=ask, name="nvml", daemon=True).start()
        except RuntimeError as error:
            self._lock.release()
            raise _unanswered() from error
        if not done.wait(ANSWER_TIMEOUT_S):
            self._overdue = done
            logger.error("%s", _unanswered().message)
            raise _unanswered()
        return future.result()


def _unanswered() -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_DRIVER_TIMEOUT,
        f"NVML does not answer within {ANSWER_TIMEOUT_S:g} s: look at what the kernel's log says of the GPUs",
    )


def _find_handles() -> tuple[dict[str, Any], tuple[str, ...]]:
    """NVML's handles by UUID, and why GPUs that do not answer are left out."""
    handles: dict[str, Any] = {}
    left_out: list[str] = []
    for index in range(_soft(pynvml.nvmlDeviceGetCount) or 0):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            handles[pynvml.nvmlDeviceGetUUID(handle)] = handle
        except pynvml.NVMLError as error:
            logger.warning("NVML's GPU %d is left out of the pool: %s", index, error)
            left_out.append(f"GPU {index} of NVML: {error}")
    return handles, tuple(left_out)


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
    return _with_modes(facts, handle)


def _with_modes(facts: GpuFacts, handle: Any) -> GpuFacts:
    """The facts with the modes as they are now. One that NVML can't tell now stays as it was."""
    mig = _soft(pynvml.nvmlDeviceGetMigMode, handle)
    persistence = _soft(pynvml.nvmlDeviceGetPersistenceMode, handle)
    return replace(
        facts,
        mig_enabled=facts.mig_enabled if mig is None else mig[0] == 1,
        persistence_mode=facts.persistence_mode if persistence is None else persistence == 1,
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
