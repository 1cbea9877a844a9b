"""Times commands and reads over each transport: TLS with a token, no TLS with a token, and the client socket.

Two coordinators run side by side, one of them with --insecure, each with light workers that connect as their
coordinator permits. Periods alternate, so both have the same machine. Prints a JSON document with the ratios.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from leasehold.v1.fleet_service_pb2 import GetWorkerRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub

from bench.fleet.commands import run_commands
from bench.fleet.processes import Coordinator, Swarm, spread, wait_for
from bench.machine import machine
from tests.channels import open_channel

WORKERS: Final = 4
WARM_UP_S: Final = 1.0


@contextmanager
def fleet(folder: Path, *, is_insecure: bool) -> Iterator[Coordinator]:
    """A coordinator with light workers."""
    folder.mkdir()
    coordinator = Coordinator(folder, is_insecure=is_insecure)
    coordinator.start()
    try:
        swarm = Swarm(coordinator.worker_address, WORKERS)
        try:
            wait_for(lambda: swarm.welcomed == WORKERS, f"the welcome of {WORKERS} workers")
            yield coordinator
        finally:
            swarm.stop()
    finally:
        coordinator.kill()


def read_times(channel: grpc.Channel, count: int) -> list[float]:
    """Seconds of each of a number of reads."""
    stub, times_s = FleetServiceStub(channel), []
    for _ in range(count):
        began = time.perf_counter()
        stub.GetWorker(GetWorkerRequest(worker="worker-000000"))
        times_s.append(time.perf_counter() - began)
    return times_s


def measure(seconds: float, rounds: int, reads: int) -> dict[str, Any]:
    """Commands and reads over all transports in turn."""
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        fleets = {
            kind: stack.enter_context(fleet(folder / kind, is_insecure=kind == "no_tls"))
            for kind in ("tls", "no_tls")
        }
        channels = {
            kind: stack.enter_context(open_channel(one.address, [("grpc.use_local_subchannel_pool", 1)]))
            for kind, one in fleets.items()
        }
        channels["socket"] = stack.enter_context(grpc.insecure_channel(f"unix:{folder}/tls/store.sock"))
        commands: dict[str, list[float]] = {kind: [] for kind in fleets}
        found: dict[str, list[float]] = {kind: [] for kind in channels}
        for number in range(rounds + 1):
            for kind, one in fleets.items():
                times_s = run_commands(one.address, 1, WORKERS, seconds if number else WARM_UP_S)
                commands[kind] += times_s if number else []
            for kind, channel in channels.items():
                times_s = read_times(channel, reads)
                found[kind] += times_s if number else []
    document: dict[str, Any] = {
        "commands": {kind: {"count": len(one), **spread(one)} for kind, one in commands.items()},
        "reads": {kind: {"count": len(one), **spread(one)} for kind, one in found.items()},
    }
    for measured in document.values():
        ratio = measured["tls"]["p50_ms"] / measured["no_tls"]["p50_ms"]
        measured["tls_by_no_tls_p50"] = round(ratio, 2)
    return document


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one period of commands")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reads", type=int, default=500, help="reads of one round and transport")
    options = parser.parse_args()
    document = {"benchmark": "transports", "machine": machine("grpcio")}
    document |= measure(options.seconds, options.rounds, options.reads)
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
