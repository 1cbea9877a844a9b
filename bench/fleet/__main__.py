"""Measures one real coordinator with thousands of light workers, and a bare echo server with the same load.

For each size: CPU time and memory of the coordinator, latency of frames, of changes to a watcher and of
commands, commands per second, the detection of a silent worker, and the return of all workers after a kill.
In the same run idle workers connect without TLS, and the same streams send the same loads to a bare grpc.aio
server that echoes each message. With
``--others`` the schedulers of Dask and Ray are measured as well. Prints one JSON document.

``--workers 100 --clients 64`` measures commands alone: commands per second, their latency, the coordinator's
commits, and the CPU time of the coordinator, the clients and the light workers.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.fleet.commands import measure_commands, run_commands
from bench.fleet.echo import measure_echo
from bench.fleet.processes import Coordinator, Swarm, memory_bytes, settle, spread, steady, wait_for
from bench.fleet.sessions import PROBES, Probe, time_silence, time_watcher
from bench.machine import machine

CLIENTS = 16
OTHER_SCHEDULERS = Path(__file__).parents[1] / "other_schedulers.py"
OTHER_WORKERS = {"dask": 1_000, "ray": 20}
"""As many as run side by side on two cores."""


def measure(count: int, seconds: float) -> dict[str, Any]:
    """All measurements of one size."""
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder, ExitStack() as stack:
        coordinator = Coordinator(Path(folder))
        coordinator.start()
        stack.callback(lambda: coordinator.kill())
        time.sleep(1.0)
        idle_bytes = memory_bytes(coordinator.process.pid, "VmRSS")
        swarm = Swarm(coordinator.worker_address, count)
        stack.callback(swarm.stop)
        connect_s = wait_for(lambda: swarm.welcomed == count, f"the welcome of {count} workers")
        settle(count)
        found: dict[str, Any] = {"workers": count, "connect_s": round(connect_s, 1)}
        found |= steady(coordinator.process.pid, swarm, seconds)
        resident = memory_bytes(coordinator.process.pid, "VmRSS")
        found["kib_per_worker"] = round((resident - idle_bytes) / count / 1024, 1)
        probe = Probe(coordinator.worker_address)
        found["load_interval_s"] = probe.load_interval_s
        found["frame_round_trip"] = spread([probe.round_trip_s(number) for number in range(PROBES)])
        found["change_to_watcher"] = spread(time_watcher(coordinator.address, probe))
        found["silence"] = time_silence(coordinator.address, probe)
        probe.close()
        began = time.monotonic()
        times_s = run_commands(coordinator.address, CLIENTS, count, seconds)
        per_s = len(times_s) / (time.monotonic() - began)
        found["commands"] = {"clients": CLIENTS, "per_s": round(per_s, 1), **spread(times_s)}
        coordinator.kill()
        wait_for(lambda: swarm.welcomed < count // 2 + 1, "the end of the streams")
        began = time.monotonic()
        coordinator.start()
        wait_for(lambda: swarm.welcomed == count, "the return of all workers")
        found["storm"] = {
            "all_back_s": round(time.monotonic() - began, 1),
            "peak_mib": round(memory_bytes(coordinator.process.pid, "VmHWM") / 2**20, 1),
        }
        return found


def measure_idle(count: int, seconds: float, *, is_insecure: bool) -> dict[str, float]:
    """CPU time and memory of a coordinator with idle workers, over TLS or without."""
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder, ExitStack() as stack:
        coordinator = Coordinator(Path(folder), is_insecure=is_insecure)
        coordinator.start()
        stack.callback(lambda: coordinator.kill())
        time.sleep(1.0)
        idle_bytes = memory_bytes(coordinator.process.pid, "VmRSS")
        swarm = Swarm(coordinator.worker_address, count)
        stack.callback(swarm.stop)
        connect_s = wait_for(lambda: swarm.welcomed == count, f"the welcome of {count} workers")
        settle(count)
        found = {"connect_s": round(connect_s, 1), **steady(coordinator.process.pid, swarm, seconds)}
        resident = memory_bytes(coordinator.process.pid, "VmRSS")
        return found | {"kib_per_worker": round((resident - idle_bytes) / count / 1024, 1)}


def measure_others(python: str) -> list[dict[str, Any]]:
    """The cost of idle workers in the schedulers of Dask and Ray, run by another Python that has both."""
    found = []
    for name, count in OTHER_WORKERS.items():
        done = subprocess.run(
            [python, str(OTHER_SCHEDULERS), name, str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def main() -> None:
    """Measures, and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    # A coordinator knows 10,000 workers, and the probes of the benchmark are workers, too.
    parser.add_argument("--workers", type=int, nargs="+", default=[1_000, 5_000, 9_990])
    parser.add_argument("--clients", type=int, help="measure only commands, with this number of clients")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--others", metavar="PYTHON", help="measure Dask and Ray too, with a Python that has both"
    )
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = []
    for count in options.workers:
        if options.clients:
            sizes.append(measure_commands(count, options.clients, options.seconds))
            continue
        found = measure(count, options.seconds)
        sys.stderr.write(json.dumps(found) + "\n")
        found["idle_without_tls"] = measure_idle(count, options.seconds, is_insecure=True)
        found["echo"] = measure_echo(count, options.seconds)
        sizes.append(found)
    document = {"machine": machine("grpcio"), "gpus_per_worker": 8, "sizes": sizes}
    if options.others:
        document["others"] = measure_others(options.others)
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
