"""Every benchmark of `make bench` at its smallest: it measures, and leaves no process and no file."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_worker.session import channel, session

ROOT = Path(__file__).resolve().parents[2]
BENCHES = (
    "-m bench.command_latency --rounds 8",
    "-m bench.attack_latency --seconds 1 --rounds 1",
    "-m bench.cli_start --rounds 2",
    "-m bench.operation_overhead --instant-rounds 1 --rounds 1",
    "-m bench.coordinator_restart --workloads 10 --commands 20 --rounds 1",
    "-m bench.pool --grants 10 --rounds 2",
    "-m bench.fleet --workers 2 --seconds 1",
    "-m bench.fleet --workers 2 --clients 2 --seconds 1",
    "-m bench.memory --commands 30",
    "-m bench.strategies --size 600MiB --only offload+cuda_suspend",
)


def run_checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark as `make bench` does."""
    command = [sys.executable, "-m", "bench.checked", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_light_workers_connect_as_real_ones_do() -> None:
    light = runpy.run_path(str(ROOT / "bench/light_workers.py"))
    assert light["OPTIONS"] == channel.OPTIONS
    assert (light["BACKOFF_MIN_S"], light["BACKOFF_MAX_S"]) == (session.BACKOFF_MIN_S, session.BACKOFF_MAX_S)


def test_make_bench_runs_these() -> None:
    recipe = re.search(r"^bench:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    made = re.findall(r"-m bench\.checked (-m \S+)", recipe[1])
    assert made == [bench.partition(" --")[0] for bench in BENCHES]


@pytest.mark.long
@pytest.mark.parametrize("bench", BENCHES)
def test_a_benchmark_measures_and_leaves_nothing(bench: str) -> None:
    done = run_checked(*bench.split())
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_a_benchmark_beside_an_older_commit_runs_its_rooms_and_leaves_nothing() -> None:
    program = (
        "import json, leasehold_coordinator as ours, pathlib\n"
        "root = pathlib.Path(ours.__file__).parents[2]\n"
        "print(json.dumps({'mine': int(root == pathlib.Path.cwd()), 'machine': 1}))\n"
    )
    done = run_checked("-m", "bench.comparison", "--turns", "2", "HEAD", "-c", program)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["before"], found["now"]) == ({"mine": 0}, {"mine": 1})


@pytest.mark.long
def test_what_a_benchmark_leaves_fails_it_and_is_named() -> None:
    program = (
        "import subprocess, tempfile\n"
        "tempfile.mkstemp(suffix='-forgotten')\n"
        "left = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(left.pid)\n"
    )
    done = run_checked("-c", program)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 1
    process, file = done.stderr.splitlines()[-2:]
    assert process == f"left behind: process {done.stdout.strip()}: sleep 600 "
    assert file.endswith("-forgotten")
