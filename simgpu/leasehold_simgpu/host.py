"""A simulated GPU host: created, observed and changed from Python, while programs use its libraries."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, final

from leasehold_simgpu import layout
from leasehold_simgpu.chips import CHIPS
from leasehold_simgpu.errors import InvalidSettingError
from leasehold_simgpu.faults import FaultTable
from leasehold_simgpu.libraries import build
from leasehold_simgpu.live_processes import LiveProcesses, gpu_records
from leasehold_simgpu.new_host import (
    DEFAULT_CONTEXT_BYTES,
    DEFAULT_DRIVER_VERSION,
    new_host,
    store_timing,
    uuid_text,
)
from leasehold_simgpu.records import Fault, SimulatedGpu, SimulatedProcess
from leasehold_simgpu.state_file import StateFile
from leasehold_simgpu.timing import Timing

DIRECTORY_VARIABLE: Final = "LEASEHOLD_SIMGPU_DIR"
_LARGEST_XID: Final = 2**32 - 1
_READINGS: Final = frozenset(
    {
        "utilization_percent",
        "memory_utilization_percent",
        "encoder_percent",
        "decoder_percent",
        "temperature_c",
        "power_mw",
        "ecc_corrected",
        "ecc_uncorrected",
        "mig_enabled",
        "hides_process_memory",
        "throttle_reasons",
        "remapped_rows_corrected",
        "remapped_rows_uncorrected",
        "row_remap_pending",
        "row_remap_failed",
        "retired_pages_single_bit",
        "retired_pages_double_bit",
        "retired_pages_pending",
    }
)


@final
class SimulatedHost:
    """A simulated GPU host in a directory. Any number of objects and processes may use one directory.

    The host exists as long as its directory. There is nothing to close.
    """

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._state = file.host
        self._faults = FaultTable(file)
        self._live = LiveProcesses(file)

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
        exclusive_memory: bool = False,
        context_bytes: int = DEFAULT_CONTEXT_BYTES,
        timing: Timing | None = None,
        seed: int | None = None,
    ) -> SimulatedHost:
        """Creates a new host.

        Args:
            directory: The directory of its state, created if missing. It must not hold a host yet.
            gpus: Number of GPUs, 1 to 16.
            chip: The short name of their chip, or a sequence with one name for each GPU.
            memory_bytes: Memory of each GPU instead of the chip's own.
            driver_version: The version in NVML. Its branch decides which checkpoint calls exist.
            cuda_version: The version of the driver API, such as 13000 for CUDA 13.0. Default: by branch.
            persistence_mode: Whether a restore works without cuInit in the caller.
            exclusive_memory: Whether two workloads that are resident on one GPU at the same time overwrite
                each other. Processes with the same LEASEHOLD_WORKLOAD_ID are one workload. Without the
                variable, processes of one session are.
            context_bytes: Memory of each context, in addition to its allocations.
            timing: How long checkpoints and restores take. Default: no time.
            seed: Makes UUIDs and serials repeatable.

        Raises:
            InvalidSettingError: A value is out of range, or the directory holds a host.
        """
        state = new_host(
            gpus=gpus,
            chip=chip,
            memory_bytes=memory_bytes,
            driver_version=driver_version,
            cuda_version=cuda_version,
            persistence_mode=persistence_mode,
            exclusive_memory=exclusive_memory,
            context_bytes=context_bytes,
            timing=Timing.instant() if timing is None else timing,
            seed=seed,
        )
        return cls(StateFile.create(Path(directory).absolute(), state))

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> SimulatedHost:
        """Opens an existing host.

        Raises:
            NoSuchHostError: The directory holds no host, or a host of another version of simgpu.
        """
        return cls(StateFile.open(Path(directory).absolute()))

    @property
    def directory(self) -> Path:
        """The directory of its state."""
        return self._file.directory

    def environment(self) -> dict[str, str]:
        """Environment variables that put a child process on this host.

        LD_LIBRARY_PATH has the simulated libraries first, then this process's own path. It must be set before
        the child starts, because the loader reads it once. Builds the libraries if necessary.

        Raises:
            CompilerError: The libraries could not be built.
        """
        paths = [str(build()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"LD_LIBRARY_PATH": ":".join(paths), DIRECTORY_VARIABLE: str(self.directory)}

    @property
    def driver_version(self) -> str:
        """The version in NVML, such as `580.95.05`."""
        return bytes(self._state.driver_version).decode()

    @property
    def cuda_version(self) -> int:
        """The version of the driver API: 13000 for CUDA 13.0."""
        return int(self._state.cuda_version)

    @property
    def gpus(self) -> tuple[SimulatedGpu, ...]:
        """Its GPUs, in the order of NVML."""
        used = self._live.used_bytes()
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
            for index, gpu in enumerate(gpu_records(self._state))
        )

    def processes(self) -> tuple[SimulatedProcess, ...]:
        """Its live CUDA processes, which have called cuInit, ordered by pid."""
        found = [self._live.describe(record) for record in self._live.records()]
        return tuple(sorted(found, key=lambda process: process.pid))

    def process(self, pid: int) -> SimulatedProcess | None:
        """The live CUDA process with this pid. None: there is none."""
        record = self._live.find(pid)
        return None if record is None else self._live.describe(record)

    def set_timing(self, timing: Timing) -> None:
        """Changes how long checkpoints and restores take, from the next call on.

        Raises:
            InvalidSettingError: A value is out of range.
        """
        store_timing(self._state, timing)

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
        signal_delay_s: float = 0.0,
        state: int | None = None,
        skip: bool = False,
        keep_memory: bool = False,
        ignore_gpu_pairs: bool = False,
        after: int = 0,
        times: int | None = None,
    ) -> Fault:
        """Sets a fault on a call. `Fault` describes each argument.

        A fault with a pid precedes a fault without. Of several such faults, the oldest applies.

        Args:
            call: A driver function, or a short name in `CALL_OF_ACTION`: `lock`, `restore`, ….
            pid: Applies only to this process.
            error: The result of the call, which then has no effect.
            delay_s: Seconds to wait first.
            hang: The call returns only when the fault is cleared or its target dies.
            signal: Sent to the process.
            signal_delay_s: Seconds from the return of the call to the signal.
            state: The state of the target afterwards.
            skip: The call returns without effect.
            keep_memory: A checkpoint leaves the memory on the GPU.
            ignore_gpu_pairs: A restore leaves the process on its old GPUs.
            after: Number of matching calls without the fault: 1 means the second restore of a process.
            times: Number of calls with the fault after these.

        Returns:
            The fault with its id for `clear_faults`.

        Raises:
            InvalidSettingError: A value is out of range, or 64 faults are set.
        """
        return self._faults.set(
            Fault(
                call=call,
                pid=pid,
                error=int(error),
                delay_s=delay_s,
                hang=hang,
                signal=int(signal),
                signal_delay_s=signal_delay_s,
                state=None if state is None else int(state),
                skip=skip,
                keep_memory=keep_memory,
                ignore_gpu_pairs=ignore_gpu_pairs,
                after=after,
                times=times,
            )
        )

    def faults(self) -> tuple[Fault, ...]:
        """The active faults, oldest first. `times` is the number of remaining calls."""
        return self._faults.list()

    def clear_faults(
        self, *, fault_id: int | None = None, call: str | None = None, pid: int | None = None
    ) -> int:
        """Clears the faults that match all arguments. Without arguments: all faults. Hanging calls continue.

        Returns:
            The number of cleared faults.
        """
        return self._faults.clear(fault_id, call, pid)

    def hog(self, gpu: int | str, size_bytes: int) -> None:
        """Reserves memory of a GPU for something that is not a process of the host.

        Args:
            gpu: Index or UUID.
            size_bytes: The total reserved size. 0 frees the memory.
        """
        self._gpu(gpu).hogged_bytes = size_bytes

    def set_busy(self, pid: int, busy: bool = True) -> None:
        """Gives a process work that never drains, so that its lock waits or times out.

        Raises:
            InvalidSettingError: The pid is not a live CUDA process of this host.
        """
        self._live_record(pid).busy = busy

    def set_mps_client(self, pid: int, enabled: bool = True) -> None:
        """Makes a process a client of MPS, which NVML lists as such.

        Its checkpoint returns CUDA_ERROR_NOT_SUPPORTED, and the process stays LOCKED.

        Raises:
            InvalidSettingError: The pid is not a live CUDA process of this host.
        """
        self._live_record(pid).mps_client = enabled

    def set_multicast(self, pid: int, enabled: bool = True) -> None:
        """Gives a process a multicast group, so that its checkpoint hangs.

        The checkpoint continues once the group is removed, and ends if the process or the caller dies.

        Raises:
            InvalidSettingError: The pid is not a live CUDA process of this host.
        """
        self._live_record(pid).multicast = enabled

    def set_partial_passthrough(self, pid: int, enabled: bool = True) -> None:
        """Puts a process into a container with only some of the host's GPUs.

        Its checkpoint returns CUDA_ERROR_NOT_PERMITTED, and the process stays LOCKED.

        Raises:
            InvalidSettingError: The pid is not a live CUDA process of this host.
        """
        self._live_record(pid).partial_passthrough = enabled

    def set_profiler(self, pid: int, enabled: bool = True) -> None:
        """Attaches a profiler that uses CUPTI to a process, such as torch.profiler.

        Its lock returns CUDA_ERROR_NOT_SUPPORTED at once, and the process stays RUNNING.

        Raises:
            InvalidSettingError: The pid is not a live CUDA process of this host.
        """
        self._live_record(pid).profiler = enabled

    def set_ipc_importer(self, pid: int, enabled: bool = True) -> None:
        """Lets a process import memory of another process by CUDA IPC (cuIpcOpenMemHandle).

        Its first restore returns CUDA_ERROR_INVALID_VALUE and wedges the process: it stays CHECKPOINTED, and
        further restores return CUDA_ERROR_OPERATING_SYSTEM.

        Raises:
            InvalidSettingError: The pid is not a live CUDA process of this host.
        """
        self._live_record(pid).ipc_importer = enabled

    def set_peers(self, pids: Collection[int], enabled: bool = True) -> None:
        """Makes processes peers, like the ranks of an NCCL job, or removes their peers.

        A checkpoint call on a process waits while a live peer is not RUNNING. New peers replace earlier ones.

        Raises:
            InvalidSettingError: A pid is not a live CUDA process of this host.
        """
        records = [self._live_record(pid) for pid in pids]
        for record in records:
            record.peer_group = min(pids) if enabled else 0

    def lose_gpu(self, gpu: int | str, lost: bool = True) -> None:
        """Removes a GPU from the bus: NVML_ERROR_GPU_IS_LOST, and CUDA_ERROR_UNKNOWN for its users."""
        self._gpu(gpu).lost = lost

    def set_readings(self, gpu: int | str, **readings: int) -> None:
        """Sets NVML's readings of a GPU. Other readings stay as they are.

        Args:
            gpu: Index or UUID.
            **readings: utilization_percent, memory_utilization_percent, encoder_percent, decoder_percent,
                temperature_c, power_mw, ecc_corrected, ecc_uncorrected, mig_enabled; throttle_reasons (bits
                of `ThrottleReason`); hides_process_memory: NVML lists the GPU's processes without their
                memory; remapped_rows_corrected, remapped_rows_uncorrected, row_remap_pending and
                row_remap_failed, for chips from Ampere on; retired_pages_single_bit,
                retired_pages_double_bit and retired_pages_pending, for older chips.

        Raises:
            InvalidSettingError: The GPU or the reading does not exist.
        """
        record = self._gpu(gpu)
        unknown = sorted(readings.keys() - _READINGS)
        if unknown:
            raise InvalidSettingError(
                f"unknown reading {unknown[0]!r} of a GPU: choose from {', '.join(sorted(_READINGS))}"
            )
        for name, value in readings.items():
            setattr(record, name, value)

    def raise_xid(self, gpu: int | str, xid: int) -> None:
        """Reports an Xid of a GPU to every process that registered for its events before.

        The Xid changes no reading. A process that is more than 32 Xids of a GPU behind misses the oldest.

        Args:
            gpu: Index or UUID.
            xid: NVIDIA's number of the error: 48 is a double-bit ECC error.

        Raises:
            InvalidSettingError: The GPU does not exist, or the number is out of range.
        """
        if not 0 < xid <= _LARGEST_XID:
            raise InvalidSettingError(f"Xid {xid} is out of range: choose 1 or more")
        record = self._gpu(gpu)
        with self._file.locked():
            record.xids[record.xids_raised % layout.XIDS_KEPT] = xid
            record.xids_raised = (record.xids_raised + 1) % 2**32

    def _gpu(self, gpu: int | str) -> layout.Gpu:
        for index, record in enumerate(gpu_records(self._state)):
            if gpu in (index, uuid_text(record.uuid)):
                return record
        raise InvalidSettingError(f"GPU {gpu!r} is not on the host in {self.directory}: see simgpu show")

    def _live_record(self, pid: int) -> layout.Process:
        record = self._live.find(pid)
        if record is not None:
            return record
        raise InvalidSettingError(
            f"pid {pid} is not a live CUDA process of the host in {self.directory}: see simgpu show"
        )


def _short_name(name: str) -> str:
    return next(chip.short_name for chip in CHIPS.values() if chip.name == name)
