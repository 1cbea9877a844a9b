"""NVML's answers about this host's GPUs, by UUID. An unknown value is None, never zero, and no error.

NVML ignores CUDA_VISIBLE_DEVICES and knows nothing of CUDA's order, so nothing here goes by index. Every
method blocks for some milliseconds, and never for much longer than :data:`ANSWER_TIMEOUT_S`: call it in a
thread.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Final, TypeVar, final

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.gpus import nvml
from leasehold_worker.gpus.facts import FreeMemory, GpuFacts, GpuReading, GpuUsage, SystemVersions
from leasehold_worker.gpus.health import HealthReading
from leasehold_worker.gpus.nvml import Handle, XidWait

__all__ = [
    "ANSWER_TIMEOUT_S",
    "SHARED_MARGIN_BYTES",
    "FreeMemory",
    "GpuFacts",
    "GpuReading",
    "GpuUsage",
    "HealthReading",
    "Inventory",
    "SystemVersions",
    "XidWait",
]

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 10.0
"""Timeout of NVML, which never answers with a driver that hangs. After a timeout, NVML is not asked again
before it has answered."""

SHARED_MARGIN_BYTES: Final = 2**26
"""Memory on a shared GPU that other processes may allocate during a restore: 64 MiB."""

EMPTY_BYTES: Final = 2**30
"""Largest used memory of an empty GPU: the driver keeps some hundred MiB for itself."""

Answer = TypeVar("Answer")


@final
class Inventory:
    """The GPUs of this host. On a host without NVML it is empty.

    Args:
        served: UUIDs of the GPUs that this worker serves. Empty: all. The driver's map of GPUs needs the
            others too, so :attr:`chips` and :attr:`minors` name every GPU of the host.
    """

    def __init__(self, served: Collection[str] = ()) -> None:
        # pynvml's first look-up of each symbol is not safe among threads.
        self._lock = threading.Lock()
        self._overdue = threading.Event()
        """Cleared while a question that timed out has no answer."""
        self._overdue.set()
        self._waiting = threading.Lock()
        self.unavailable_reason = nvml.open_nvml()
        """Why NVML can't be used. None: it can."""
        self.versions = SystemVersions()
        self.left_out: tuple[str, ...] = ()
        """GPUs that did not answer, each with the reason."""
        self._handles: dict[str, Handle] = {}
        if self.unavailable_reason is None:
            self.versions = nvml.read_versions()
            self._handles, self.left_out = nvml.find_handles()
        else:
            logger.warning("no NVML (%s): this host is treated as one without GPUs", self.unavailable_reason)
        self._served = frozenset(served)
        self._facts: tuple[GpuFacts, ...] = tuple(
            nvml.read_facts(uuid, handle) for uuid, handle in self._handles.items()
        )
        self._watched = {gpu.uuid: self._handles[gpu.uuid] for gpu in self.gpus}
        """The GPUs that this worker serves, whose health it monitors."""
        self._xids = nvml.XidEvents(self._watched)
        self._reading_lacks: tuple[str, ...] = ()
        if self._watched:
            self._xids.register()
            self._examine()

    @property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs that this worker serves, in slot order."""
        return tuple(gpu for gpu in self._facts if not self._served or gpu.uuid in self._served)

    @property
    def missing(self) -> tuple[str, ...]:
        """UUIDs of GPUs that this worker should serve and that NVML does not list."""
        return tuple(sorted(self._served - self._handles.keys()))

    @property
    def chips(self) -> dict[str, str]:
        """Chip of every GPU of the host by UUID. GPUs with equal product names have the same chip."""
        return {gpu.uuid: gpu.name for gpu in self._facts}

    @property
    def minors(self) -> dict[str, int]:
        """N of /dev/nvidiaN by GPU UUID. A GPU unknown to NVML is missing."""
        return {gpu.uuid: gpu.minor_number for gpu in self._facts if gpu.minor_number is not None}

    def mig_enabled(self) -> frozenset[str]:
        """UUIDs of the GPUs with MIG on now: an operator can turn it on at any time.

        Raises:
            OperationError: DRIVER_TIMEOUT.
        """
        modes = self._ask(lambda: {uuid: nvml.read_mig(handle) for uuid, handle in self._handles.items()})
        return frozenset(uuid for uuid, enabled in modes.items() if enabled)

    def mps_pids(self) -> frozenset[int]:
        """Process ids of the clients of MPS.

        Raises:
            OperationError: DRIVER_TIMEOUT.
        """
        found = self._ask(lambda: [nvml.read_mps_pids(handle) for handle in self._handles.values()])
        return frozenset[int]().union(*found)

    def read(self) -> dict[str, GpuReading]:
        """Measures every GPU, and reads the facts that an operator may change."""
        try:
            return self._ask(self._read)
        except OperationError:
            return {uuid: GpuReading() for uuid in self._handles}

    def lost(self) -> frozenset[str]:
        """UUIDs of the GPUs that NVML reports as fallen off the bus."""
        try:
            found = self._ask(
                lambda: {uuid: nvml.read_lost(handle) for uuid, handle in self._handles.items()}
            )
        except OperationError:
            return frozenset()
        return frozenset(uuid for uuid, lost in found.items() if lost)

    def room(self, own_pids: Collection[int]) -> FreeMemory:
        """The device memory that is free for some processes.

        Raises:
            OperationError: DRIVER_TIMEOUT: the free memory is unknown, and a wrong guess would lose a
                process.
        """
        usage, free = self._ask(self._free)
        others = {uuid for uuid, gpu in usage.items() if gpu.processes.keys() - set(own_pids)}
        return FreeMemory(
            {
                uuid: max(0, free_bytes - SHARED_MARGIN_BYTES) if uuid in others else free_bytes
                for uuid, free_bytes in free.items()
                if free_bytes is not None
            },
            frozenset(others),
            frozenset(
                uuid
                for uuid, gpu in usage.items()
                if uuid not in others and gpu.used_bytes is not None and gpu.used_bytes <= EMPTY_BYTES
            ),
        )

    def usage(self) -> dict[str, GpuUsage]:
        """The users of each GPU's memory, by UUID. A GPU is missing if NVML can't list its processes."""
        try:
            return self._ask(self._usage)
        except OperationError:
            return {}

    def answers(self) -> bool:
        """Whether NVML answers within the timeout."""
        try:
            self._ask(self._usage)
        except OperationError:
            return False
        return True

    def read_health(self) -> dict[str, HealthReading]:
        """The health reading of each GPU, by UUID. A GPU without an answer in time is missing."""
        try:
            return self._ask(self._examine)
        except OperationError as error:
            self._reading_lacks = (error.message,)
            return {}

    @property
    def health_lacks(self) -> tuple[str, ...]:
        """The gaps of this host's health readings, each with the reason, as of the last reading."""
        if self.unavailable_reason is not None:
            return (f"all of NVML: {self.unavailable_reason}",)
        return self._reading_lacks + self._told(("Xid events", why) for why in self._xids.problems.values())

    def wait_xids(self, timeout_s: float) -> XidWait:
        """Waits for Xids of the GPUs. Each Xid since the start of the inventory is returned once.

        Other questions are answered meanwhile. Only one thread can wait: a second one waits for the first,
        and then finds nothing.

        Args:
            timeout_s: Time to wait for the first Xid. Simultaneous ones are returned, too.

        Returns:
            The Xids, or the reason why there can be none, without waiting. Call again later, since a broken
            driver may recover.
        """
        if not self._watched:
            return XidWait(unavailable_reason=self.unavailable_reason or "this host has no GPU")
        if not self._waiting.acquire(timeout=timeout_s):
            return XidWait()
        try:
            if not self._xids.complete and (reason := self._ask(self._xids.register)):
                return XidWait(unavailable_reason=reason)
            return self._xids.wait(timeout_s)
        except OperationError as error:
            return XidWait(unavailable_reason=error.message)
        finally:
            self._waiting.release()

    def _read(self) -> dict[str, GpuReading]:
        self._facts = tuple(nvml.with_modes(gpu, self._handles[gpu.uuid]) for gpu in self._facts)
        return {uuid: nvml.read_sample(handle) for uuid, handle in self._handles.items()}

    def _usage(self) -> dict[str, GpuUsage]:
        found = {uuid: nvml.read_usage(handle) for uuid, handle in self._handles.items()}
        return {uuid: usage for uuid, usage in found.items() if usage is not None}

    def _free(self) -> tuple[dict[str, GpuUsage], dict[str, int | None]]:
        free = {uuid: nvml.read_free_bytes(handle) for uuid, handle in self._handles.items()}
        return self._usage(), free

    def _examine(self) -> dict[str, HealthReading]:
        found = {uuid: nvml.examine(handle) for uuid, handle in self._watched.items()}
        self._reading_lacks = self._told(lack for gpu in found.values() for lack in gpu.lacks.items())
        return {uuid: gpu.reading for uuid, gpu in found.items()}

    def _told(self, lacks: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """The gaps with reasons, once each, with the number of GPUs unless it is all."""
        total = len(self._watched)
        return tuple(
            f"{what}: {why}" if count == total else f"{what}: {why} ({count} of {total} GPUs)"
            for (what, why), count in Counter(lacks).items()
        )

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Asks NVML, one question at a time, in a thread that is abandoned if it hangs.

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
        f"NVML did not answer within {ANSWER_TIMEOUT_S:g} s: check the kernel's log for errors of the GPUs",
    )
