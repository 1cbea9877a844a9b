"""Saving and restoring an application: the order of the calls, which the worker enforces.

A save asks for permission, checks the room, quiesces, writes, and finally renames the file. After a failure
or a cancellation before that, the application continues and nothing is left on disk. A restore reads and
verifies the whole checkpoint before the application receives its first byte.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Kernel

from leasehold_worker.applications.application import CHUNK_BYTES, TEXT_LIMIT, Application
from leasehold_worker.applications.timeouts import DEFAULT_TIMEOUTS, ApplicationTimeouts
from leasehold_worker.byte_sizes import size_text
from leasehold_worker.checkpoints.application_file import (
    ApplicationReader,
    ApplicationWriter,
    StoredCheckpoint,
)
from leasehold_worker.checkpoints.application_format import PAYLOAD_OFFSET
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.damaged import DamagedCheckpoint
from leasehold_worker.checkpoints.disk_reservations import DiskReservation
from leasehold_worker.checkpoints.volume_calls import (
    DELETE_TIMEOUT_S,
    call_volume,
    end_in_time,
    long_volume_call,
)
from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

PASSED_OVER: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT,
        errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
        errors_pb2.ERROR_REASON_KERNEL_FAILED,
        errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
    }
)
"""Errors of a checkpoint after which an older one is restored. Unknown is one that was deleted meanwhile."""

Progress = Callable[[str, int], None]
"""Receives the step and its bytes: "ask", "prepare", "checkpoint", "store", "cancel", "verify", "restore"."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The result of a save or a restore.

    Attributes:
        checkpoint: The checkpoint on disk.
        warnings: Warnings for the user, such as why newer checkpoints were skipped.
    """

    checkpoint: StoredCheckpoint
    warnings: tuple[str, ...] = ()


def _tell_nobody(_step: str, _size: int) -> None:
    pass


async def save(
    kernel: Application,
    store: ApplicationStore,
    *,
    available_bytes: int | None = None,
    room: DiskReservation | None = None,
    resume: bool,
    timeouts: ApplicationTimeouts = DEFAULT_TIMEOUTS,
    progress: Progress = _tell_nobody,
) -> Transfer:
    """Has an application save itself into the store.

    Its point of no return is the rename of the file. A cancellation before that undoes everything.

    Args:
        kernel: The application.
        store: The store.
        available_bytes: Remaining budget. None: the free space of the disk.
        room: Reserves disk before each write. None: no other writer exists.
        resume: The application continues afterwards. Else it stays quiescent until its end or
            :meth:`ServedKernel.cancel`.
        timeouts: Time limits.
        progress: Receives the progress.

    Raises:
        OperationError: KERNEL_NOT_READY, INSUFFICIENT_DISK, KERNEL_FAILED, CHECKPOINT_CORRUPT,
            STORAGE_UNAVAILABLE, or an error of the disk. The application continues or has ended, and nothing
            is left on disk.
    """
    exchange = _Exchange(kernel, store, timeouts, progress)
    progress("ask", 0)
    await _require_readiness(kernel, timeouts)
    if available_bytes is None:
        available_bytes = (await call_volume(store.disk_space)).available_bytes
    estimate = await kernel.size_estimate(timeouts.answer_s)
    if estimate is not None and estimate > available_bytes:
        raise _no_room(kernel, f"expects to save {size_text(estimate)}", available_bytes)
    if room is not None:  # what exceeds the estimate is reserved piece by piece
        await call_volume(room.hold, PAYLOAD_OFFSET + (estimate or 0), timeout_s=DELETE_TIMEOUT_S)
    begin = partial(store.begin, kernel.workload.workload_id, kernel.workload.name, kernel.facts)
    writer = await call_volume(begin, kernel.workload.owner, undo=ApplicationWriter.close)
    try:
        progress("prepare", 0)
        await kernel.prepare(timeouts.quiescence_s, timeouts.cancel_s)
        try:
            checkpoint = await exchange.write(writer, available_bytes, room)
        except BaseException:
            await kernel.undo(timeouts.cancel_s)
            raise
    finally:
        await end_in_time(writer.close)
    if not resume:
        return Transfer(checkpoint)
    with trio.CancelScope(shield=True):
        progress("cancel", checkpoint.header.size_bytes)
        warning = await kernel.undo(timeouts.cancel_s)
    return Transfer(checkpoint, (warning,) if warning else ())


async def restore(
    kernel: Application,
    store: ApplicationStore,
    *,
    workload_id: str,
    checkpoint_id: str | None = None,
    timeouts: ApplicationTimeouts = DEFAULT_TIMEOUTS,
    progress: Progress = _tell_nobody,
) -> Transfer:
    """Restores an application that has not begun.

    Args:
        kernel: The application.
        store: The store.
        workload_id: Workload whose checkpoints are tried, the newest first.
        checkpoint_id: The only checkpoint to try. It may be of any workload.
        timeouts: Time limits.
        progress: Receives the progress.

    Raises:
        OperationError: UNKNOWN_CHECKPOINT: there is none. STORAGE_UNAVAILABLE, or an error of the disk: none
            is restored. Else the error of the newest or named one: CHECKPOINT_CORRUPT,
            CHECKPOINT_INCOMPATIBLE, or KERNEL_FAILED.
    """
    exchange = _Exchange(kernel, store, timeouts, progress)
    if checkpoint_id is not None:
        named = await call_volume(store.find, checkpoint_id)
        return Transfer(await exchange.restore(named))
    return await exchange.restore_newest(await call_volume(store.scan, workload_id))


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The state of an application on its way to or from a store."""

    kernel: Application
    store: ApplicationStore
    timeouts: ApplicationTimeouts
    progress: Progress

    async def restore_newest(self, candidates: Sequence[StoredCheckpoint | DamagedCheckpoint]) -> Transfer:
        """Restores the application from the first checkpoint that can be restored."""
        refusals: list[OperationError] = []
        for candidate in candidates:
            try:
                checkpoint = await self.restore(candidate)
            except OperationError as error:
                # A volume that fails may have an intact one, and an older one would lose work.
                if error.reason not in PASSED_OVER:
                    raise
                refusals.append(error)
                if self.kernel.is_gone:
                    break
                logger.warning("workload %s: %s", self.kernel.workload.name, error.message)
            else:
                warnings = [f"restored from an older checkpoint: {error.message}" for error in refusals]
                return Transfer(checkpoint, tuple(warnings))
        if refusals:
            raise refusals[0]
        raise OperationError(
            errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
            f"{self.store.root} has no checkpoint of workload {self.kernel.workload.name}: start the "
            "workload without one, or give the worker the image directory that has one",
            {"workload_id": self.kernel.workload.workload_id},
        )

    async def write(
        self, writer: ApplicationWriter, available_bytes: int, room: DiskReservation | None
    ) -> StoredCheckpoint:
        """Writes the save of an application, all or nothing."""
        self.progress("checkpoint", 0)
        sink = partial(self._keep, writer, available_bytes, room)
        saved = await self.kernel.checkpoint(sink, self.timeouts.checkpoint_s)
        self.progress("store", writer.size_bytes)
        return await long_volume_call(lambda call: writer.commit(saved.custom, call.commit))

    async def _keep(
        self, writer: ApplicationWriter, available_bytes: int, room: DiskReservation | None, piece: bytes
    ) -> None:
        if writer.size_bytes + len(piece) > available_bytes:
            more = f"saves more than the {size_text(writer.size_bytes)} that are available"
            raise _no_room(self.kernel, more, available_bytes)
        await call_volume(_write_piece, writer, room, piece, timeout_s=DELETE_TIMEOUT_S)
        self.progress("checkpoint", writer.size_bytes)

    async def restore(self, candidate: StoredCheckpoint | DamagedCheckpoint) -> StoredCheckpoint:
        """Restores the application from a checkpoint, which is verified first."""
        if isinstance(candidate, DamagedCheckpoint):
            raise candidate.error
        _require_same_kernel(self.kernel.facts, candidate)
        reader = await call_volume(self.store.open, candidate, undo=ApplicationReader.close)
        try:
            self.progress("verify", 0)
            await long_volume_call(lambda call: reader.verify(call.check))
            await self._give(candidate, reader)
        finally:
            await end_in_time(reader.close)
        return candidate

    async def _give(self, checkpoint: StoredCheckpoint, reader: ApplicationReader) -> None:
        pieces = reader.pieces(CHUNK_BYTES)
        given = 0

        async def next_piece() -> bytes:
            nonlocal given
            self.progress("restore", given)
            piece = await call_volume(next, pieces, b"", timeout_s=DELETE_TIMEOUT_S)
            given += len(piece)
            return piece

        await self.kernel.restore(checkpoint, next_piece, self.timeouts.restore_s)


def no_kernel(workload: Workload) -> OperationError:
    """The refusal to save a workload without a checkpointable application."""
    return OperationError(
        errors_pb2.ERROR_REASON_KERNEL_NOT_READY,
        f"the application of workload {workload.name} can't be saved because it is not "
        "checkpointable: have it call leasehold_client.kernel.serve, or suspend its "
        f"processes with `leasehold suspend {workload.name} --process checkpoint`",
        {"workload_id": workload.workload_id},
    )


async def _require_readiness(kernel: Application, timeouts: ApplicationTimeouts) -> None:
    readiness = await kernel.can_checkpoint(timeouts.answer_s)
    if not readiness.ready:
        raise OperationError(
            errors_pb2.ERROR_REASON_KERNEL_NOT_READY,
            f"the application of workload {kernel.workload.name} can't save itself now: "
            f"{readiness.reason[:TEXT_LIMIT] or 'it does not say why'}; try again later",
            {"workload_id": kernel.workload.workload_id, "kernel_id": kernel.facts.kernel_id},
        )


def _write_piece(writer: ApplicationWriter, room: DiskReservation | None, piece: bytes) -> None:
    if room is not None:
        room.extend(PAYLOAD_OFFSET + writer.size_bytes + len(piece))
    writer.write(piece)


def _no_room(kernel: Application, how: str, available_bytes: int) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
        f"the application of workload {kernel.workload.name} {how}, and "
        f"{size_text(available_bytes)} are available for it: delete checkpoints, or give the "
        "worker more disk for them",
        {"workload_id": kernel.workload.workload_id, "available_bytes": str(available_bytes)},
    )


def _require_same_kernel(kernel: Kernel, checkpoint: StoredCheckpoint) -> None:
    """Refuses a checkpoint of another application, or of another version."""
    saved = checkpoint.header.kernel
    for what, ours, theirs in (
        ("kernel", kernel.kernel_id, saved.kernel_id),
        ("kind", kernel.kind, saved.kind),
        ("version", kernel.version, saved.version),
    ):
        if ours != theirs:
            raise OperationError(
                errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
                f"checkpoint {checkpoint.checkpoint_id} is of {what} {theirs}, but the "
                f"running application is of {what} {ours}: restore it with the program that "
                "saved it",
                {"checkpoint_id": checkpoint.checkpoint_id},
            )
