"""A workload's program, behind a launcher that outlives the worker and records the exit."""

import errno
import logging
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import trio
from leasehold.v1 import errors_pb2
from msgspec import Meta

from leasehold_worker.errors import OperationError
from leasehold_worker.files import file_descriptors, private_directories
from leasehold_worker.files.workload_files import NotRegularError, read_regular
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.process_trees import child_pids
from leasehold_worker.host.processes import (
    ProcessIdentity,
    boot_id,
    identify,
    is_alive,
    send_signal,
    wait_ended,
)
from leasehold_worker.programs import shim
from leasehold_worker.programs.child_input import child_input, environment_entries
from leasehold_worker.programs.error_text import error_text
from leasehold_worker.programs.interpreter import module_command
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
EXIT_TIMEOUT_S: Final = 5.0
"""Time for a launcher to record how its program ended, and for killed processes to end."""

RECORD_TIMEOUT_S: Final = 5.0
"""Time for the disk to answer an access to the records of a launcher. A hung disk never answers."""

RECORD_THREADS: Final = 16
"""Threads that access records, including those that hang on a disk."""

POLL_INTERVAL_S: Final = 0.01

START_FILE: Final = "start"
RECORD_LIMIT_BYTES: Final = 65_536
LAST_TIME_S: Final = 253_402_300_799.0
"""The last second that datetime can hold."""

_Pid = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Ticks = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Record = TypeVar("_Record", bound=msgspec.Struct)
_Result = TypeVar("_Result")

_records: Final = trio.CapacityLimiter(RECORD_THREADS)


class LaunchError(Exception):
    """The program was not started; the text has the reason."""


class Launched(msgspec.Struct, frozen=True):
    """The identities of a program and of its launcher, as the launcher recorded them."""

    pid: _Pid
    start_time_ticks: _Ticks
    launcher_pid: _Pid
    launcher_start_time_ticks: _Ticks
    boot_id: str

    @property
    def program(self) -> ProcessIdentity:
        """The program."""
        return ProcessIdentity(Pid(self.pid), self.start_time_ticks)

    @property
    def launcher(self) -> ProcessIdentity:
        """Its parent."""
        return ProcessIdentity(Pid(self.launcher_pid), self.launcher_start_time_ticks)


class ExitRecord(msgspec.Struct, frozen=True):
    """The exit of a program. ``returncode`` is Python's, negative for a signal."""

    returncode: Annotated[int, Meta(ge=-255, le=255)]
    end_time: Annotated[float, Meta(ge=0, le=LAST_TIME_S)]
    error: str = ""


class Started(msgspec.Struct, frozen=True):
    """The terms of a program's start, as the worker recorded them apart from the journal.

    Attributes:
        name: The name of the workload.
        gpu_uuids: The GPUs of its lease.
    """

    name: str
    gpu_uuids: tuple[str, ...]


class _StartRecord(msgspec.Struct, frozen=True):
    """The launcher's report: the identity of the program, or the error."""

    error: str = ""
    pid: int = 0
    start_time_ticks: int = 0


async def launch(
    folder: Path,
    arguments: Sequence[str],
    *,
    working_directory: Path | str,
    environment: Mapping[str, str],
    output: int,
    group: Path | None,
    limits: str = "",
    user: str = "",
    nursery: trio.Nursery,
) -> ProcessIdentity:
    """Starts a program that outlives the worker.

    Args:
        folder: Existing folder of its launcher.
        arguments: Program and arguments.
        working_directory: Its working directory.
        environment: Its whole environment.
        output: Descriptor for both its streams.
        group: Its control group. None: the worker's.
        limits: The limits of its Unix user, as ``LoginLimits.encoded``. Empty: the worker's.
        user: The ids of its Unix user, as ``Account.ids``. Empty: the worker's.
        nursery: Runs the task that reaps the launcher.

    Raises:
        LaunchError: The program could not be started.
    """
    command = [*module_command(shim.__name__), str(folder), boot_id()]
    # Shielded, for 45 s at most: a program that may have been started must not be forgotten.
    with trio.CancelScope(shield=True), _environment_input(environment) as environment_descriptor:
        read_end, write_end = os.pipe()
        place = (file_descriptors.STARTED_WITH, group or "", limits, user)
        settings = (write_end, *place, environment_descriptor, working_directory)
        try:
            process = await trio.lowlevel.open_process(
                [*command, *map(str, settings), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=private_directories.STARTED_WITH,
                pass_fds=(write_end, environment_descriptor),
            )
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: trio has no thread
            os.close(read_end)
            raise LaunchError(error_text(error)) from error
        finally:
            os.close(write_end)
        nursery.start_soon(process.wait)
        said = await _hear(read_end) or await _give_up(folder, process)
    if said.error:
        raise LaunchError(said.error)
    return ProcessIdentity(Pid(said.pid), said.start_time_ticks)


async def relaunch(
    folder: Path,
    criu: Path,
    request: bytes,
    pid: int,
    *,
    descriptors: Collection[int],
    environment: Mapping[str, str],
    errors: int,
    group: Path | None,
    timeout_s: float,
    nursery: trio.Nursery,
) -> ProcessIdentity:
    """Has CRIU restore a program, which outlives the worker as after :func:`launch`.

    A cancellation or a timeout abandons the restore, and no process of the program runs. If the launcher was
    faster, the call returns as usual.

    Args:
        folder: Folder of its launcher, without records of the former run.
        criu: The CRIU.
        request: The request, as bytes of a ``CriuRequest`` with ``rst_sibling`` and ``notify_scripts``.
        pid: The program's former and new pid.
        descriptors: Descriptors in the request. The launcher has them under the same numbers.
        environment: Of CRIU.
        errors: Descriptor of a file for what CRIU and the launcher have to say.
        group: Control group that CRIU and the program run in. None: the worker's.
        timeout_s: Timeout of the restore.
        nursery: Runs the task that reaps the launcher.

    Raises:
        LaunchError: No process runs. If CRIU failed after the program's identity was recorded, the folder has
            an :class:`ExitRecord` with the error.
    """
    command = [*module_command(shim.__name__), shim.RESTORE, str(folder), boot_id()]
    with trio.CancelScope(shield=True), child_input(request) as input_descriptor:
        read_end, write_end = os.pipe()
        try:
            process = await trio.lowlevel.open_process(
                [*command, str(write_end), str(timeout_s), str(group or ""), str(criu), str(pid)],
                stdin=input_descriptor,
                stdout=errors,
                stderr=errors,
                env=environment,
                start_new_session=True,
                pass_fds=(write_end, *descriptors),
            )
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: trio has no thread
            os.close(read_end)
            raise LaunchError(error_text(error)) from error
        finally:
            os.close(write_end)
    nursery.start_soon(process.wait)
    stream = trio.lowlevel.FdStream(read_end)
    try:
        with trio.move_on_after(timeout_s):
            return await _restored(await _read_record(stream), folder)
    except trio.Cancelled:
        with trio.CancelScope(shield=True):
            if who := await _give_up_restore(folder, process, stream):
                return who
        raise
    else:
        with trio.CancelScope(shield=True):
            if who := await _give_up_restore(folder, process, stream):
                return who
        raise LaunchError(f"not complete within {timeout_s:g} s")
    finally:
        stream.close()  # aclose() would raise Cancelled and lose the result


@contextmanager
def _environment_input(environment: Mapping[str, str]) -> Iterator[int]:
    try:
        content = environment_entries(environment)
    except ValueError as error:
        raise LaunchError(error_text(error)) from error
    with child_input(content) as descriptor:
        yield descriptor


async def _give_up_restore(
    folder: Path, process: trio.Process, stream: trio.lowlevel.FdStream
) -> ProcessIdentity | None:
    """Abandons a restore, and waits until no process of it is left, unless the launcher was faster.

    Returns:
        The restored program, or a process of a failed restore that has not ended. None: no process runs.
    """
    try:
        if await _in_time(_abandoned, folder):
            with trio.move_on_after(START_TIMEOUT_S):
                return await _restored(await _read_record(stream), folder)
    except OSError as error:
        logger.error("%s: %s: the processes of the restore are killed", folder, error.strerror)
        return await _end(process)
    process.terminate()
    with trio.move_on_after(START_TIMEOUT_S):
        await process.wait()
    return None


async def _read_record(stream: trio.lowlevel.FdStream) -> _StartRecord:
    """The launcher's report, which is one write."""
    data = b""
    async for chunk in stream:
        data += chunk
    return msgspec.json.decode(data, type=_StartRecord) if data else _StartRecord()


async def _restored(said: _StartRecord, folder: Path) -> ProcessIdentity:
    """The identity of the restored program, from the report or, after a timeout, from the folder.

    Raises:
        LaunchError: No program was restored.
        OSError: The disk fails or hangs.
    """
    if said.error:
        raise LaunchError(said.error)
    if not said.pid:
        who = await _in_time(launched, folder)
        ended = await _in_time(exit_record, folder)
        if who is None or ended is not None or not is_alive(who.launcher):
            raise LaunchError("its launcher has ended")
        return who.program
    return ProcessIdentity(Pid(said.pid), said.start_time_ticks)


async def _give_up(folder: Path, process: trio.Process) -> _StartRecord:
    """Abandons a start without a report, unless the launcher was faster.

    The launcher ends. Its user may have stopped the first process, or sent it to a volume that hangs. If the
    disk of the folder fails or hangs, all processes of the start are killed. A process that does not end
    counts as the program, which keeps its GPUs until its end.
    """
    who: Launched | None = None
    disk = "of its working directory"
    try:
        who = await _in_time(_abandoned, folder)
    except OSError as error:
        logger.error("%s: %s: the processes of the start are killed", folder, error.strerror)
        disk = f"of {folder} ({error_text(error)})"
        if left := await _end(process):
            return _StartRecord(pid=left.pid, start_time_ticks=left.start_time_ticks)
    else:
        if who is None:
            process.kill()
            with trio.move_on_after(EXIT_TIMEOUT_S):
                await process.wait()
    if who is None:
        return _StartRecord(
            error=(
                f"its launcher did not answer within {START_TIMEOUT_S:g} s, so the start was "
                f"cancelled: check the disk {disk}"
            )
        )
    return _StartRecord(pid=who.pid, start_time_ticks=who.start_time_ticks)


async def _end(process: trio.Process) -> ProcessIdentity | None:
    """Kills a launcher and all processes below it, and waits for their end.

    Returns:
        A process below the launcher that has not ended within EXIT_TIMEOUT_S. None: all have ended.
    """
    launcher = identify(process.pid)
    # Asked afterwards: until the launcher is reaped, no other process has its pid.
    if launcher is None or process.returncode is not None:
        await trio.lowlevel.checkpoint()
        return None
    # A stopped launcher starts nothing, and is still the parent of all orphans.
    process.send_signal(signal.SIGSTOP)
    left: list[ProcessIdentity] = []
    seen: set[Pid] | None = None
    try:
        with trio.move_on_after(EXIT_TIMEOUT_S):
            while True:
                pids = child_pids(launcher)
                if not is_alive(launcher):
                    break
                left = [child for child in map(identify, pids) if child is not None]
                # A child that has ended since it was listed left its own children to the launcher. A second
                # look shows them.
                if not left and pids == seen:
                    break
                seen = None if left else pids
                for child in left:
                    with suppress(OperationError):
                        send_signal(child, signal.SIGKILL)
                await trio.sleep(POLL_INTERVAL_S)
    finally:
        process.kill()
    with trio.move_on_after(EXIT_TIMEOUT_S):
        await process.wait()
    return next((child for child in left if is_alive(child)), None)


async def _in_time(access: Callable[[Path], _Result], folder: Path) -> _Result:
    """Accesses the records in a folder in a thread, which a timeout or a cancellation abandons.

    Raises:
        OSError: The disk fails, or did not answer within RECORD_TIMEOUT_S, or no thread can be started.
    """
    with trio.move_on_after(RECORD_TIMEOUT_S):
        return await run_in_thread(access, folder, abandon_on_cancel=True, limiter=_records)
    raise TimeoutError(errno.ETIMEDOUT, f"the disk did not answer within {RECORD_TIMEOUT_S:g} s")


async def _hear(descriptor: int) -> _StartRecord | None:
    data = b""
    with trio.move_on_after(START_TIMEOUT_S):
        async with trio.lowlevel.FdStream(descriptor) as stream:
            async for chunk in stream:
                data += chunk
    return msgspec.json.decode(data, type=_StartRecord) if data else None


def keep_start(folder: Path, record: Started) -> None:
    """Records what a program is started with. A reboot may lose the record, and ends the program too.

    Raises:
        OSError: The record can't be written.
    """
    fresh = folder / f"{START_FILE}.{uuid.uuid4().hex}"
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.replace(folder / START_FILE)


def started(folder: Path) -> Started | None:
    """The terms of the start of the program in a folder. None: there is no record."""
    return _record_at(folder / START_FILE, Started)


def launched(folder: Path) -> Launched | None:
    """The program started in a folder. None: there is none, and after :func:`abandon` there never will be."""
    return _record_at(folder / shim.PROCESS_FILE, Launched)


def abandon(folder: Path) -> bool:
    """Abandons a start that may be running. False: the program was started before."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{shim.PROCESS_FILE}.{uuid.uuid4().hex}"
    try:
        fresh.write_text("given up\n")
        os.link(fresh, folder / shim.PROCESS_FILE)
    except FileExistsError:
        return launched(folder) is None
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _abandoned(folder: Path) -> Launched | None:
    """Abandons a start that may be running. Returns the program if it was started before.

    Raises:
        OSError: The disk fails. The program may have been started, or may be started later.
    """
    try:
        if abandon(folder):
            return None
    except OSError:  # such as a lack of disk space for the marker file
        if who := launched(folder):
            return who
        raise
    return launched(folder)


async def wait_exit(folder: Path, program: ProcessIdentity) -> ExitRecord | None:
    """Waits for a program's end. None: it has ended without a record that can be read."""
    await wait_ended(program)
    problem: OSError | None = None
    with trio.move_on_after(EXIT_TIMEOUT_S):
        while True:
            try:
                record, over = await run_in_thread(_read_exit, folder, abandon_on_cancel=True)
            except OSError as error:
                problem = error
            else:
                problem = None
                if record is not None or over:
                    return record
            await trio.sleep(POLL_INTERVAL_S)
    if problem is not None:
        logger.error("the records of the program in %s can't be read: %s", folder, problem.strerror)
    return None


def _read_exit(folder: Path) -> tuple[ExitRecord | None, bool]:
    """The exit of a folder's program, and whether its launcher has ended.

    Raises:
        OSError: A record can't be read.
    """
    # Asked before reading: a launcher that has ended has written all that it ever will.
    who = launched(folder)
    over = who is None or not is_alive(who.launcher)
    return exit_record(folder), over


async def forget_start(folder: Path) -> None:
    """Prepares a folder for another start, once the former program has ended.

    Raises:
        OperationError: STORAGE_UNAVAILABLE: the disk fails, or did not answer within RECORD_TIMEOUT_S.
    """
    given_up = threading.Event()
    try:
        await _in_time(partial(_forget_start, given_up), folder)
    except OSError as error:
        raise OperationError(
            errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
            f"the records of the former program in {folder} can't be removed ({error.strerror}): check the "
            "disk, and try again",
        ) from error
    finally:
        given_up.set()


def _forget_start(given_up: threading.Event, folder: Path) -> None:
    for name in (shim.EXIT_FILE, shim.PROCESS_FILE):
        if given_up.is_set():
            return  # the records may be those of another start by now
        (folder / name).unlink(missing_ok=True)


def exit_record(folder: Path) -> ExitRecord | None:
    """The exit of a folder's program. None: there is no record."""
    return _record_at(folder / shim.EXIT_FILE, ExitRecord)


def _record_at(path: Path, kind: type[_Record]) -> _Record | None:
    """A record of a launcher. None: it is missing, or was not written by a launcher.

    Raises:
        OSError: The file can't be read.
    """
    try:
        return msgspec.json.decode(read_regular(path, RECORD_LIMIT_BYTES), type=kind)
    except (FileNotFoundError, NotADirectoryError, NotRegularError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
