"""The coordinator and the light workers as processes of their own, and what they cost."""

import json
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Self

from tests.listening import LISTENING

SWARM_SIZE = 2_500
"""Light workers of one process."""

LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"  # noqa: S104 - off loopback, each caller needs a certificate
START_TIMEOUT_S = 300.0
LOAD_INTERVAL_S = 5.0
LOADS_PER_S = 200
"""Most loads per second of the whole fleet. The load interval grows with the number of workers."""


def cpu_s(pid: int) -> float:
    """CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, field: str) -> int:
    """VmRSS or VmHWM of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def spread(times_s: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(times_s)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50_ms": round(1e3 * statistics.median(ordered), 2), "p99_ms": round(1e3 * last, 2)}


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Polls until the condition holds. Returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > START_TIMEOUT_S:
            raise SystemExit(f"{what} did not happen within {START_TIMEOUT_S:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


class Coordinator:
    """A coordinator process, which keeps its address and its store over restarts. The context's end kills it.

    Args:
        folder: The folder of its store.
        options: Further options.
        host: Where it listens for clients. Off loopback, it requires certificates.
        worker_host: Where it listens for workers.
    """

    def __init__(
        self, folder: Path, *options: str, host: str = LOOPBACK, worker_host: str = LOOPBACK
    ) -> None:
        self._database = folder / "store.sqlite3"
        self._options = ["--database", str(self._database), "--log-level", "error", *options]
        self._hosts = host, worker_host
        self.address = self.worker_address = f"{LOOPBACK}:0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it."""
        ports = (text.rpartition(":")[2] for text in (self.address, self.worker_address))
        listen, worker_listen = (f"{host}:{port}" for host, port in zip(self._hosts, ports, strict=True))
        options = ["--listen", listen, "--worker-listen", worker_listen, *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leasehold_client", "coordinator", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        listening = LISTENING.search(self.process.stdout.readline())
        if listening is None:
            raise SystemExit("the coordinator did not start")
        self.address, self.worker_address = (text.replace(ANY, LOOPBACK) for text in listening.groups())

    def commits(self) -> int:
        """Number of commits of its store."""
        with closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as reader:
            (number,) = reader.execute("SELECT number FROM commits").fetchone()
        return int(number)

    def kill(self) -> None:
        """Kills the process by SIGKILL, like a crash."""
        self.process.kill()
        self.process.wait()


class Swarm:
    """Light workers in processes of their own, which end with the context."""

    def __init__(self, address: str, count: int, *options: str) -> None:
        self._count = count
        self._welcomed: dict[int, int] = {}
        self._processes = []
        for first in range(0, count, SWARM_SIZE):
            arguments = [address, str(min(SWARM_SIZE, count - first)), str(first), *options]
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.light_workers", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(first, process), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _read(self, first: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._welcomed[first] = json.loads(line)["welcomed"]

    @property
    def welcomed(self) -> int:
        """Number of workers with a session."""
        return sum(self._welcomed.values())

    def wait_connected(self) -> float:
        """Waits until all workers have a session. Returns the seconds it took."""
        return wait_for(lambda: self.welcomed == self._count, f"the welcome of {self._count} workers")

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes."""
        return sum(cpu_s(process.pid) for process in self._processes)


def load_interval_s(count: int) -> float:
    """The load interval of a fleet of this size."""
    return max(LOAD_INTERVAL_S, count / LOADS_PER_S)


def settle(count: int) -> None:
    """Waits until most workers have received the load interval of their fleet."""
    time.sleep(max(2 * LOAD_INTERVAL_S, 1.5 * load_interval_s(count)))


def steady(pid: int, swarm: Swarm, seconds: float) -> dict[str, float]:
    """CPU time while only loads arrive."""
    server, clients, began = cpu_s(pid), swarm.cpu_s, time.monotonic()
    time.sleep(seconds)
    taken_s = time.monotonic() - began
    return {
        "cpu_percent_of_a_core": round(100 * (cpu_s(pid) - server) / taken_s, 1),
        "light_workers_cpu_percent": round(100 * (swarm.cpu_s - clients) / taken_s, 1),
    }
