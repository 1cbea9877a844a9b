"""The live CUDA processes of a simulated host, read from its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from leasehold_simgpu import layout
from leasehold_simgpu.new_host import uuid_text
from leasehold_simgpu.process_table import has_restore_thread
from leasehold_simgpu.records import ProcessState, SimulatedProcess
from leasehold_simgpu.state_file import StateFile


def gpu_records(state: layout.Host) -> Sequence[layout.Gpu]:
    """The GPUs of a host, in the order of NVML."""
    records: Sequence[layout.Gpu] = state.gpus[: state.gpu_count]
    return records


@final
class LiveProcesses:
    """The records of live processes, and the device memory that they use."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._state = file.host

    def records(self) -> list[layout.Process]:
        """The records of all live processes."""
        with self._file.locked() as state:
            return [record for record in state.processes if record.pid != 0 and _is_live(record)]

    def find(self, pid: int) -> layout.Process | None:
        """The record of a live process. None: there is none with this pid."""
        with self._file.locked() as state:
            return next(
                (record for record in state.processes if record.pid == pid and _is_live(record)), None
            )

    def used_bytes(self) -> list[int]:
        """The used device memory of each GPU."""
        used: list[int] = [gpu.hogged_bytes for gpu in gpu_records(self._state)]
        for record in self.records():
            if record.status & layout.RESIDENT:
                for index, taken in self._bytes_by_gpu(record).items():
                    used[index] += taken
        return used

    def describe(self, record: layout.Process) -> SimulatedProcess:
        """The facts of a live process."""
        gpus = gpu_records(self._state)
        return SimulatedProcess(
            pid=record.pid,
            state=ProcessState(record.status & layout.STATE_MASK),
            restore_thread_id=record.restore_tid,
            gpu_bytes={uuid_text(gpus[gpu].uuid): size for gpu, size in self._bytes_by_gpu(record).items()},
            resident=bool(record.status & layout.RESIDENT),
            wedged=bool(record.status & layout.WEDGED),
            busy=bool(record.busy),
            mps_client=bool(record.mps_client),
            multicast=bool(record.multicast),
            partial_passthrough=bool(record.partial_passthrough),
            profiler=bool(record.profiler),
            ipc_importer=bool(record.ipc_importer),
            peers=self._peers(record),
            controller_pid=record.channel_pid or None,
            calls=dict(zip(layout.CHECKPOINT_CALLS, record.calls, strict=True)),
        )

    def _bytes_by_gpu(self, record: layout.Process) -> dict[int, int]:
        row = record.placement[1 if record.status & layout.PLACEMENT else 0]
        taken: dict[int, int] = {}
        for ordinal in range(record.visible_count):
            if record.contexts[ordinal]:
                contexts = record.contexts[ordinal] * self._state.context_bytes
                taken[row[ordinal]] = record.allocated_bytes[ordinal] + contexts
        return taken

    def _peers(self, record: layout.Process) -> tuple[int, ...]:
        if record.peer_group == 0:
            return ()
        group = {other.pid for other in self.records() if other.peer_group == record.peer_group}
        return tuple(sorted(group - {record.pid}))


def _is_live(record: layout.Process) -> bool:
    """Like `simgpu_record_is_live` of the libraries: an exec keeps the pid, but ends the thread."""
    return has_restore_thread(record.pid, record.restore_tid)
