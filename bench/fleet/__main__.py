"""Measures one real coordinator with thousands of light workers, and a bare echo server with the same load.

For each size: CPU time and memory of the coordinator, latency of frames, of changes to a watcher and of
commands, commands per second, the detection of a silent worker, and the return of all workers after a kill.
All of it is over TLS, and the workers send a token. In the same run idle workers connect without TLS and over
mutual TLS, and the same streams send the same loads to a bare grpc.aio server that echoes each message. With
``--others`` the schedulers of Dask and Ray are measured as well. Prints one JSON document, and the figures of
each part on standard error as soon as it ends.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.fleet.certificates import enrol_workers
from bench.fleet.commands import measure_commands, run_commands
from bench.fleet.echo import measure_echo
from bench.fleet.processes import (
    ANY,
    LOOPBACK,
    Coordinator,
    Swarm,
    memory_bytes,
    settle,
    spread,
    steady,
    wait_for,
)
from bench.fleet.sessions import PROBES, Probe, time_silence, time_watcher
from bench.machine import machine

CLIENTS = 16
OTHER_SCHEDULERS = Path(__file__).parents[1] / "other_schedulers.py"
OTHER_WORKERS = {"dask": 1_000, "ray": 20}
"""As many as run side by side on two cores."""


@contextmanager
def idle_fleet(
    count: int, seconds: float, *options: str, is_mutual: bool = False
) -> Iterator[tuple[Coordinator, Swarm, dict[str, float]]]:
    """A coordinator and its connected light workers, with the costs while they were idle.

    Args:
        count: Number of workers.
        seconds: How long the CPU time is measured.
        options: Further options of the coordinator.
        is_mutual: Each worker has a certificate, as off loopback. Otherwise it sends the token of workers.
    """
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder, ExitStack() as stack:
        credentials = ["--credentials", str(enrol_workers(Path(folder), count))] if is_mutual else []
        host = ANY if is_mutual else LOOPBACK
        coordinator = stack.enter_context(Coordinator(Path(folder), *options, worker_host=host))
        time.sleep(1.0)
        idle_bytes = memory_bytes(coordinator.process.pid, "VmRSS")
        swarm = stack.enter_context(Swarm(coordinator.worker_address, count, *credentials))
        found = {"connect_s": round(swarm.wait_connected(), 1)}
        settle(count)
        found |= steady(coordinator.process.pid, swarm, seconds)
        resident = memory_bytes(coordinator.process.pid, "VmRSS")
        found["kib_per_worker"] = round((resident - idle_bytes) / count / 1024, 1)
        facts = {"idle_workers": count, "options": options, "is_mutual": is_mutual}
        sys.stderr.write(json.dumps(facts | found) + "\n")
        yield coordinator, swarm, found


def measure(count: int, seconds: float) -> dict[str, Any]:
    """All measurements of one size."""
    found: dict[str, Any] = {"workers": count}
    with idle_fleet(count, seconds, "--insecure") as (_, _, found["idle_without_tls"]):
        pass
    with idle_fleet(count, seconds, is_mutual=True) as (_, _, found["idle_over_mutual_tls"]):
        pass
    with idle_fleet(count, seconds) as (coordinator, swarm, found["idle_over_tls"]):
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
        swarm.wait_connected()
        found["storm"] = {
            "all_back_s": round(time.monotonic() - began, 1),
            "peak_mib": round(memory_bytes(coordinator.process.pid, "VmHWM") / 2**20, 1),
        }
    return found | {"echo": measure_echo(count, seconds)}


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
        sizes.append(measure(count, options.seconds))
        sys.stderr.write(json.dumps(sizes[-1]) + "\n")
    document = {"machine": machine("grpcio"), "gpus_per_worker": 8, "sizes": sizes}
    if options.others:
        document["others"] = measure_others(options.others)
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
