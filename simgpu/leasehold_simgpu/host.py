"""A simulated GPU host: made, watched and disturbed from Python, while programs use it through its libraries."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Final, final
from uuid import UUID

from leasehold_simgpu import layout
from leasehold_simgpu.build import build
from leasehold_simgpu.chips import CHIPS, GIB, Chip, find_chip
from leasehold_simgpu.errors import InvalidSettingError, NoSuchHostError
from leasehold_simgpu.process_table import start_time
from leasehold_simgpu.timing import Timing

DIRECTORY_VARIABLE: Final = "LEASEHOLD_SIMGPU_DIR"
DEFAULT_DRIVER_VERSION: Final = "580.95.05"
DEFAULT_CONTEXT_BYTES: Final = 512 * 1024**2

CUDA_OF_BRANCH: Final[Mapping[int, int]] = {
    550: 12040,
    555: 12050,
    560: 12060,
    565: 12070,
    570: 12080,
    575: 12090,
    580: 13000,
    590: 13010,
    595: 13020,
    610: 13030,
    615: 13040,
}
"""The CUDA version that each driver branch brings."""

CALL_OF_ACTION: Final[Mapping[str, str]] = {
    "get_state": "cuCheckpointProcessGetState",
    "get_restore_thread_id": "cuCheckpointProcessGetRestoreThreadId",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
"""Short names for the calls that faults are most often set on."""


class ProcessState(IntEnum):
    """The driver's CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """One GPU of a simulated host, as it was when it was read."""

    index: int
    uuid: str
    """As NVML writes it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""
    chip: str
    name: str
    memory_bytes: int
    used_bytes: int
    """Taken by processes whose memory is on the GPU, and hogged."""
    hogged_bytes: int
    lost: bool
    mig_enabled: bool


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
    """One living CUDA process of a simulated host, as it was when it was read."""

    pid: int
    state: ProcessState
    restore_thread_id: int
    gpu_bytes: Mapping[str, int]
    """By UUID of each GPU it has a context on now: what it takes there, or took before its checkpoint."""
    resident: bool
    """Is its memory on the GPUs?"""
    wedged: bool
    """Did a restore run out of memory? Then nothing helps any more."""
    busy: bool


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """One fault that is set. See `SimulatedHost.set_fault`."""

    id: int
    call: str
    pid: int | None
    error: int
    remaining: int | None


@final
class SimulatedHost:
    """A simulated GPU host on a directory. Any number of objects and processes may use one directory at once.

    The host lives as long as its directory; there is nothing to close.
    """

    def __init__(self, directory: Path, memory: mmap.mmap) -> None:
        self._directory = directory
        self._state = layout.Host.from_buffer(memory)

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        gpus: int = 4,
        chip: str | Sequence[str] = "H100",
        memory_bytes: int | None = None,
        driver_version: str = DEFAULT_DRIVER_VERSION,
        cuda_version: int | None = None,
        persistence_mode: bool = False,
        context_bytes: int = DEFAULT_CONTEXT_BYTES,
        timing: Timing | None = None,
        seed: int | None = None,
    ) -> SimulatedHost:
        """Makes a new host.

        Args:
            directory: Where its state lies. Made if it is not there; it must not hold a host yet.
            gpus: How many GPUs, 1 to 16.
            chip: The short name of their chip, or a sequence with one for each GPU.
            memory_bytes: Memory of each GPU instead of the chip's own.
            driver_version: What NVML says. Its branch decides what the checkpoint API offers.
            cuda_version: What the driver says, as 13000 for CUDA 13.0; by default what the branch brings.
            persistence_mode: Whether a restore works without cuInit in the caller.
            context_bytes: Memory that each context takes beside what is allocated in it.
            timing: How long checkpoints and restores take; by default no time.
            seed: Makes UUIDs and serials repeatable.

        Raises:
            InvalidSettingError: A value is out of range, or the directory holds a host.
        """
        chips = _chips(gpus, chip)
        version = _cuda_version(driver_version) if cuda_version is None else cuda_version
        path = Path(directory).absolute()
        path.mkdir(parents=True, exist_ok=True)
        if (path / "state").exists():
            raise InvalidSettingError(f"{path} holds a simulated host already: open it, or name a new directory")
        state = layout.Host(
            magic=layout.MAGIC,
            gpu_count=gpus,
            cuda_version=version,
            driver_version=driver_version.encode(),
            persistence_mode=persistence_mode,
            context_bytes=context_bytes,
            next_fault_id=1,
        )
        _store_timing(state, Timing.instant() if timing is None else timing)
        source = random.Random(seed)  # noqa: S311 - names, not secrets
        for index, kind in enumerate(chips):
            state.gpus[index] = _new_gpu(index, kind, memory_bytes, source)
        state.layout_bytes = len(bytes(state))
        temporary = path / f".state.{os.getpid()}"
        temporary.write_bytes(bytes(state))
        temporary.rename(path / "state")
        return cls.open(path)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> SimulatedHost:
        """Opens a host that was made before, by this process or another.

        Raises:
            NoSuchHostError: The directory holds no host, or one of another version of simgpu.
        """
        path = Path(directory).absolute()
        try:
            with open(path / "state", "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise NoSuchHostError(f"{path} holds no simulated host: {error}") from error
        state_bytes = len(bytes(layout.Host()))
        if len(memory) != state_bytes or layout.Host.from_buffer_copy(memory).magic != layout.MAGIC:
            raise NoSuchHostError(f"{path} holds a simulated host of another version: make a new one")
        return cls(path, memory)

    @property
    def directory(self) -> Path:
        """Where its state lies."""
        return self._directory

    def environment(self) -> dict[str, str]:
        """The variables that put a child process on this host: merge them into its environment.

        LD_LIBRARY_PATH begins with the simulated libraries and goes on with this process's own. It must be set
        before the child starts: the loader reads it once. Builds the libraries if need be.

        Raises:
            CompilerError: They could not be built.
        """
        paths = [str(build()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"LD_LIBRARY_PATH": ":".join(paths), DIRECTORY_VARIABLE: str(self._directory)}

    @property
    def driver_version(self) -> str:
        """What NVML says: `580.95.05`."""
        return bytes(self._state.driver_version).decode()

    @property
    def cuda_version(self) -> int:
        """What the driver says: 13000 for CUDA 13.0."""
        return int(self._state.cuda_version)

    @property
    def gpus(self) -> tuple[SimulatedGpu, ...]:
        """Its GPUs, in the order of NVML."""
        used = self._used_bytes()
        return tuple(
            SimulatedGpu(
                index=index,
                uuid=uuid_text(gpu.uuid),
                chip=_short_name(gpu.name.decode()),
                name=gpu.name.decode(),
                memory_bytes=gpu.memory_bytes,
                used_bytes=used[index],
                hogged_bytes=gpu.hogged_bytes,
                lost=bool(gpu.lost),
                mig_enabled=bool(gpu.mig_enabled),
            )
            for index, gpu in enumerate(self._state.gpus[: self._state.gpu_count])
        )

    def processes(self) -> tuple[SimulatedProcess, ...]:
        """Its living CUDA processes, by pid: every process that called cuInit."""
        found = [self._describe(record) for record in self._live_records()]
        return tuple(sorted(found, key=lambda process: process.pid))

    def process(self, pid: int) -> SimulatedProcess | None:
        """The living CUDA process of this pid, if there is one."""
        return next((process for process in self.processes() if process.pid == pid), None)

    def set_timing(self, timing: Timing) -> None:
        """Changes how long checkpoints and restores take, from the next call on."""
        _store_timing(self._state, timing)

    def set_persistence_mode(self, enabled: bool) -> None:
        """Switches persistence mode, for all GPUs at once."""
        self._state.persistence_mode = enabled

    def set_fault(
        self,
        call: str,
        pid: int | None = None,
        *,
        error: int = 0,
        delay_s: float = 0.0,
        hang: bool = False,
        signal: int = 0,
        state: ProcessState | int | None = None,
        skip: bool = False,
        keep_memory: bool = False,
        ignore_gpu_pairs: bool = False,
        times: int | None = None,
    ) -> int:
        """Makes a call go wrong, from now on, in every process of the host.

        Args:
            call: A function without version suffix (`cuMemAlloc`, `nvmlDeviceGetCount`; `nvmlInit` for all forms
                of it), or a short name of `CALL_OF_ACTION` (`lock`).
            pid: Only for this process: the target of a checkpoint call, the caller of any other. None is anyone.
            error: What the call returns, a CUresult or nvmlReturn_t. Unless 0, the call does nothing else.
            delay_s: Time that passes first.
            hang: The call returns only when the fault is cleared, or its target dies.
            signal: Sent to the process of `pid` (see there) before anything else happens.
            state: The state that the target has afterwards. Checkpoint calls only, as are the following three.
            skip: Do nothing and return `error`, which may be 0: success.
            keep_memory: A checkpoint that leaves the memory on the GPU.
            ignore_gpu_pairs: A restore that leaves the process on its old GPUs.
            times: How many calls it holds for. None: until cleared.

        Returns:
            The fault's id, for `clear_faults`.

        Raises:
            InvalidSettingError: The call's name is too long, `times` is not positive, or too many faults are set.
        """
        name = CALL_OF_ACTION.get(call, call).encode()
        if not name or len(name) > 55:
            raise InvalidSettingError(f"call {call!r} is not the name of a driver function")
        if times is not None and times < 1:
            raise InvalidSettingError(f"times {times} is not positive: leave it out for every call")
        with self._locked():
            slot = self._free_fault_slot()
            fault = layout.Fault(
                id=self._state.next_fault_id,
                call=name,
                pid=pid or 0,
                error=int(error),
                delay_ms=round(delay_s * 1000),
                hang=hang,
                signal=int(signal),
                state=layout.NO_STATE if state is None else int(state),
                skip=skip,
                keep_memory=keep_memory,
                ignore_gpu_pairs=ignore_gpu_pairs,
                remaining=layout.UNLIMITED if times is None else times,
            )
            self._state.next_fault_id += 1
            self._state.faults[slot] = fault
            self._count_faults()
            return int(fault.id)

    def faults(self) -> tuple[SimulatedFault, ...]:
        """The faults that are set and not used up, oldest first."""
        with self._locked():
            found = [
                SimulatedFault(
                    id=fault.id,
                    call=fault.call.decode(),
                    pid=fault.pid or None,
                    error=fault.error,
                    remaining=None if fault.remaining == layout.UNLIMITED else fault.remaining,
                )
                for fault in self._state.faults
                if fault.id != 0 and fault.remaining != 0
            ]
        return tuple(sorted(found, key=lambda fault: fault.id))

    def clear_faults(self, *, id: int | None = None, call: str | None = None, pid: int | None = None) -> int:  # noqa: A002
        """Clears the faults that match everything given; all without arguments. Calls that hang go on.

        Returns:
            How many were cleared.
        """
        name = None if call is None else CALL_OF_ACTION.get(call, call)
        cleared = 0
        with self._locked():
            for slot, fault in enumerate(self._state.faults):
                matches = id in (None, fault.id) and pid in (None, fault.pid)
                if fault.id != 0 and matches and name in (None, fault.call.decode()):
                    self._state.faults[slot] = layout.Fault()
                    cleared += 1
            self._count_faults()
        return cleared

    def hog(self, gpu: int | str, bytes: int) -> None:  # noqa: A002
        """Takes memory of a GPU for something that is no process of the host; 0 gives it back.

        Args:
            gpu: Index or UUID.
            bytes: How much is taken from now on, not how much more.
        """
        self._gpu(gpu).hogged_bytes = bytes

    def set_busy(self, pid: int, busy: bool = True) -> None:
        """Gives a process work that never drains, so that a lock of it waits or times out.

        Raises:
            InvalidSettingError: It is not a living CUDA process of this host.
        """
        for record in self._live_records():
            if record.pid == pid:
                record.busy = busy
                return
        raise InvalidSettingError(f"pid {pid} is no living CUDA process of the host in {self._directory}")

    def lose_gpu(self, gpu: int | str, lost: bool = True) -> None:
        """Makes a GPU fall off the bus: NVML_ERROR_GPU_IS_LOST, and CUDA_ERROR_UNKNOWN for its users."""
        self._gpu(gpu).lost = lost

    def set_readings(
        self,
        gpu: int | str,
        *,
        utilization_percent: int | None = None,
        memory_utilization_percent: int | None = None,
        encoder_percent: int | None = None,
        decoder_percent: int | None = None,
        temperature_c: int | None = None,
        power_mw: int | None = None,
        ecc_corrected: int | None = None,
        ecc_uncorrected: int | None = None,
        mig_enabled: bool | None = None,
    ) -> None:
        """Sets what NVML reads from a GPU; what is None stays."""
        record = self._gpu(gpu)
        readings = {name: value for name, value in locals().items() if name not in {"self", "gpu", "record"}}
        for name, value in readings.items():
            if value is not None:
                setattr(record, name, value)

    def _gpu(self, gpu: int | str) -> layout.Gpu:
        for index, record in enumerate(self._state.gpus[: self._state.gpu_count]):
            if gpu in (index, uuid_text(record.uuid)):
                return record
        raise InvalidSettingError(f"GPU {gpu!r} is not on the host in {self._directory}")

    def _live_records(self) -> list[layout.Process]:
        with self._locked():
            return [
                record
                for record in self._state.processes
                if record.pid != 0 and start_time(record.pid) == record.start_time
            ]

    def _bytes_by_gpu(self, record: layout.Process) -> dict[int, int]:
        row = record.placement[1 if record.status & layout.PLACEMENT else 0]
        taken: dict[int, int] = {}
        for ordinal in range(record.visible_count):
            if record.contexts[ordinal]:
                contexts = record.contexts[ordinal] * self._state.context_bytes
                taken[row[ordinal]] = record.allocated_bytes[ordinal] + contexts
        return taken

    def _used_bytes(self) -> list[int]:
        used = [gpu.hogged_bytes for gpu in self._state.gpus[: self._state.gpu_count]]
        for record in self._live_records():
            if record.status & layout.RESIDENT:
                for index, taken in self._bytes_by_gpu(record).items():
                    used[index] += taken
        return used

    def _describe(self, record: layout.Process) -> SimulatedProcess:
        taken = self._bytes_by_gpu(record)
        return SimulatedProcess(
            pid=record.pid,
            state=ProcessState(record.status & layout.STATE_MASK),
            restore_thread_id=record.restore_tid,
            gpu_bytes={uuid_text(self._state.gpus[index].uuid): size for index, size in taken.items()},
            resident=bool(record.status & layout.RESIDENT),
            wedged=bool(record.status & layout.WEDGED),
            busy=bool(record.busy),
        )

    def _free_fault_slot(self) -> int:
        slots = [slot for slot, fault in enumerate(self._state.faults) if fault.id == 0]
        used_up = [
            slot for slot, fault in enumerate(self._state.faults) if fault.remaining == 0 and not fault.hang
        ]
        if not slots and not used_up:
            raise InvalidSettingError(f"{layout.MAX_FAULTS} faults are set, the most there can be: clear some")
        return (slots or used_up)[0]

    def _count_faults(self) -> None:
        self._state.fault_count = sum(fault.id != 0 for fault in self._state.faults)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The same flock that the libraries take. Opened anew each time, so that threads exclude each other."""
        with open(self._directory / "state", "rb") as file:
            flock(file, LOCK_EX)
            yield


def uuid_text(raw: Sequence[int]) -> str:
    """A GPU's UUID as NVML writes it."""
    return f"GPU-{UUID(bytes=bytes(raw))}"


def _chips(gpus: int, chip: str | Sequence[str]) -> list[Chip]:
    if not 1 <= gpus <= layout.MAX_GPUS:
        raise InvalidSettingError(f"{gpus} GPUs cannot be simulated: choose 1 to {layout.MAX_GPUS}")
    names = [chip] * gpus if isinstance(chip, str) else list(chip)
    if len(names) != gpus:
        raise InvalidSettingError(f"{len(names)} chips for {gpus} GPUs: name one chip, or one for each GPU")
    return [find_chip(name) for name in names]


def _cuda_version(driver_version: str) -> int:
    branch, _, _ = driver_version.partition(".")
    version = CUDA_OF_BRANCH.get(int(branch)) if branch.isdecimal() else None
    if version is None or len(driver_version) > 31:
        known = ", ".join(str(branch) for branch in CUDA_OF_BRANCH)
        raise InvalidSettingError(f"driver version {driver_version!r} is of no known branch: choose one of {known}")
    return version


def _new_gpu(index: int, chip: Chip, memory_bytes: int | None, source: random.Random) -> layout.Gpu:
    size = chip.memory_bytes if memory_bytes is None else memory_bytes
    if not 0 < size <= 1024 * GIB:
        raise InvalidSettingError(f"GPU memory of {size} bytes cannot be simulated: choose up to 1 TiB")
    uuid = UUID(int=source.getrandbits(128), version=4)
    gpu = layout.Gpu(
        name=chip.name.encode(),
        serial=f"165{source.randrange(10**10):010d}".encode(),
        memory_bytes=size,
        pci_bus=0x17 + 0x11 * index if index < 14 else index,
        pci_device_id=chip.pci_device_id,
        compute_major=chip.compute_capability[0],
        compute_minor=chip.compute_capability[1],
        multiprocessors=chip.multiprocessors,
        temperature_c=30 + index % 4,
        power_mw=chip.power_limit_w * 100,
        power_limit_mw=chip.power_limit_w * 1000,
    )
    gpu.uuid[:] = list(uuid.bytes)
    return gpu


def _short_name(name: str) -> str:
    return next(chip.short_name for chip in CHIPS.values() if chip.name == name)


def _store_timing(state: layout.Host, timing: Timing) -> None:
    state.suspend_fixed_us = round(timing.suspend_fixed_s * 1e6)
    state.suspend_bytes_per_s = round(timing.suspend_bytes_per_s)
    state.restore_fixed_us = round(timing.restore_fixed_s * 1e6)
    state.restore_bytes_per_s = round(timing.restore_bytes_per_s)
