"""Verification on a host's GPUs that a process can be suspended, restored and moved."""

import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import gpu_pb2, operation_pb2, workload_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.byte_sizes import size_text
from leasehold_worker.commands.progress import Progress
from leasehold_worker.diagnostics.observer import Observer, ValidationError
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import GpuFacts
from leasehold_worker.planning.driver_checks import REMAP_CUDA_VERSION, SUSPEND_CUDA_VERSION, why_unsupported
from leasehold_worker.workloads.states import RUNNING, SUSPENDED, state_text
from leasehold_worker.workloads.workload import Workload

CONTEXT_BYTES: Final = 2**30
"""Room for a CUDA context beside the buffer."""

TARGET: Final = "validation"
END_S: Final = 5
"""Time for the program to end after SIGTERM."""

TRANSFERS: Final = (DriverCall.CHECKPOINT, DriverCall.RESTORE)


class UnknownGpuError(ValidationError):
    """The requested GPU is not of this host."""


@dataclass(frozen=True, slots=True)
class Step:
    """A verified step.

    Attributes:
        name: Name of the step.
        duration_s: Duration of the operation.
        bytes_per_s: Rate of the driver's copies, by call.
        proved: Observation afterwards.
    """

    name: str
    duration_s: float
    bytes_per_s: Mapping[str, float]
    proved: str


@dataclass(slots=True)
class Validation:
    """The verified steps so far."""

    gpu: GpuFacts
    size_bytes: int
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)


@final
class Validator:
    """Runs one validation on opened parts."""

    def __init__(self, parts: Parts, folder: Path, validation: Validation) -> None:
        self._parts = parts
        self._file = folder / "sighting.json"
        self._validation = validation
        self._observer = Observer(parts, self._file, validation.size_bytes, validation.note)

    async def run(self) -> None:
        """Starts the program, verifies each step, and ends it.

        After a failure or a cancellation the program is ended, too, once the running operation has been
        rolled back or finished.

        Raises:
            ValidationError: A condition does not hold.
        """
        gpu = self._validation.gpu
        try:
            workload = await self._start(gpu.uuid)
            for turn in ("first", "second"):
                await self._park(workload, f"suspend, {turn} time", gpu.uuid)
                await self._wake(workload, f"restore, {turn} time", gpu.uuid)
            await self._move_there_and_back(workload)
        except OperationError as error:
            reason = ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
            raise ValidationError(f"{error.message} ({reason})") from error
        finally:
            with trio.CancelScope(shield=True):
                await self._end()

    async def _start(self, gpu_uuid: str) -> Workload:
        size = self._validation.size_bytes
        arguments = [sys.executable, "-P", "-m", "leasehold_worker.diagnostics.target_program"]
        arguments += ["--file", str(self._file), "--bytes", str(size), "--validator", str(os.getpid())]
        # The operator has chosen the GPU, even if other processes use it.
        resources = workload_pb2.Resources(gpu_count=1, allow_foreign=True)
        spec = workload_pb2.WorkloadSpec(arguments=arguments, resources=resources)
        run = operation_pb2.RunOperation(name=TARGET, spec=spec, gpu_uuids=[gpu_uuid])
        before, began = await self._observer.usage(), time.monotonic()
        await self._parts.operations.run(TARGET, run, Progress.unheard())
        workload = self._parts.workloads.get(TARGET)
        await self._observer.see_running(workload, gpu_uuid)
        duration_s = time.monotonic() - began
        await self._observer.see_listed_at_all(workload.root.pid)
        taken = await self._observer.see_memory(workload.root.pid, before, entered=gpu_uuid)
        self._add("start", duration_s, {}, f"counts, data intact, {_amount(taken)} taken")
        return workload

    async def _park(self, workload: Workload, name: str, gpu_uuid: str) -> None:
        before = await self._observer.usage()
        progress = await self._do(
            partial(self._parts.operations.suspend, TARGET, operation_pb2.SuspendOperation())
        )
        _expect(workload.state, SUSPENDED, "the workload's state after a suspend")
        await self._observer.see_parked(workload)
        freed = await self._observer.see_memory(workload.root.pid, before, left=gpu_uuid)
        self._done(name, progress, f"CHECKPOINTED, counter stopped, {_amount(freed)} freed, off NVML's list")

    async def _wake(self, workload: Workload, name: str, gpu_uuid: str) -> None:
        before = await self._observer.usage()
        progress = await self._do(
            partial(self._parts.operations.restore, TARGET, operation_pb2.RestoreOperation())
        )
        await self._see_woken(workload, gpu_uuid)
        taken = await self._observer.see_memory(workload.root.pid, before, entered=gpu_uuid)
        self._done(name, progress, f"RUNNING, counter advances, data intact, {_amount(taken)} taken")

    async def _move_there_and_back(self, workload: Workload) -> None:
        gpu = self._validation.gpu
        other = await self._other_gpu(gpu)
        if other is None:
            return
        for name, old, new in (("move", gpu.uuid, other), ("move back", other, gpu.uuid)):
            before = await self._observer.usage()
            move = operation_pb2.Move(workload_id=TARGET, pairs=[gpu_pb2.GpuPair(old_uuid=old, new_uuid=new)])
            remap = partial(self._parts.operations.remap, operation_pb2.RemapOperation(moves=[move]))
            progress = await self._do(remap)
            await self._see_woken(workload, new)
            await self._observer.see_memory(workload.root.pid, before, left=old, entered=new)
            self._done(name, progress, f"RUNNING, counter advances, data intact, on {new} only")

    async def _other_gpu(self, gpu: GpuFacts) -> str | None:
        """An equal GPU with room. None: there is none, or the driver can't move; the notes tell which."""
        if reason := why_unsupported(self._parts.driver, REMAP_CUDA_VERSION):
            self._validation.note(f"not moved: {reason}")
            return None
        inventory = self._parts.inventory
        room = await trio.to_thread.run_sync(inventory.room, ())
        needed = self._validation.size_bytes + CONTEXT_BYTES
        for uuid, chip in inventory.chips.items():
            if uuid != gpu.uuid and chip == gpu.name and room.free_bytes.get(uuid, 0) >= needed:
                return uuid
        self._validation.note(f"not moved: no other {gpu.name} has {size_text(needed)} free")
        return None

    async def _do(self, operation: Callable[[Progress], Awaitable[None]]) -> Progress:
        progress = Progress.unheard()
        await operation(progress)
        progress.close(failed=False)
        for warning in progress.warnings:
            self._validation.note(warning)
        return progress

    async def _see_woken(self, workload: Workload, gpu_uuid: str) -> None:
        _expect(workload.state, RUNNING, "the workload's state after a restore")
        if workload.gpu_uuids != (gpu_uuid,):
            held = ", ".join(workload.gpu_uuids) or "no GPU"
            raise ValidationError(f"the workload holds {held}, not {gpu_uuid}")
        await self._observer.see_running(workload, gpu_uuid)

    async def _end(self) -> None:
        """Ends the program, by SIGTERM if it runs."""
        if TARGET not in self._parts.workloads:
            return
        stop = operation_pb2.StopOperation()
        stop.grace.FromSeconds(END_S)
        try:
            await self._parts.termination.stop(TARGET, stop, Progress.unheard())
        except OperationError as error:
            pid = self._parts.workloads.get(TARGET).root.pid
            self._validation.note(f"the program, process {pid}, could not be ended: {error.message}")

    def _done(self, name: str, progress: Progress, proved: str) -> None:
        rates: dict[str, float] = {}
        for _, outcome in progress.outcomes:
            for phase in outcome.phases:
                if phase.call in TRANSFERS and phase.moved_bytes is not None and phase.duration_s > 0:
                    rates[str(phase.call)] = phase.moved_bytes / phase.duration_s
        self._add(name, sum(phase.duration_s for phase in progress.phases), rates, proved)

    def _add(self, name: str, duration_s: float, rates: Mapping[str, float], proved: str) -> None:
        self._validation.steps.append(Step(name, duration_s, rates, proved))


def choose_gpu(parts: Parts, wanted: str | None, free: Mapping[str, int], size_bytes: int) -> GpuFacts:
    """The GPU to validate: the requested one, else the one with most free memory.

    Raises:
        UnknownGpuError: The requested GPU is not of this host.
        ValidationError: There is no GPU, or too little room.
    """
    if reason := why_unsupported(parts.driver, SUSPEND_CUDA_VERSION):
        raise ValidationError(reason)
    gpus = {gpu.uuid: gpu for gpu in parts.inventory.gpus}
    if not gpus:
        raise ValidationError("NVML lists no GPU on this host: see `leasehold doctor`")
    uuid = wanted or max(gpus, key=lambda uuid: free.get(uuid, 0))
    if uuid not in gpus:
        raise UnknownGpuError(f"{uuid} is not a GPU of this host, which has {', '.join(gpus)}")
    if free.get(uuid, 0) < size_bytes + CONTEXT_BYTES:
        needed = size_text(size_bytes + CONTEXT_BYTES)
        raise ValidationError(
            f"{uuid} has {size_text(free.get(uuid, 0))} free, and {needed} are needed: choose another with "
            "--gpu, or a smaller --bytes"
        )
    return gpus[uuid]


def _amount(size_bytes: int | None) -> str:
    return "an unknown amount" if size_bytes is None else size_text(size_bytes)


def _expect(actual: WorkloadState.ValueType, wanted: WorkloadState.ValueType, what: str) -> None:
    if actual != wanted:
        raise ValidationError(f"{what} is {state_text(actual)}, not {state_text(wanted)}")
