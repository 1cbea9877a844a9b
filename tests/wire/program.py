"""The program of the recorded workloads."""

import shlex
import sys
from pathlib import Path

from tests.integration.fleets import COUNTER as SOURCE
from tests.wire.recording import COUNTER


def write_counter(folder: Path) -> Path:
    """Writes the program, and returns its folder, for the search path of a worker."""
    programs = folder / "bin"
    programs.mkdir()
    command = shlex.join([sys.executable, str(SOURCE), "--bytes", "64KiB", "--interval-s", "0.2"])
    (programs / COUNTER).write_text(f"#!/bin/sh\nexec {command}\n")
    (programs / COUNTER).chmod(0o755)
    return programs
