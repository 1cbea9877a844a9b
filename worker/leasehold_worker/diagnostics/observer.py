"""Observations of the test program of ``leasehold validate``: by itself, by the driver and by NVML."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias, final

import msgspec
import trio

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.byte_sizes import size_text
from leasehold_worker.diagnostics.target_program import Sighting
from leasehold_worker.driver.errors import DriverError
from leasehold_worker.driver.helper_pool import DriverCallUnansweredError, DriverUnavailableError
from leasehold_worker.driver.process import CheckpointProcess, ProcessState
from leasehold_worker.gpus.inventory import GpuUsage
from leasehold_worker.workloads.workload import Workload

ROUNDS: Final = 2
"""The second round after an event began after it, so all its reads happened after the event."""

WAIT_S: Final = 60.0
SLOWEST_BYTES_PER_S: Final = 2e8
"""Longest duration of a round: this wait, plus the buffer at this speed."""

NVML_WAIT_S: Final = 5.0
"""Time for NVML to follow the driver."""

STILL_S: Final = 0.1
POLL_S: Final = 0.02

Usage: TypeAlias = Mapping[str, GpuUsage]


class ValidationError(Exception):
    """A condition does not hold; the text has the expected and the observed value."""


@final
class Observer:
    """Observes the program of one validation.

    Args:
        parts: The worker's parts.
        file: File of the program's sightings.
        size_bytes: Size of its buffer.
        note: Receives what could not be observed.
    """

    def __init__(self, parts: Parts, file: Path, size_bytes: int, note: Callable[[str], None]) -> None:
        self._parts = parts
        self._file = file
        self._size_bytes = size_bytes
        self._note = note
        self._is_listed = True

    def rounds(self) -> int:
        """Number of finished rounds."""
        return self._sighting().rounds

    def _sighting(self) -> Sighting:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Sighting)
        except FileNotFoundError:
            return Sighting(0, intact=True, gpu_uuid="")

    async def see_running(self, workload: Workload, gpu_uuid: str) -> None:
        """Waits until the program has finished new rounds, and checks its reports of them.

        Raises:
            ValidationError: The program stopped, ended, read other bytes, or is on another GPU.
        """
        wait_s = ROUNDS * (WAIT_S + self._size_bytes / SLOWEST_BYTES_PER_S)
        before = self.rounds()
        with trio.move_on_after(wait_s) as scope:
            while self.rounds() < before + ROUNDS:
                if workload.ended.is_set():
                    said = workload.output_path.read_text(errors="replace").strip().splitlines()
                    raise ValidationError(f"the program ended: {(said[-1] if said else 'without output')}")
                await trio.sleep(POLL_S)
        if scope.cancelled_caught:
            raise ValidationError(f"the program's counter stopped for {wait_s:.0f} s, and should advance")
        seen = self._sighting()
        if not seen.intact:
            raise ValidationError("the program read other bytes from the GPU than it had written")
        if seen.gpu_uuid != gpu_uuid:
            raise ValidationError(f"the program uses {seen.gpu_uuid}, not {gpu_uuid}")
        await self._see_state(workload, ProcessState.RUNNING)

    async def see_parked(self, workload: Workload) -> None:
        """Checks that the program has stopped, and the driver's state.

        Raises:
            ValidationError: The program runs, or is in another state.
        """
        await self._see_state(workload, ProcessState.CHECKPOINTED)
        before = self.rounds()
        await trio.sleep(STILL_S)
        if self.rounds() > before + 1:  # one count from before the lock may be reported late
            raise ValidationError(
                "the program's counter advances, and should stop while the program is suspended"
            )

    async def _see_state(self, workload: Workload, wanted: ProcessState) -> None:
        pid = workload.root.pid
        try:
            state = await CheckpointProcess(self._parts.driver, pid).state()
        except (DriverError, DriverCallUnansweredError, DriverUnavailableError) as error:
            raise ValidationError(f"the driver reports no state of process {pid}: {error}") from error
        if state is not wanted:
            raise ValidationError(f"the driver reports process {pid} as {state.name}, not {wanted.name}")

    async def usage(self) -> Usage:
        """The current usage of each GPU's memory, by NVML."""
        return await trio.to_thread.run_sync(self._parts.inventory.usage)

    async def see_listed_at_all(self, pid: int) -> None:
        """Finds out whether NVML lists the process, which is on a GPU. If not, its list is no evidence."""
        with trio.move_on_after(NVML_WAIT_S):
            while not _places(await self.usage(), pid):  # noqa: ASYNC110 - nothing else tells
                await trio.sleep(POLL_S)
            return
        self._is_listed = False
        self._note(
            f"NVML does not list the program's process {pid}, as in a container with its own "
            "process ids, so its list of processes was not compared"
        )

    async def see_memory(
        self, pid: int, before: Usage, *, left: str | None = None, entered: str | None = None
    ) -> int | None:
        """Waits until NVML agrees that the program left one GPU, entered another, or both.

        Returns:
            The memory that was allocated, or else freed. None: unknown to NVML.

        Raises:
            ValidationError: NVML lists the process on another GPU, or too little memory was moved.
        """
        deadline = trio.current_time() + NVML_WAIT_S
        while True:
            now = await self.usage()
            wrong = self._misplaced(now, pid, entered)
            moved: int | None = None
            for gpu_uuid, verb, direction in ((left, "freed", -1), (entered, "taken", 1)):
                if gpu_uuid is None:
                    continue
                then_bytes, now_bytes = _own_bytes(before, gpu_uuid, pid), _own_bytes(now, gpu_uuid, pid)
                if then_bytes is None or now_bytes is None:
                    self._note(
                        f"the program's memory on {gpu_uuid} can't be told apart from that of other processes"
                    )
                    continue
                moved = direction * (now_bytes - then_bytes)
                if moved < self._size_bytes and wrong is None:
                    wrong = (
                        f"{size_text(max(0, moved))} of {gpu_uuid} were {verb}, but the "
                        f"program holds {size_text(self._size_bytes)}"
                    )
            if wrong is None:
                return moved
            if trio.current_time() >= deadline:
                raise ValidationError(wrong)
            await trio.sleep(POLL_S)

    def _misplaced(self, now: Usage, pid: int, wanted: str | None) -> str | None:
        places = _places(now, pid)
        if not self._is_listed or places == ({wanted} if wanted else set()):
            return None
        return (
            f"NVML lists process {pid} on {', '.join(sorted(places)) or 'no GPU'}, not on {wanted or 'none'}"
        )


def _places(usage: Usage, pid: int) -> set[str]:
    return {gpu_uuid for gpu_uuid, gpu in usage.items() if pid in gpu.processes}


def _own_bytes(usage: Usage, gpu_uuid: str, pid: int) -> int | None:
    """The memory in use on a GPU less that of other processes. None: unknown to NVML."""
    gpu = usage.get(gpu_uuid)
    if gpu is None or gpu.used_bytes is None:
        return None
    others = [size for other, size in gpu.processes.items() if other != pid]
    return None if None in others else gpu.used_bytes - sum(size for size in others if size is not None)
