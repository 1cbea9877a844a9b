"""Measures the cost of an idle worker in the schedulers of Dask and Ray.

Run as ``PYTHON bench/other_schedulers.py dask|ray COUNT``. PYTHON must have ``distributed`` or ``ray``, which
nothing else here needs. Up to COUNT workers are started, as many as start in time. Workers of Dask are
objects in a few processes, since only the scheduler is measured. A worker of Ray is a raylet with its agents,
which are processes of their own. Prints one line of JSON.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_LIMIT_S = 240.0
SETTLE_S = 10.0
DASK_WORKERS_PER_PROCESS = 250


def cpu_s(pid: int) -> float:
    """CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """VmRSS of a process."""
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    if match is None:
        raise SystemExit(f"process {pid} has ended")
    return int(match[1]) * 1024


def steady(pid: int, before_bytes: int, workers: int, seconds: float) -> dict[str, Any]:
    """CPU time and memory of a scheduler with idle workers."""
    time.sleep(SETTLE_S)
    used, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    taken_s = time.monotonic() - began
    return {
        "workers": workers,
        "cpu_percent_of_a_core": round(100 * (cpu_s(pid) - used) / taken_s, 1),
        "kib_per_worker": round((resident_bytes(pid) - before_bytes) / workers / 1024, 1),
    }


def wait_most(count: Callable[[], int], wanted: int) -> tuple[int, float]:
    """Waits until all have started, or no more start in time. Returns their number and the seconds."""
    began = time.monotonic()
    while (found := count()) < wanted and time.monotonic() - began < START_LIMIT_S:
        time.sleep(0.2)
    return found, round(time.monotonic() - began, 1)


def dask_workers(address: str, count: int) -> None:
    """Runs idle workers in this process until it is killed."""
    import asyncio

    import dask
    from distributed import Worker

    dask.config.set({"distributed.worker.profile.enabled": False})

    async def hold() -> None:
        workers = [
            Worker(address, nthreads=1, memory_limit=0, dashboard=False, name=f"{os.getpid()}-{number}")
            for number in range(count)
        ]
        for worker in workers:
            await worker
        await asyncio.Event().wait()

    asyncio.run(hold())


def measure_dask(count: int, seconds: float) -> dict[str, Any]:
    """A Dask scheduler in a process of its own."""
    from distributed import Client, __version__

    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
    with tempfile.TemporaryDirectory() as folder:
        address_file = Path(folder, "scheduler.json")
        scheduler = subprocess.Popen(
            [*command, "--scheduler-file", str(address_file)], stderr=subprocess.DEVNULL, cwd=folder
        )
        processes = [scheduler]
        try:
            wait_most(lambda: address_file.exists(), True)
            address = json.loads(address_file.read_text())["address"]
            with Client(address) as client:
                time.sleep(2.0)
                before = resident_bytes(scheduler.pid)
                for first in range(0, count, DASK_WORKERS_PER_PROCESS):
                    share = min(DASK_WORKERS_PER_PROCESS, count - first)
                    arguments = ["dask-workers", str(share), "--address", address]
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, __file__, *arguments], stderr=subprocess.DEVNULL, cwd=folder
                        )
                    )
                found, start_s = wait_most(lambda: len(client.scheduler_info(n_workers=-1)["workers"]), count)
                measured = steady(scheduler.pid, before, found, seconds)
            return {"scheduler": "dask", "version": __version__, "start_s": start_s, **measured}
        finally:
            for process in reversed(processes):
                process.kill()
                process.wait()


def measure_ray(count: int, seconds: float) -> dict[str, Any]:
    """The GCS server of a Ray cluster on this host."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
        time.sleep(5.0)
        before, began = resident_bytes(gcs), time.monotonic()
        for _ in range(count):
            cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, wait=False)
            if time.monotonic() - began > START_LIMIT_S:
                break
        alive = lambda: sum(node["Alive"] for node in ray.nodes()) - 1  # noqa: E731
        found, start_s = wait_most(alive, count)
        return {
            "scheduler": "ray",
            "version": ray.__version__,
            "start_s": start_s,
            **steady(gcs, before, found, seconds),
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Measures one scheduler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["dask", "ray", "dask-workers"])
    parser.add_argument("count", type=int)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.what == "dask-workers":
        dask_workers(options.address, options.count)
        return
    measure = measure_dask if options.what == "dask" else measure_ray
    sys.stdout.write(json.dumps(measure(options.count, options.seconds)) + "\n")


if __name__ == "__main__":
    main()
