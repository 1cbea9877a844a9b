"""The command hook: a program that the worker runs, in a process group of its own."""

import logging
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import trio

from leasehold_worker.files.private_directories import STARTED_WITH
from leasehold_worker.hooks import hook_child
from leasehold_worker.hooks.context import HookFailedError, Turn
from leasehold_worker.hooks.http_call import printable
from leasehold_worker.hooks.templates import expand
from leasehold_worker.host.limit_files import login_limits
from leasehold_worker.programs.child_input import child_input, environment_entries
from leasehold_worker.programs.error_text import error_text
from leasehold_worker.programs.interpreter import module_command

logger = logging.getLogger(__name__)

SHOWN_OUTPUT_BYTES: Final = 2048
"""Reported bytes of a failed program's output, from its end, where errors usually are."""

END_DEADLINE_S: Final = 5.0
"""Time for a killed program to end. One that hangs in the kernel is abandoned."""

_CHUNK: Final = 65536
_WORKLOAD_VARIABLES: Final = frozenset({"LEASEHOLD_WORKLOAD", "LEASEHOLD_WORKLOAD_ID", "LEASEHOLD_LEASE_ID"})
"""Variables that mark a process as the workload's. A hook does not get them, since it must not be suspended
or killed with the workload."""


async def run(turn: Turn) -> None:
    """Runs the program of a command hook, and waits for its end.

    A cancellation kills the whole process group. A background process that the program leaves behind at its
    end is left alone, and its output is lost.

    Raises:
        HookFailedError: The program could not be started, or ended with another status than 0.
        OperationError: PERMISSION_OR_OS: the limits of its user are unknown.
    """
    values = turn.context.values(turn.phase)
    arguments = [expand(argument, values) for argument in turn.hook.command.arguments]
    turn.doing = f"{arguments[0]} was still running"
    context = turn.context
    user = context.account.ids if context.account is not None else ""
    limits = await login_limits(context.account)
    errors, write_end = os.pipe()
    tail = bytearray()
    with os.fdopen(errors, "rb") as refusal:
        try:
            with child_input(environment_entries(_environment(context.environment, values))) as environment:
                settings = (limits.encoded, user, str(context.working_directory), str(environment))
                process = await trio.lowlevel.open_process(
                    [*module_command(hook_child.__name__), str(write_end), *settings, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    umask=STARTED_WITH,
                    pass_fds=(write_end, environment),
                )
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: trio has no thread
            raise _not_started(arguments[0], error_text(error)) from error
        finally:
            os.close(write_end)
        try:
            await _finish(process, tail, turn)
        finally:
            await _end(process)
        if why := refusal.read().decode(errors="replace"):
            raise _not_started(arguments[0], why)
    status = process.returncode
    if status:
        how = f"exited with {status}: correct the program, then try again"
        if status < 0:
            how = f"was ended by signal {-status}: see the log of the host, then try again"
        raise HookFailedError(f"{arguments[0]} {how}{_told(tail)}")


def _not_started(program: str, why: str) -> HookFailedError:
    return HookFailedError(
        f"{program} could not be started: {why}; make the program work on the worker's host, then try again"
    )


async def _finish(process: trio.Process, tail: bytearray, turn: Turn) -> None:
    """Reads the output until the program ends, even if another process still has the pipe."""
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
        # The last output may still be in the pipe, which holds one chunk at most.
        with suppress(BlockingIOError):
            _keep(tail, os.read(process.stdout.fileno(), _CHUNK))


async def _end(process: trio.Process) -> None:
    """Kills the group unless the program has ended."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:  # such as sudo, whose processes are root's
            logger.warning("process %d of a hook runs as another user, and goes on", process.pid)
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
    return f"; its output: {text}" if text else ""


def _environment(environment: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name not in _WORKLOAD_VARIABLES}
    return kept | {f"LEASEHOLD_HOOK_{name.upper()}": value for name, value in values.items()}
