"""The child that becomes the program of a command hook.

A program or a directory can be on a volume that does not answer. The worker itself would wait for that volume
with Python's lock held, between vfork and exec.
"""

import os
import signal
import sys

from leasehold_worker.programs.error_text import error_text
from leasehold_worker.programs.user_change import take_limits, take_on


def main() -> None:
    """Executes a program: ``ERRORS_FD LIMITS USER WORKING_DIRECTORY ENVIRONMENT_FD PROGRAM [ARGUMENT…]``.

    The variables of the environment act only after the change of the user.
    """
    errors, limits, user, directory, environment_fd, *arguments = sys.argv[1:]
    os.set_inheritable(int(errors), False)
    with os.fdopen(int(environment_fd), "rb") as file:
        entries = file.read().split(b"\0")
    environment = {entry[:at]: entry[at + 1 :] for entry in entries if (at := entry.find(b"=")) > 0}
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        take_limits(limits)
        take_on(user)
        os.chdir(directory)
        os.execvpe(arguments[0], arguments, environment)  # noqa: S606 - what the workload's owner asked for
    except (OSError, ValueError, MemoryError) as error:
        os.write(int(errors), _why(error, arguments[0], directory).encode(errors="replace"))


def _why(error: Exception, program: str, directory: str) -> str:
    if isinstance(error, FileNotFoundError) and error.filename != directory:
        if "/" not in program:
            return "no such program in the PATH of hooks on the worker, or its interpreter is missing"
        return "no such program on the worker, or its interpreter is missing"
    return error_text(error) or "no memory within its limits"
