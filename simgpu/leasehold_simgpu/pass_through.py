"""Runs a child program in place of this process: passes signals on, and returns the exit status."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from leasehold_simgpu.errors import InvalidSettingError

_PASSED: Final = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_FROM_KERNEL: Final = 0x80  # SI_KERNEL: sent by the terminal, to the whole process group
_SIGNALLED: Final = 128


def run_with_signals(program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a program to its end, and forwards the signals of this process.

    Returns:
        The exit status. If a signal ended the program: 128 plus the signal's number, as in a shell.

    Raises:
        InvalidSettingError: The program cannot be started.
    """
    waited_for = _PASSED | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        child = _start(program, environment, before)
        while (status := child.poll()) is None:
            got = signal.sigwaitinfo(waited_for)
            if got.si_signo in _PASSED and got.si_code != _FROM_KERNEL:
                child.send_signal(got.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _SIGNALLED - status if status < 0 else status


def _start(
    program: Sequence[str], environment: Mapping[str, str], mask: Iterable[int]
) -> subprocess.Popen[bytes]:
    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        return subprocess.Popen(program, env=environment, preexec_fn=unblock)
    except OSError as error:
        raise InvalidSettingError(
            f"command {program[0]!r} cannot be started: {os.strerror(error.errno or 0)}"
        ) from error
