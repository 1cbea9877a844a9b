"""The dump of a process tree to an image, with a point of no return set by the caller.

CRIU stops the processes, writes the image, and waits while the caller publishes the image. Only then does
CRIU end the processes. After any earlier failure they continue unchanged.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.checkpoints.volume_calls import call_volume, discard_in_time
from leasehold_worker.criu import criu_pb2, rpc
from leasehold_worker.criu.criu_pb2 import CriuOptions, CriuRequest, CriuResponse
from leasehold_worker.criu.installation import CriuFacts, read_errors
from leasehold_worker.criu.rpc import Swrk, SwrkError
from leasehold_worker.criu.working_directory import ERRORS_FILE, open_directories, working_directory
from leasehold_worker.errors import OperationError

DUMP_TIMEOUT_S: Final = 1800.0
UNDO_TIMEOUT_S: Final = 60.0
"""Time for CRIU to release the processes after a failed dump."""

FINISH_TIMEOUT_S: Final = 60.0
"""Time for CRIU to end the processes of a finished image."""

END_TIMEOUT_S: Final = 10.0
"""Time for CRIU to end after its last message."""

FREEZE_TIMEOUT_S: Final = 30
"""Time for CRIU to stop the processes."""

PROGRESS_INTERVAL_S: Final = 0.25
GHOST_BYTES: Final = 64 << 20
"""Size up to which an image includes open deleted files."""

COMMITTED: Final = "committed"
"""Value of the metadata "phase" for a failure after the point of no return."""

_LOG: Final = "dump.log"
_LOG_LEVEL: Final = 2
_POST_DUMP: Final = "post-dump"
_NETWORK_UNLOCK: Final = "network-unlock"


async def dump(
    facts: CriuFacts,
    root_pid: int,
    directory: Path,
    commit: Callable[[], Awaitable[None]],
    *,
    progress: Callable[[int], None] | None = None,
    timeout_s: float = DUMP_TIMEOUT_S,
) -> None:
    """Writes an image of a process and its descendants, and ends them.

    A cancellation before ``commit`` has returned leaves the processes running and deletes the directory. A
    later one takes effect after the end.

    Args:
        facts: The CRIU.
        root_pid: First process of the tree, at the head of its session.
        directory: Existing empty directory for the image. ``<directory>.work`` beside it is CRIU's working
            directory during the call.
        commit: Called once the image is complete and the processes are stopped: publishes it. After an
            exception the processes continue, and the exception is raised.
        progress: Receives the bytes of the image so far, repeatedly.
        timeout_s: For everything up to the end of ``commit``.

    Raises:
        OperationError: CRIU_FAILED. The processes keep running, and the directory is deleted. With metadata
            "phase" :data:`COMMITTED` the image is final, and the processes may have ended.
    """
    work = working_directory(directory)
    running = _Dump(root_pid, commit, timeout_s)
    try:
        async with open_directories(directory, work) as (images, logs, errors):
            request = CriuRequest(type=criu_pb2.CRIU_REQUEST_TYPE_DUMP, opts=_options(root_pid, images, logs))
            # No plugin is there, so none is loaded: the members were suspended before, and hold no GPU.
            environment = {rpc.PLUGIN_VARIABLE: str(work)}
            async with rpc.start(
                facts.path, errors=errors, environment=environment, end_timeout_s=END_TIMEOUT_S
            ) as criu:
                await _while_reporting(directory, progress, lambda: running.run(criu, request))
    except SwrkError as error:
        said = ""
        with suppress(OperationError):  # the volume does not answer
            said = await call_volume(read_errors, work / _LOG, work / ERRORS_FILE)
        raise running.error(f"{error}{': ' if said else ''}{said}") from error
    finally:
        leftovers = [work] if running.committed else [work, directory]
        for leftover in leftovers:
            await discard_in_time(leftover)


def _options(root_pid: int, images: int, logs: int) -> CriuOptions:
    return CriuOptions(
        images_dir_fd=images,
        work_dir_fd=logs,
        pid=root_pid,
        log_level=_LOG_LEVEL,
        log_file=_LOG,
        notify_scripts=True,
        file_locks=True,
        link_remap=True,
        # obstacles.py permits only connections with both ends in the tree, also for a stopped tree. So no
        # peer sends during the dump, and a firewall rule, which would outlive the dump, is unnecessary.
        tcp_established=True,
        network_lock=criu_pb2.CRIU_NETWORK_LOCK_SKIP,
        ghost_limit=GHOST_BYTES,
        # The worker puts a restored tree into its group, as it does with a program that it starts.
        manage_cgroups_mode=criu_pb2.CRIU_CGROUP_MODE_UNSPECIFIED,
        timeout=FREEZE_TIMEOUT_S,
    )


@final
class _Dump:
    """One dump, and whether it is past its point of no return."""

    def __init__(self, root_pid: int, commit: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        self._root_pid = root_pid
        self._commit = commit
        self._timeout_s = timeout_s
        self.committed = False

    def error(self, why: str) -> OperationError:
        """The failure for a reason."""
        if self.committed:
            return OperationError(
                errors_pb2.ERROR_REASON_CRIU_FAILED,
                f"CRIU wrote an image of process {self._root_pid} but did not end the "
                f"processes ({why}): stop the workload, or delete the image",
                {"pid": str(self._root_pid), "phase": COMMITTED},
            )
        return OperationError(
            errors_pb2.ERROR_REASON_CRIU_FAILED,
            f"CRIU could not write an image of process {self._root_pid} ({why}): the process "
            "keeps running; docs/criu.md lists what an image can't hold",
            {"pid": str(self._root_pid)},
        )

    async def run(self, criu: Swrk, request: CriuRequest) -> None:
        with trio.move_on_after(self._timeout_s) as deadline:
            try:
                answer = await self._talk(criu, request)
            except SwrkError:
                raise
            except BaseException:
                with trio.CancelScope(shield=True):
                    await _undo(criu)
                raise
        if deadline.cancelled_caught:
            raise SwrkError(f"not complete within {self._timeout_s:g} s")
        if not answer.success:
            raise SwrkError("it failed")
        if not self.committed:
            raise SwrkError("CRIU ended without reporting a complete image")

    async def _talk(self, criu: Swrk, request: CriuRequest) -> CriuResponse:
        await criu.send(request)
        while True:
            answer = await criu.receive()
            if answer.type != criu_pb2.CRIU_REQUEST_TYPE_NOTIFY:
                return answer
            if answer.notify.script == _POST_DUMP:
                await self._commit()
                self.committed = True
                return await _finish(criu)
            await criu.go_on(True)


async def _finish(criu: Swrk) -> CriuResponse:
    """Lets CRIU end the processes, and returns its last message."""
    with trio.CancelScope(shield=True), trio.move_on_after(FINISH_TIMEOUT_S):
        await criu.go_on(True)
        while (answer := await criu.receive()).type == criu_pb2.CRIU_REQUEST_TYPE_NOTIFY:
            await criu.go_on(True)
        return answer
    raise SwrkError(f"CRIU did not end within {FINISH_TIMEOUT_S:g} s")


async def _undo(criu: Swrk) -> None:
    """Makes CRIU fail, and waits until it has released the processes."""
    criu.forbid_writing()
    with trio.move_on_after(UNDO_TIMEOUT_S):
        try:
            # CRIU may wait for an answer to the last notification. A surplus answer does no harm.
            await criu.go_on(False)
            while (answer := await criu.receive()).type == criu_pb2.CRIU_REQUEST_TYPE_NOTIFY:
                await criu.go_on(answer.notify.script == _NETWORK_UNLOCK)
        except SwrkError:
            return


async def _while_reporting(
    directory: Path, progress: Callable[[int], None] | None, work: Callable[[], Awaitable[None]]
) -> None:
    """Does the work, and reports the growing size of the directory meanwhile."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        if progress is not None:
            nursery.start_soon(_progress, directory, progress)
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised below, where no nursery wraps it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _progress(directory: Path, progress: Callable[[int], None]) -> None:
    limiter = trio.CapacityLimiter(1)  # held by a look at a volume that hangs, and no place of other threads
    while True:
        try:
            size_bytes = await trio.to_thread.run_sync(
                _files_bytes, directory, abandon_on_cancel=True, limiter=limiter
            )
        except OSError:
            return  # the image is complete and has been renamed, or its volume fails
        progress(size_bytes)
        await trio.sleep(PROGRESS_INTERVAL_S)


def _files_bytes(directory: Path) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
