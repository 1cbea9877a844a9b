"""Runs the command blocks of a page in one shell, in order and as written.

Blocks marked ``bash`` are input of the shell. Blocks marked ``python`` run as programs in between. Each
command must succeed, except on lines with the comment ``# refused``, where it must fail. Blocks marked
``text`` show output: the session must print each of their lines, with any numbers. ``…`` stands for any text.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.ports import free_port

_BLOCK: Final = re.compile(r"^```(bash|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER: Final = re.compile(r"[\d.]*\d( ?([KMG]i?B/s|[KMG]i?B|ms|s)\b)?")
_REPORT: Final = 9
"""Descriptor of the shell to which it reports commands that failed."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page."""

    language: Literal["bash", "python", "text"]
    text: str


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a session."""

    output: str
    failed: list[str]
    """Commands that failed, in order."""
    finished: bool
    """Whether the shell reached the end of the last block."""


def blocks(text: str) -> list[Block]:
    """The blocks of a text that this module knows, in order."""
    return [Block(language, body) for language, body in _BLOCK.findall(text)]


def section(page: Path, heading: str) -> str:
    """The text under a heading of the second level."""
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, heading
    return found[1]


def play(session: Sequence[Block], folder: Path, *, limit_s: float, environment: Mapping[str, str]) -> Played:
    """Runs a session in a folder, and ends all of its processes.

    Args:
        session: Its blocks.
        folder: The current folder of the shell.
        limit_s: How long it may take.
        environment: Variables of the shell, besides those of the tests and those that keep sessions apart.
    """
    with tempfile.TemporaryDirectory() as home:  # a short name, since the worker's socket lies below
        return _play(session, folder, Path(home), limit_s, environment)


def _play(
    session: Sequence[Block], folder: Path, home: Path, limit_s: float, environment: Mapping[str, str]
) -> Played:
    address, worker_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    script = ["set -m -o pipefail", f"trap 'echo \"$BASH_COMMAND\" >&{_REPORT}' ERR"]
    for number, block in enumerate(session):
        if block.language == "bash":
            script.append(block.text)
        elif block.language == "python":
            program = folder / f"block{number}.py"
            program.write_text(block.text.replace("127.0.0.1:7400", address))
            script.append(f"python {shlex.quote(str(program))}")
    (folder / "session.sh").write_text("\n".join([*script, f"echo finished >&{_REPORT}\n"]))
    output, report = folder / "output", folder / "report"
    with output.open("w") as stream:
        shell = subprocess.Popen(
            ["bash", "--norc", "-c", f"exec {_REPORT}>report; source session.sh"],
            cwd=folder,
            env={
                **os.environ,
                "HOME": str(home),
                "TMPDIR": str(home),  # a killed worker leaves a folder there
                "LEASEHOLD_LISTEN": address,
                "LEASEHOLD_COORDINATOR": address,
                "LEASEHOLD_WORKER_LISTEN": worker_address,
                "LEASEHOLD_WORKER_COORDINATOR": worker_address,
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(limit_s)
        finally:
            _kill_all(home)
            shell.wait(10)
    failed = report.read_text().splitlines()
    finished = failed[-1:] == ["finished"]
    return Played(output.read_text(), failed[:-1] if finished else failed, finished)


def refused(session: Sequence[Block]) -> list[str]:
    """The commands that a session marks as refused."""
    lines = [line for block in session if block.language == "bash" for line in block.text.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if "# refused" in line]


def missing(session: Sequence[Block], output: str) -> list[str]:
    """Lines of the shown output that the output lacks."""
    had = {_masked(line) for line in output.splitlines()}
    shown = [line for block in session if block.language == "text" for line in block.text.splitlines()]
    return [line for line in shown if not any(_pattern(line).fullmatch(other) for other in had)]


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(_masked(part).strip()) for part in line.split("…")))


def _masked(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())


def _kill_all(home: Path) -> None:
    """Kills every process of a session, which its HOME marks."""
    mark = f"HOME={home}".encode()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = False
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.1)
