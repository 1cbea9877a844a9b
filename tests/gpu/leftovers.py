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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.simgpu.programs import CHECKPOINTED, OPERATING_SYSTEM, RUNNING, SUCCESS, Program, ProgramError

MARK: Final = "GPU_REPORT_MARK"
"""Variable that every process of a report inherits."""

LOCK_TIMEOUT_MS: Final = 5_000
CALL_S: Final = 15.0
CHECKPOINT_S: Final = 40.0
"""How long the driver may take for 32 GiB and more."""

END_S: Final = 5.0
ROUNDS: Final = 3
"""A process that is ended may have started another meanwhile."""


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
    """Ends the processes whose mark begins so, and returns a line for each."""
    notes: dict[int, str] = {}
    for _ in range(ROUNDS):
        pids = [pid for pid in marked(mark) if pid not in notes]
        if not pids:
            break
        notes |= end_safely(pids)
    return list(notes.values())


def end_safely(pids: list[int]) -> dict[int, str]:
    """Ends processes, and returns the action taken per process.

    Those that the driver does not know go first: a worker among them would react to the end of its workloads.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # a stopped process blocks every call about it
    names = {pid: _name(pid) for pid in pids}
    states = {pid: _state(pid) for pid in pids}
    first = sorted(pids, key=lambda pid: isinstance(states[pid], int))
    return {pid: f"{names[pid]} ({pid}): {_end(pid, states[pid])}" for pid in first}


def _name(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return " ".join(Path(word).name for word in words[:6]).strip()
    return "a process"


@contextmanager
def _controller() -> Iterator[Program]:
    """A program that asks the driver. It has no mark, so that it is not found as a leftover itself."""
    controller = Program({name: value for name, value in os.environ.items() if name != MARK})
    try:
        yield controller
    finally:
        controller.close()


def _state(pid: int) -> int | str | None:
    """The driver's state of a process; a text: why it is unknown.

    None: the process was never suspended, since it does not use CUDA, or may not be traced, or since the
    driver has no checkpoint calls or does not work.
    """
    with _controller() as controller:
        try:
            controller.begin("init")
            if controller.answer(CALL_S) != SUCCESS:
                return None
            controller.begin("get_state", pid)
            error, state = controller.answer(CALL_S)
        except ProgramError:
            return None
        except queue.Empty:
            return "the driver does not answer"
    return int(state) if error == SUCCESS else None


def _end(pid: int, state: int | str | None) -> str:
    """Ends one process, and says how."""
    if state is None or state == CHECKPOINTED:
        return _kill(pid)
    if isinstance(state, str):
        return _ask_to_end(pid, state)
    with _controller() as controller:
        try:
            controller.begin("init")
            controller.answer(CALL_S)
            if state == RUNNING and (error := controller.lock(pid, LOCK_TIMEOUT_MS)) != SUCCESS:
                return (
                    _kill(pid)
                    if error == OPERATING_SYSTEM
                    else _ask_to_end(pid, f"its lock answered {error}")
                )
            controller.begin("checkpoint", pid)
            if (error := controller.answer(CHECKPOINT_S)) != SUCCESS:
                controller.unlock(pid)
                return _ask_to_end(pid, f"its checkpoint answered {error}")
        except (ProgramError, queue.Empty):
            return _ask_to_end(pid, "the driver does not answer")
    return _kill(pid)


def _kill(pid: int) -> str:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return "killed" if _gone(pid) else "LEFT: SIGKILL does not end it"


def _ask_to_end(pid: int, reason: str) -> str:
    """Waits for a process that can't be suspended, and sends SIGTERM. Without a handler that is a kill."""
    if _gone(pid):
        return "ended with the others"
    if _handles(pid, signal.SIGTERM):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if _gone(pid):
            return f"ended by SIGTERM, since {reason}"
    return f"LEFT running, since {reason}: end it with SIGKILL when no other work is on this host"


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(row.split()[1] for row in status.splitlines() if row.startswith("SigCgt"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def _gone(pid: int) -> bool:
    """Waits for the end of a process with all its threads, and collects it if it is a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not select.select([descriptor], [], [], END_S)[0]:
            return False
    finally:
        os.close(descriptor)
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return True


def main() -> int:
    """Runs the command line. Exits with 1 if a process is left."""
    notes = end_marked(sys.argv[1] + "/")
    for note in notes:
        print(f"gpu_report: left by the report: {note}", file=sys.stderr)
    return 1 if any("LEFT" in note for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main())
