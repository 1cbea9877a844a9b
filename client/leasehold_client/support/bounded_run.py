"""Programs that a part of the bundle asks: with a deadline, and a bound in bytes."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from leasehold_client.errors import LeaseholdError
from leasehold_client.installation.steps import PASSED

CHUNK_BYTES: Final = 65_536
ERROR_BYTES: Final = 2_000
"""Bytes of standard error that a reason may have."""


def run_bounded(
    command: Sequence[str],
    timeout_s: float,
    limit_bytes: int,
    *,
    keep_end: bool = False,
    owner_of: Path | None = None,
) -> tuple[int, bytes]:
    """Runs a program, and kills it and its children at the deadline.

    Args:
        command: The program and its arguments.
        timeout_s: Deadline.
        limit_bytes: Most bytes of its standard output.
        keep_end: Whether the end of a larger output is the result. False: a larger output is an error.
        owner_of: If root calls, the program runs as the owner of this directory. It then leaves no file of
            root's there, such as those of a database. It gets few of root's variables, which the owner could
            read in /proc.

    Returns:
        The exit code, and the output.

    Raises:
        LeaseholdError: The program does not run, fails without output, or exceeds a limit.
    """
    owner = owner_of.stat() if owner_of is not None and os.geteuid() == 0 else None
    become = _become(owner) if owner and owner.st_uid else ()
    try:
        process = subprocess.Popen(
            [*become, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            env=_shared_variables() if become else None,
        )
    except OSError as error:
        raise LeaseholdError(f"{(*become, *command)[0]} does not run: {error.strerror}") from error
    try:
        output, errors = _read(process, time.monotonic() + timeout_s, limit_bytes, keep_end=keep_end)
    except TimeoutError:
        raise LeaseholdError(f"{command[0]} did not end within {timeout_s:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process in a hung system call ends later
            process.wait(1.0)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if not output:
        why = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise LeaseholdError(f"{command[0]} failed: {why}" if why else f"{command[0]} printed nothing")
    return process.returncode, output


def _become(owner: os.stat_result) -> tuple[str, ...]:
    """The command of util-linux that runs a program as the owner of a file.

    The argument ``user`` of Popen needs fork(2), whose child gRPC may abort before its exec while a channel
    is open (https://github.com/grpc/grpc/issues/43055). Without it, Popen uses vfork(2).
    """
    return ("setpriv", f"--reuid={owner.st_uid}", f"--regid={owner.st_gid}", "--clear-groups", "--")


def _shared_variables() -> dict[str, str]:
    """The variables of this process that have no secrets."""
    return {
        name: value for name, value in os.environ.items() if name in PASSED or name.startswith("LEASEHOLD_")
    }


def _read(
    process: subprocess.Popen[bytes], deadline: float, limit_bytes: int, *, keep_end: bool
) -> tuple[bytes, bytes]:
    """Standard output and the end of standard error, until both are closed.

    Raises:
        TimeoutError: They were not closed in time.
        LeaseholdError: The output is too large.
    """
    ends: dict[IO[bytes] | None, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in ends:
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            for key, _ in selector.select(left_s):
                pipe = process.stdout if key.fileobj is process.stdout else process.stderr
                if not (chunk := os.read(key.fd, CHUNK_BYTES)):
                    selector.unregister(key.fileobj)
                kept = ends[pipe]
                kept += chunk
                if pipe is process.stderr:
                    del kept[:-ERROR_BYTES]
                elif keep_end:
                    del kept[:-limit_bytes]
                elif len(kept) > limit_bytes:
                    raise LeaseholdError(f"the output is larger than {limit_bytes} bytes")
    process.wait(max(0.1, deadline - time.monotonic()))
    return bytes(ends[process.stdout]), bytes(ends[process.stderr])
