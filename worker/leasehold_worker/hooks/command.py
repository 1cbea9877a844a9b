"""The command hook: a program that the worker runs, in a process group of its own."""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import trio

from leasehold_worker.hooks.context import HookFailedError, Turn
from leasehold_worker.hooks.http_call import printable
from leasehold_worker.hooks.templates import expand
from leasehold_worker.private_directories import STARTED_WITH

SHOWN_OUTPUT_BYTES: Final = 2048
"""How much of a failed program's output is told: its end, which is where programs say what went wrong."""

END_DEADLINE_S: Final = 5.0
"""How long a killed program is waited for. One that hangs in the kernel is left to it."""

_CHUNK: Final = 65536
_WORKLOAD_VARIABLES: Final = frozenset({"LEASEHOLD_WORKLOAD", "LEASEHOLD_WORKLOAD_ID", "LEASEHOLD_LEASE_ID"})
"""What marks a process as the workload's own. A hook is not, and must not be parked or killed as such."""


async def run(turn: Turn) -> None:
    """Runs the program of a command hook, and waits for its end.

    Cancelled: its whole process group is killed. A process that it leaves behind in the background is left
    alone when it ends by itself; what that writes then goes nowhere.

    Raises:
        HookFailedError: It could not be started, or ended with another status than 0.
    """
    values = turn.context.values(turn.phase)
    arguments = [expand(argument, values) for argument in turn.hook.command.arguments]
    turn.doing = f"{arguments[0]} was still running"
    try:
        process = await trio.lowlevel.open_process(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=turn.context.working_directory,
            env=_environment(turn.context.environment, values),
            start_new_session=True,
            umask=STARTED_WITH,
        )
    except (OSError, ValueError) as error:
        raise HookFailedError(f"{arguments[0]} could not be started ({error})") from error
    tail = bytearray()
    try:
        await _finish(process, tail, turn)
    finally:
        await _end(process)
    status = process.returncode
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
        raise HookFailedError(f"{arguments[0]} {how}{_told(tail)}")


async def _finish(process: trio.Process, tail: bytearray, turn: Turn) -> None:
    """Reads the output until the program ends; who else has the pipe is not waited for."""
    program = turn.doing

    async def read() -> None:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        async for chunk in process.stdout:
            _keep(tail, bytes(chunk))
            turn.doing = f"{program}{_told(tail)}"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await process.wait()
        nursery.cancel_scope.cancel()
    if isinstance(process.stdout, trio.lowlevel.FdStream):
        # What was written last may still be in the pipe, which holds no more than one chunk.
        with suppress(BlockingIOError):
            _keep(tail, os.read(process.stdout.fileno(), _CHUNK))


async def _end(process: trio.Process) -> None:
    """Kills what is left of the group when the program was not waited for to its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(END_DEADLINE_S, shield=True):
            await process.wait()
    if process.stdout is not None:
        with trio.CancelScope(shield=True):
            await process.stdout.aclose()


def _keep(tail: bytearray, chunk: bytes) -> None:
    tail += chunk
    del tail[:-SHOWN_OUTPUT_BYTES]


def _told(tail: bytearray) -> str:
    text = "\n".join(map(printable, tail.decode(errors="replace").splitlines())).strip()
    return f", having said: {text}" if text else ""


def _environment(environment: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name not in _WORKLOAD_VARIABLES}
    return kept | {f"LEASEHOLD_HOOK_{name.upper()}": value for name, value in values.items()}
