"""Files and connections of workloads' Unix users, opened by children that have become these users."""

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from leasehold_worker.host.accounts import Account
from leasehold_worker.host.process_readings import user_threads
from leasehold_worker.programs import user_tasks
from leasehold_worker.programs.interpreter import module_command

END_TIMEOUT_S: Final = 5.0
"""Time for a killed child to end. One that hangs in the kernel is abandoned."""

CHILDREN: Final = "children"
"""Kind of the children that work on a user's files. Each user has a few at once."""


class UserFileError(Exception):
    """The task failed; the text has the reason."""


async def read_as(account: Account, path: str, limit_bytes: int, timeout_s: float) -> bytes:
    """The first bytes of a regular file, with the rights of a user.

    Raises:
        UserFileError: The user may not read the file, the file is not regular, or it was not read in time.
    """
    return await _perform(account, timeout_s, user_tasks.READ, path, str(limit_bytes))


async def measure_as(account: Account, folder: Path, timeout_s: float) -> int:
    """The disk usage below a folder in bytes, as far as a user may see it.

    Raises:
        UserFileError: The folder was not measured in time.
    """
    return int(await _perform(account, timeout_s, user_tasks.MEASURE, str(folder)))


async def empty_as(account: Account, folder: Path, timeout_s: float) -> None:
    """Removes the content of a folder, with the rights of a user.

    Raises:
        UserFileError: An entry can't be removed, or not in time.
    """
    await _perform(account, timeout_s, user_tasks.EMPTY, str(folder))


async def connect_as(account: Account, host: str, port: int, timeout_s: float) -> socket.socket:
    """A blocking TCP connection that a user has made.

    Raises:
        UserFileError: There is no connection, or not in time.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        task = (user_tasks.CONNECT, host, str(port), str(timeout_s), str(theirs.fileno()))
        await _perform(account, timeout_s, *task, pass_fds=(theirs.fileno(),))
        ours.setblocking(False)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise UserFileError("its child sent no connection")
    connection = socket.socket(fileno=descriptors[0])
    connection.settimeout(timeout_s)
    return connection


async def _perform(account: Account, timeout_s: float, *task: str, pass_fds: Sequence[int] = ()) -> bytes:
    with user_threads(account.uid, CHILDREN) as places:
        async with places:
            return await _perform_now(account, timeout_s, *task, pass_fds=pass_fds)


async def _perform_now(account: Account, timeout_s: float, *task: str, pass_fds: Sequence[int]) -> bytes:
    try:
        process = await trio.lowlevel.open_process(
            [*module_command(user_tasks.__name__), account.ids, *task],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: trio has no thread
        raise UserFileError(str(error)) from error
    try:
        with trio.move_on_after(timeout_s):
            output, errors = await _read(process.stdout), await _read(process.stderr)
            if await process.wait() != 0:
                raise UserFileError(errors.decode(errors="replace").strip()[-500:] or "its child ended")
            return output
        raise UserFileError(f"no answer within {timeout_s:g} s")
    finally:
        await _end(process)


async def _read(stream: trio.abc.ReceiveStream | None) -> bytes:
    content = b""
    if stream is not None:
        async for chunk in stream:
            content += chunk
    return content


async def _end(process: trio.Process) -> None:
    """Kills the child unless it has ended, and closes its pipes."""
    if process.returncode is None:
        with suppress(OSError):  # it has ended meanwhile
            os.killpg(process.pid, signal.SIGKILL)
    with trio.CancelScope(shield=True):
        with trio.move_on_after(END_TIMEOUT_S):
            await process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                await stream.aclose()
