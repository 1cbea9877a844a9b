"""Proves on a host's GPUs that a process can be suspended, restored and moved, by the worker's own parts."""

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, final

import msgspec
import trio
from leasehold.v1 import command_pb2, gpu_pb2, workload_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.checkpoint.helper_protocol import DriverCall
from leasehold_worker.errors import OperationError
from leasehold_worker.gates import REMAP_CUDA_VERSION, SUSPEND_CUDA_VERSION, why_unsupported
from leasehold_worker.inventory import GpuFacts
from leasehold_worker.parts import Parts
from leasehold_worker.report import Report
from leasehold_worker.sizes import size_text
from leasehold_worker.validation_target import Sighting
from leasehold_worker.workloads import RUNNING, SUSPENDED, Workload

CONTEXT_BYTES: Final = 2**30
"""Room for what a context takes beside the buffer."""

ROUNDS: Final = 2
TARGET: Final = "validation"
WAIT_S: Final = 120.0
POLL_S: Final = 0.02
TRANSFERS: Final = (DriverCall.CHECKPOINT, DriverCall.RESTORE)


class ValidationError(Exception):
    """Something did not hold; the text says what was expected, and what was seen."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that held.

    Attributes:
        name: What was done.
        duration_s: How long the operation took.
        bytes_per_s: Rate of the driver's copies, by call.
        proved: What was seen afterwards.
    """

    name: str
    duration_s: float
    bytes_per_s: Mapping[str, float]
    proved: str


@dataclass(slots=True)
class Validation:
    """What has been proved so far."""

    gpu: GpuFacts
    size_bytes: int
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@final
class Validator:
    """Runs one validation on opened parts."""

    def __init__(self, parts: Parts, folder: Path, validation: Validation) -> None:
        self._parts = parts
        self._file = folder / "sighting.json"
        self._validation = validation
        self._used_bytes = 0

    async def run(self) -> None:
        """Starts the program, takes it through everything, and ends it, also when something does not hold.

        Raises:
            ValidationError: Something did not hold.
        """
        gpu = self._validation.gpu
        try:
            workload = await self._start(gpu.uuid)
            for turn in ("first", "second"):
                await self._park(workload, f"suspend, {turn} time")
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
        arguments = [sys.executable, "-m", "leasehold_worker.validation_target"]
        arguments += ["--file", str(self._file), "--bytes", str(size)]
        spec = workload_pb2.WorkloadSpec(arguments=arguments, resources=workload_pb2.Resources(gpu_count=1))
        self._used_bytes = await self._used(gpu_uuid)
        run = command_pb2.RunOperation(name=TARGET, spec=spec, gpu_uuids=[gpu_uuid])
        began = time.monotonic()
        await self._parts.operations.run(TARGET, run, Report(lambda _: None))
        workload = self._parts.workloads.get(TARGET)
        await self._see_rounds(workload, 0, gpu_uuid)
        self._note("start", time.monotonic() - began, {}, f"{size_text(size)} on {gpu_uuid}, intact")
        return workload

    async def _park(self, workload: Workload, name: str) -> None:
        (gpu_uuid,) = workload.lease.gpu_uuids if workload.lease else ("",)
        before = await self._used(gpu_uuid)
        suspend = partial(self._parts.operations.suspend, TARGET, command_pb2.SuspendOperation())
        report = await self._do(suspend)
        _expect(workload.state, SUSPENDED, "the workload's state after a suspend")
        freed = before - await self._used(gpu_uuid)
        if freed < self._validation.size_bytes:
            raise ValidationError(
                f"{size_text(freed)} of {gpu_uuid} were freed, and the program held "
                f"{size_text(self._validation.size_bytes)}"
            )
        self._done(name, report, f"checkpointed, {size_text(freed)} freed, not listed by NVML")

    async def _wake(self, workload: Workload, name: str, gpu_uuid: str) -> None:
        before = self._sighting().rounds
        restore = partial(self._parts.operations.restore, TARGET, command_pb2.RestoreOperation())
        report = await self._do(restore)
        await self._expect_running(workload, before, gpu_uuid)
        self._done(name, report, f"counts on, data intact, on {gpu_uuid}")

    async def _move_there_and_back(self, workload: Workload) -> None:
        gpu = self._validation.gpu
        other = await self._other_gpu(gpu)
        if other is None:
            return
        for name, old, new in (("move", gpu.uuid, other), ("move back", other, gpu.uuid)):
            before = self._sighting().rounds
            pairs = [gpu_pb2.GpuPair(old_uuid=old, new_uuid=new)]
            move = command_pb2.Move(workload_id=TARGET, pairs=pairs)
            remap = partial(self._parts.operations.remap, command_pb2.RemapOperation(moves=[move]))
            report = await self._do(remap)
            await self._expect_running(workload, before, new)
            self._done(name, report, f"counts on, data intact, on {new}")

    async def _other_gpu(self, gpu: GpuFacts) -> str | None:
        """An equal GPU with room. None: there is none, or the driver can't move; the notes say so."""
        if reason := why_unsupported(self._parts.driver, REMAP_CUDA_VERSION):
            self._validation.notes.append(f"not moved: {reason}")
            return None
        inventory = self._parts.inventory
        free = await trio.to_thread.run_sync(inventory.free_bytes, ())
        needed = self._validation.size_bytes + CONTEXT_BYTES
        for uuid, chip in inventory.chips.items():
            if uuid != gpu.uuid and chip == gpu.name and free.get(uuid, 0) >= needed:
                return uuid
        self._validation.notes.append(f"not moved: no other {gpu.name} has {size_text(needed)} free")
        return None

    async def _do(self, operation: Callable[[Report], Awaitable[None]]) -> Report:
        report = Report(lambda _: None)
        await operation(report)
        report.close(failed=False)
        return report

    async def _expect_running(self, workload: Workload, before: int, gpu_uuid: str) -> None:
        _expect(workload.state, RUNNING, "the workload's state after a restore")
        held = workload.lease.gpu_uuids if workload.lease else ()
        if held != (gpu_uuid,):
            raise ValidationError(f"the workload holds {held}, and not {gpu_uuid}")
        await self._see_rounds(workload, before, gpu_uuid)
        listed = await trio.to_thread.run_sync(self._parts.inventory.usage)
        if workload.root.pid not in listed[gpu_uuid].processes:
            raise ValidationError(f"NVML does not list process {workload.root.pid} on {gpu_uuid}")

    async def _see_rounds(self, workload: Workload, before: int, gpu_uuid: str) -> None:
        """Waits until the program has finished two more rounds, and looks at what it saw."""
        with trio.move_on_after(WAIT_S):
            while self._sighting().rounds < before + ROUNDS:
                if workload.ended.is_set():
                    said = workload.output_path.read_text(errors="replace").strip().splitlines()
                    raise ValidationError(f"the program ended: {said[-1] if said else 'without a word'}")
                await trio.sleep(POLL_S)
            seen = self._sighting()
            if not seen.intact:
                raise ValidationError("the program read other bytes from the GPU than it had written")
            if seen.gpu_uuid != gpu_uuid:
                raise ValidationError(f"the program runs on {seen.gpu_uuid}, and not on {gpu_uuid}")
            return
        raise ValidationError(f"the program stands still for {WAIT_S:g} s")

    def _sighting(self) -> Sighting:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Sighting)
        except FileNotFoundError:
            return Sighting(0, intact=True, gpu_uuid="")

    async def _used(self, gpu_uuid: str) -> int:
        usage = await trio.to_thread.run_sync(self._parts.inventory.usage)
        used = usage[gpu_uuid].used_bytes if gpu_uuid in usage else None
        if used is None:
            raise ValidationError(f"NVML does not tell the used memory of {gpu_uuid}")
        return used

    async def _end(self) -> None:
        if TARGET in self._parts.workloads:
            stop = command_pb2.StopOperation()
            stop.grace.FromMilliseconds(0)
            try:
                await self._parts.stopping.stop(TARGET, stop, Report(lambda _: None))
            except OperationError as error:
                self._validation.notes.append(f"the program could not be ended: {error.message}")

    def _done(self, name: str, report: Report, proved: str) -> None:
        rates: dict[str, float] = {}
        for _, outcome in report.outcomes:
            for phase in outcome.phases:
                if phase.call in TRANSFERS and phase.moved_bytes is not None:
                    rates[str(phase.call)] = phase.moved_bytes / phase.duration_s
        self._note(name, sum(phase.duration_s for phase in report.phases), rates, proved)

    def _note(self, name: str, duration_s: float, rates: Mapping[str, float], proved: str) -> None:
        self._validation.steps.append(Step(name, duration_s, rates, proved))


def choose_gpu(parts: Parts, wanted: str | None, free: Mapping[str, int], size_bytes: int) -> GpuFacts:
    """The GPU to validate: the one that is wanted, else the one with most free memory.

    Raises:
        ValidationError: There is none, or it has too little room.
    """
    if reason := why_unsupported(parts.driver, SUSPEND_CUDA_VERSION):
        raise ValidationError(reason)
    gpus = {gpu.uuid: gpu for gpu in parts.inventory.gpus}
    if not gpus:
        raise ValidationError("this host has no GPU that NVML knows: `leasehold doctor` says more")
    uuid = wanted or max(gpus, key=lambda uuid: free.get(uuid, 0))
    if uuid not in gpus:
        raise ValidationError(f"{uuid} is not a GPU of this host, which has {', '.join(gpus)}")
    if free.get(uuid, 0) < size_bytes + CONTEXT_BYTES:
        needed = size_text(size_bytes + CONTEXT_BYTES)
        raise ValidationError(
            f"{uuid} has {size_text(free.get(uuid, 0))} free, and {needed} are needed: choose another with "
            "--gpu, or a smaller --bytes"
        )
    return gpus[uuid]


def _expect(actual: WorkloadState.ValueType, wanted: WorkloadState.ValueType, what: str) -> None:
    if actual != wanted:
        seen, expected = (WorkloadState.Name(s).removeprefix("WORKLOAD_STATE_") for s in (actual, wanted))
        raise ValidationError(f"{what} is {seen}, and not {expected}")
