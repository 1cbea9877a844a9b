"""Makes a virtual environment of the kit's packages, offline, and runs the report in it.

Standard library only: it runs on the host's Python. Everything that it makes lies in one temporary folder,
which it deletes. Whatever becomes of the report, it ends the processes that the report left.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

KIT = Path(__file__).resolve().parents[2]
BUDGET_S = 450.0
"""What the report may take. With its end and what is left behind, nine minutes are not exceeded."""

END_S = 30.0
"""How much longer than that the report may take to end its last step."""

LEFTOVERS_S = 60.0
SIMULATED_MEMORY = "6GiB"
"""Of a GPU. Three probes run at a time. Each has up to two contexts, and needs 2 GiB free at its start."""
PR_SET_PDEATHSIG = 1


def make_environment(folder: Path) -> Path:
    """Makes a virtual environment of the kit's packages, and returns its Python.

    A path file names the folder of the packages, which needs neither pip nor ensurepip.
    """
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        sys.exit(f"gpu_report: {sys.executable} -m venv failed: install python3-venv\n{made.stdout}")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "kit.pth").write_text(f"{KIT / 'packages'}\n")
    return folder / "bin" / "python"


def report_environment(folder: Path, mark: str) -> dict[str, str]:
    """The environment of the report: it hides the host's settings, and keeps writes in the folder."""
    # Packages of PYTHONPATH would shadow those of the kit.
    settings = ("LEASEHOLD_", "PYTHONPATH", "PYTHONHOME", "PYTEST_", "SIMGPU_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    (folder / "tmp").mkdir()
    no_settings = folder / "settings.toml"
    no_settings.touch()
    return {
        **kept,
        "LEASEHOLD_COORDINATOR_CONFIG": str(no_settings),
        "LEASEHOLD_WORKER_CONFIG": str(no_settings),
        "GPU_REPORT_MARK": mark,
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_STATE_HOME": str(folder / "state"),
        "CUDA_CACHE_PATH": str(folder / "cuda-cache"),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "PYTHONUNBUFFERED": "1",
    }


def end_with_parent() -> None:
    """Has the kernel send SIGTERM to a child when this process ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def run(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> int:
    """Runs a child to its end, and hands SIGINT and SIGTERM on to it. SIGKILL ends it after the timeout."""
    child = subprocess.Popen(
        command,
        cwd=KIT,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )

    def hand_on(_number: int, _frame: FrameType | None) -> None:
        child.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hand_on)
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.wait()


def main() -> int:
    """Runs the command line."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        prog="gpu_report",
        description="Report how Leasehold works on the GPUs of this host, in nine minutes at most, without "
        "network. It writes gpu_report.json and gpu_report.md, and leaves nothing else behind.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where the report is written (.)"
    )
    parser.add_argument(
        "--simgpu", type=int, metavar="N", help="use N simulated GPUs, to try the kit: it needs a C compiler"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="leasehold-gpu-report-"))
    try:
        python = str(make_environment(folder / "venv"))
        environment = report_environment(folder, mark)
        host: list[str] = []
        if options.simgpu is not None:
            host = [python, "-m", "leasehold_client", "simgpu", "exec", "--dir", str(folder / "host")]
        new_host = ["--gpus", str(options.simgpu), "--memory", SIMULATED_MEMORY, "--"] if host else []
        report = [python, "-m", "tests.gpu.report", "--output", str(options.output.resolve())]
        report += ["--began", str(began), "--budget-s", str(BUDGET_S)]
        status = run([*host, *new_host, *report], environment, BUDGET_S + END_S)
        left = [python, "-m", "tests.gpu.leftovers", mark]
        if run([*host, *(["--"] if host else []), *left], environment, LEFTOVERS_S) != 0:
            status = status or 1
        return status
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
