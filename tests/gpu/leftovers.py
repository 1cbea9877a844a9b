"""Finds the processes of a report by a mark in their environment, and ends them without harm to the host.

A CUDA process that was restored and runs is suspended before it is killed: killing one was seen to hang a
host (NVIDIA/cuda-checkpoint 53). A process that can't be suspended is told to end by SIGTERM. It is left, and
named, if it does not: the operator decides.

    python -m tests.gpu.leftovers MARK      ends the processes whose mark begins so
"""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.simgpu.programs import CHECKPOINTED, OPERATING_SYSTEM, RUNNING, SUCCESS, Program, ProgramError

MARK: Final = "GPU_REPORT_MARK"
"""Variable that every process of a report inherits."""

LOCK_TIMEOUT_MS: Final = 5_000
CALL_S: Final = 15.0
CHECKPOINT_S: Final = 40.0
"""How long the driver may take for 32 GiB and more."""

END_S: Final = 5.0
LIMIT_S: Final = 45.0
"""Driver calls about all processes of a mark take so long at most, and the waits for their ends END_S more.

A lock and a checkpoint of one large process fit in. A process for which no time is left is told to end by
SIGTERM, or left and named.
"""

ROUNDS: Final = 4
"""A process that is ended may have started another meanwhile."""

EXEC_S: Final = 0.2
"""How long a process may take from fork(2) through execve(2). In between /proc shows no environment of it."""


def marked(mark: str) -> list[int]:
    """The pids of live processes whose mark begins so, without this process and its parent."""
    wanted = f"{MARK}={mark}".encode()
    own = {os.getpid(), os.getppid()}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (entry / "environ").read_bytes().split(b"\0")
            if int(entry.name) not in own and any(each.startswith(wanted) for each in variables):
                found.append(int(entry.name))
    return found


def end_marked(mark: str) -> list[str]:
    """Ends the processes whose mark begins so, and returns a line for each. See :data:`LIMIT_S`."""
    notes: dict[int, str] = {}
    deadline = time.monotonic() + LIMIT_S
    missed = False
    for _ in range(ROUNDS):
        pids = [pid for pid in marked(mark) if pid not in notes]
        if not pids and missed:
            break
        missed = not pids
        if pids:
            notes |= end_safely(pids, deadline)
        else:
            time.sleep(EXEC_S)
    return list(notes.values())


def end_safely(pids: list[int], deadline: float | None = None) -> dict[int, str]:
    """Ends processes, and returns the action taken per process.

    Processes that the driver does not know go first: a worker among them would react to the end of its
    workloads.

    Args:
        pids: The processes.
        deadline: Of the driver calls, by the monotonic clock. By default :data:`LIMIT_S` from now.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # a stopped process blocks every call about it
    names = {pid: _name(pid) for pid in pids}
    controller = _Controller(time.monotonic() + LIMIT_S if deadline is None else deadline)
    try:
        states = {pid: _state(controller, pid) for pid in pids}
        first = sorted(pids, key=lambda pid: isinstance(states[pid], int))
        return {pid: f"{names[pid]} ({pid}): {_end(controller, pid, states[pid])}" for pid in first}
    finally:
        controller.end_program()


def _name(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return " ".join(Path(word).name for word in words[:6]).strip()
    return "a process"


class _NoAnswerError(Exception):
    """A driver call did not return, or had no time left."""


class _Controller:
    """One program that asks the driver about all processes, since its cuInit may take seconds.

    The program has no mark, so that it is not found as a leftover itself. It is killed if a call does not
    return; the next call starts another one.

    Args:
        deadline: Of all calls, by the monotonic clock.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._program: Program | None = None
        self._init_failure: Exception | None = None

    def call(self, name: str, *arguments: int) -> Any:
        """The answer of a call.

        Raises:
            ProgramError: The program ended, the driver lacks the call, or cuInit failed before.
            _NoAnswerError: There was no answer in time, or to cuInit before.
        """
        if self._program is None and self._init_failure is None:
            self._start()
        if self._init_failure is not None:
            raise self._init_failure
        return self._ask(name, *arguments)

    def wait_for_end(self, pid: int) -> bool:
        """Waits for the end of a process with all its threads, and collects it if it is a child."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        left_s = max(0.0, self._deadline + END_S - time.monotonic())
        try:
            if not select.select([descriptor], [], [], min(END_S, left_s))[0]:
                return False
        finally:
            os.close(descriptor)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return True

    def end_program(self) -> None:
        """Kills the program, if there is one."""
        program, self._program = self._program, None
        if program is not None:
            program.send_signal(signal.SIGKILL)
            if self.wait_for_end(program.pid):  # it may hang in the kernel
                program.close()

    def _start(self) -> None:
        try:
            if (error := self._ask("init")) != SUCCESS:
                raise ProgramError(f"cuInit answers {error}")
        except (ProgramError, _NoAnswerError) as failure:
            self._init_failure = failure

    def _ask(self, name: str, *arguments: int) -> Any:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise _NoAnswerError("no time was left")
        if self._program is None:
            self._program = Program({key: text for key, text in os.environ.items() if key != MARK})
        try:
            self._program.begin(name, *arguments)
            return self._program.answer(min(CHECKPOINT_S if name == "checkpoint" else CALL_S, left_s))
        except queue.Empty:
            self.end_program()
            raise _NoAnswerError("the driver does not answer") from None
        except (BrokenPipeError, ProgramError) as error:
            if self._program.has_ended():
                self.end_program()
            raise ProgramError(str(error)) from error


def _state(controller: _Controller, pid: int) -> int | str | None:
    """The driver's state of a process; a text: why it is unknown.

    None: the process was never suspended, since it does not use CUDA, or may not be traced, or since the
    driver has no checkpoint calls or does not work.
    """
    try:
        error, state = controller.call("get_state", pid)
    except ProgramError:
        return None
    except _NoAnswerError as failure:
        return str(failure)
    return int(state) if error == SUCCESS else None


def _end(controller: _Controller, pid: int, state: int | str | None) -> str:
    """Ends one process, and says how."""
    if isinstance(state, str):
        return _ask_to_end(controller, pid, state)
    if state is not None and state != CHECKPOINTED:
        try:
            reason = _suspend(controller, pid, state)
        except (ProgramError, _NoAnswerError) as failure:
            reason = str(failure)
        if reason:
            return _ask_to_end(controller, pid, reason)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return "killed" if controller.wait_for_end(pid) else "LEFT: SIGKILL does not end it"


def _suspend(controller: _Controller, pid: int, state: int) -> str:
    """Suspends a process. Returns why it can't be, or nothing."""
    if state == RUNNING and (error := controller.call("lock", pid, LOCK_TIMEOUT_MS)) != SUCCESS:
        return "" if error == OPERATING_SYSTEM else f"its lock answered {error}"
    if (error := controller.call("checkpoint", pid)) != SUCCESS:
        controller.call("unlock", pid)
        return f"its checkpoint answered {error}"
    return ""


def _ask_to_end(controller: _Controller, pid: int, reason: str) -> str:
    """Waits for a process that can't be suspended, and sends SIGTERM. Without a handler that is a kill."""
    if controller.wait_for_end(pid):
        return "ended with the others"
    if _handles(pid, signal.SIGTERM):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if controller.wait_for_end(pid):
            return f"ended by SIGTERM, since {reason}"
    return f"LEFT running, since {reason}: end it with SIGKILL when no other work is on this host"


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(row.split()[1] for row in status.splitlines() if row.startswith("SigCgt"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def main() -> int:
    """Runs the command line. Exits with 1 if a process is left."""
    notes = end_marked(sys.argv[1] + "/")
    for note in notes:
        print(f"gpu_report: left by the report: {note}", file=sys.stderr)
    return 1 if any("LEFT" in note for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
