"""CUDA programs under a test's control, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("cuda_child.py")
COUNTER = Path(__file__).parents[2] / "examples" / "counter.py"
DEADLINE_S = 30.0

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
NO_DEVICE, INVALID_DEVICE = 100, 101
OPERATING_SYSTEM, ILLEGAL_STATE, NOT_READY = 304, 401, 600
NOT_PERMITTED, NOT_SUPPORTED = 800, 801
RUNNING, LOCKED, CHECKPOINTED, FAILED = 0, 1, 2, 3
MIB = 2**20


class ProgramError(Exception):
    """The child answered with an exception, or died."""


class Program:
    """A `cuda_child.py`. `program.lock(pid)` calls its function of that name and returns what it answers."""

    def __init__(self, environment: Mapping[str, str], begin: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*begin, sys.executable, str(CHILD)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked = self._begun = 0
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.begin(name, *arguments, **options)
            return self.answer()

        return call

    def begin(self, name: str, *arguments: Any, **options: Any) -> None:
        """Starts a call whose answer is fetched later."""
        assert self._process.stdin is not None
        self._asked += 1
        self._process.stdin.write(json.dumps([name, arguments, options]) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = DEADLINE_S) -> Any:
        """Waits for the answer to the oldest call."""
        line = self._answers.get(timeout=timeout_s)
        if not line:
            raise ProgramError(f"the program ended with {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise ProgramError(reply["error"])
        return reply["value"]

    def is_asleep(self) -> bool:
        """Whether the last call has begun, and sleeps. One that lacks CPU time does not."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return self._begun == self._asked and state in "SD"
        return False

    def is_waiting(self, samples: int = 15) -> bool:
        """Whether a call waits: it has no answer, and was found asleep in so many samples.

        A call that does not wait is seldom asleep. It answers before the last sample on a busy machine too,
        since samples do not count while the call lacks CPU time.
        """
        end = time.monotonic() + DEADLINE_S
        asleep = 0
        while asleep < samples:
            assert time.monotonic() < end, "the call neither sleeps nor answers"
            try:
                line = self._answers.get(timeout=0.02)
            except queue.Empty:
                asleep += self.is_asleep()
            else:
                self._answers.put(line)
                return False
        return True

    def has_ended(self) -> bool:
        """Whether it has ended. It is collected if so."""
        return self._process.poll() is not None

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stops it as SIGSTOP does, and returns once it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """Ends it as hard as can be, and collects it."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait(timeout=DEADLINE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if line == "{}\n":
                    self._begun += 1
                else:
                    self._answers.put(line)
        except ValueError:
            return  # closed under our feet, at the end of a test
        self._answers.put("")


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits until a condition holds, or fails the test."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"it did not come true that {what}"
        time.sleep(0.005)


def environment_of(host_environment: Mapping[str, str], **more: str) -> dict[str, str]:
    """This process's environment, on a simulated host."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return {**inherited, **host_environment, **more}
