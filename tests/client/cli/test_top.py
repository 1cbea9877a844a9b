"""``leasehold top`` as a process: its terminal, its exit codes, and its end."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator
from tests.client.top.scripted_fleet import ScriptedFleet, gpu, worker

TIMEOUT_S = 60.0


class Terminal:
    """A pseudo-terminal with the verb in it."""

    def __init__(
        self, address: str, folder: Path, program: Sequence[str] = ("-m", "leasehold_client")
    ) -> None:
        ours, theirs = pty.openpty()
        self._ours = ours
        settings = {
            "LEASEHOLD_COORDINATOR": address,
            "XDG_CONFIG_HOME": str(folder),
            "TERM": "xterm-256color",
        }
        command = [sys.executable, *program, "top"]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **settings}
        )
        os.close(theirs)
        self.output = b""
        self._is_closing = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while not self._is_closing and (piece := os.read(self._ours, 65_536)):
                self.output += piece
        except OSError:
            pass  # how Linux says that nobody holds the other side any more

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.output:
            if time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"{text!r} is missing: {self.output[-3000:]!r}")
            time.sleep(0.02)

    def close(self) -> None:
        """Closes the terminal, as the end of its window does."""
        self._is_closing = True
        self.press(b"?")  # its output ends the last read
        self._reader.join(TIMEOUT_S)
        os.close(self._ours)

    def end(self) -> int:
        """Waits for the end, and returns the exit code."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        os.close(self._ours)
        assert b"Traceback" not in self.output
        return code


@pytest.fixture
def fleet(scripted: ScriptedCoordinator) -> ScriptedFleet:
    return ScriptedFleet(scripted, [worker("alpha"), gpu(0), gpu(1)])


def test_without_a_terminal_it_says_what_to_use(leasehold: CommandLine) -> None:
    done = leasehold("top")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("leasehold: top needs a terminal: run it in one, or print the fleet with")


def test_the_terminal_is_restored_after_quitting(fleet: ScriptedFleet, tmp_path: Path) -> None:
    terminal = Terminal(fleet.scripted.address, tmp_path)
    terminal.wait_for(b"1 host | 2 GPUs: 2 free")
    terminal.press(b"q")
    assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.output  # leaves the alternate screen


@pytest.mark.long
def test_a_signal_restores_the_terminal(fleet: ScriptedFleet, tmp_path: Path) -> None:
    terminal = Terminal(fleet.scripted.address, tmp_path)
    terminal.wait_for(b"1 host | 2 GPUs: 2 free")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    assert b"\x1b[?1049l" in terminal.output


def test_the_end_of_the_terminal_ends_it_as_the_signal_of_that_end_does(
    fleet: ScriptedFleet, tmp_path: Path
) -> None:
    terminal = Terminal(fleet.scripted.address, tmp_path)
    terminal.wait_for(b"1 host | 2 GPUs: 2 free")
    terminal.close()
    assert terminal.process.wait(TIMEOUT_S) == -signal.SIGHUP


@pytest.mark.long
def test_no_coordinator_is_told_before_the_page(tmp_path: Path) -> None:
    terminal = Terminal("insecure:127.0.0.1:1", tmp_path)
    assert terminal.end() == 3
    assert b"no coordinator answers at insecure:127.0.0.1:1" in terminal.output


def test_malformed_input_ends_nothing(fleet: ScriptedFleet, tmp_path: Path) -> None:
    terminal = Terminal(fleet.scripted.address, tmp_path)
    terminal.wait_for(b"1 host | 2 GPUs: 2 free")
    terminal.press(b"\xff")
    terminal.press(b"\xc3")  # the first byte of a character of UTF-8
    # Escape sequences that the parser of textual fails on: a character that is none, and a pixel of no size.
    terminal.press(b"\x1b[1114112u\x1b[:u\x1b[?2048;1$y\x1b[48;0;0;0;0t\x1b[<0;10;5M")
    terminal.press(b"\x1b[48;24;80;480;800t")  # the terminal has a size again
    terminal.press(b"?")
    terminal.wait_for(b"Two workloads")
    terminal.press(b"\x03")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("broken", "defect"),
    [
        ("app.counts_text", b"KeyError at broken.py:4: 'lost'"),
        pytest.param(
            "terminal_driver.TerminalDriver._read",
            b"RuntimeError: a thread of the terminal failed",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_defect_of_the_page_is_one_line(
    fleet: ScriptedFleet, tmp_path: Path, broken: str, defect: bytes
) -> None:
    program = tmp_path / "broken.py"
    program.write_text(
        "from leasehold_client.main import main\n"
        "from leasehold_client.top import app, terminal_driver\n"
        "def broken(*_):\n"
        "    raise KeyError('lost')\n"
        f"{broken} = broken\n"
        "main()\n"
    )
    terminal = Terminal(fleet.scripted.address, tmp_path, (str(program),))
    if "_read" in broken:
        terminal.wait_for(b"1 host | 2 GPUs: 2 free")
        terminal.press(b"q")
    assert terminal.end() == 1
    assert b"leasehold: top ended by a defect of its own (" + defect + b")" in terminal.output
    assert b"\x1b[?1049l" in terminal.output
