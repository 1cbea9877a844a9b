"""Times one client's commands while another client or a worker attacks the coordinator.

In turn: a quiet period, a flood of calls that the coordinator refuses, 200 watches whose client reads nothing
while the fleet changes, and a worker that sends frames without a pause. The attacking client is an enrolled
viewer. Each attacker is a process of its own on this machine, which takes processor time too. The other
client uses the socket. Prints one JSON document with the 99th percentiles, and their ratios to the quiet
periods.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_pb2 import (
    WORKLOAD_ORIGIN_EXEC,
    WORKLOAD_STATE_EXITED,
    Workload,
    WorkloadStatus,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, ConnectResponse, WorkerLoad, WorkloadEvent
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub
from leasehold_client.config import CREDENTIALS_VARIABLE, credentials_directory, state_directory
from leasehold_coordinator.storage.rows import binding_row

from bench.fleet.commands import run_commands
from bench.fleet.processes import ANY, Coordinator, Swarm, cpu_s, spread
from bench.light_workers import GPUS, Call, hello, leases
from bench.machine import machine
from tests.certificates import enrol, write_rows
from tests.channels import open_aio_worker_channel

WORKERS: Final = 4
FLOOD_CONNECTIONS: Final = 8
SLOW_READERS: Final = 200
READERS_OF_A_CONNECTION: Final = 50
HOSTILE: Final = WORKERS
"""Number of the hostile worker, after those of the others."""
PAUSE_S: Final = 0.5
"""Least time between two sessions of the hostile worker."""
SETTLE_S: Final = 1.0
"""Time for an attack to begin."""

DEAF: Final = [
    ("grpc.http2.lookahead_bytes", 5),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of a client that takes hardly anything which it does not read."""


def _channel(address: str) -> grpc.aio.Channel:
    """A channel of the attacker, whose certificate is in the directory of the credentials."""
    files = (credentials_directory() / name for name in ("ca.pem", "client.key", "client.pem"))
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    return grpc.aio.secure_channel(address, credentials, options=DEAF)


async def flood(address: str) -> None:
    """Makes calls that are refused, one after the other on each connection. Never returns."""

    async def ask(channel: grpc.aio.Channel) -> None:
        stub = FleetServiceStub(channel)
        while True:
            with suppress(grpc.aio.AioRpcError):
                await stub.ListWorkers(ListWorkersRequest(filter="no filter"), timeout=20)

    channels = [_channel(address) for _ in range(FLOOD_CONNECTIONS)]
    await asyncio.gather(*(ask(channel) for channel in channels))


async def read_nothing(address: str) -> None:
    """Opens watches and reads nothing. Never returns."""
    channels = [_channel(address) for _ in range(SLOW_READERS // READERS_OF_A_CONNECTION)]
    watches = [
        FleetServiceStub(channel).WatchFleet(WatchFleetRequest())
        for channel in channels
        for _ in range(READERS_OF_A_CONNECTION)
    ]
    await asyncio.gather(*(watch.code() for watch in watches))


async def send_frames(address: str) -> None:
    """Sends loads and new workloads as a worker, as fast as the coordinator reads them. Never returns."""
    numbers = itertools.count()
    async with open_aio_worker_channel(address) as channel:
        while True:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                call: Call = SessionServiceStub(channel).Connect()
                await call.write(hello(HOSTILE, 0))
                welcome = await call.read()
                if isinstance(welcome, ConnectResponse):
                    session_id = welcome.welcome.session_id
                    await asyncio.gather(_ignore(call), _send(call, session_id, numbers))
            await asyncio.sleep(PAUSE_S)


async def _send(call: Call, session_id: str, numbers: Iterator[int]) -> None:
    status = WorkloadStatus(state=WORKLOAD_STATE_EXITED, generation=1)
    for number in numbers:
        taken = leases(HOSTILE, number % GPUS)
        load = WorkerLoad(session_id=session_id, sequence=number + 1, gpu_leases=taken)
        await call.write(ConnectRequest(worker_load=load))
        workload_id = f"hostile-{os.getpid()}-{number}"
        workload = Workload(workload_id=workload_id, origin=WORKLOAD_ORIGIN_EXEC, status=status)
        await call.write(ConnectRequest(workload_event=WorkloadEvent(workload=workload)))


async def _ignore(call: Call) -> None:
    """Reads what the coordinator sends, until the session ends."""
    while isinstance(await call.read(), ConnectResponse):
        pass
    await call.code()
    raise asyncio.InvalidStateError


ATTACKS: Final = {"refused_calls": flood, "slow_readers": read_nothing, "worker_frames": send_frames}

OF_WORKERS: Final = frozenset({"worker_frames"})
"""Attacks at the port for workers."""


@contextmanager
def attack(name: str, coordinator: Coordinator, credentials: Path) -> Iterator[int]:
    """An attacker in a process of its own. Yields the process's id."""
    is_worker = name in OF_WORKERS
    address = coordinator.worker_address if is_worker else coordinator.address
    arguments = [sys.executable, "-m", "bench.attack_latency", "--attack", name, "--address", address]
    variables = dict(os.environ) if is_worker else {**os.environ, CREDENTIALS_VARIABLE: str(credentials)}
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL, env=variables) as process:
        try:
            time.sleep(SETTLE_S)
            yield process.pid
        finally:
            process.kill()


def _enrol(database: Path, credentials: Path) -> None:
    """Writes the certificate of a viewer, before the coordinator starts."""
    (attacker,) = enrol(database, state_directory(), "user/attacker")
    binding = RoleBinding(identity="user/attacker", role=access_service_pb2.ROLE_VIEWER)
    write_rows(database, binding_row(binding))
    attacker.write(credentials, "client")


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """Quiet periods and attacks in turn."""
    times_s: dict[str, list[float]] = {name: [] for name in ("quiet", *ATTACKS)}
    share: dict[str, list[float]] = {name: [] for name in times_s}
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder, ExitStack() as stack:
        credentials = Path(folder) / "credentials"
        _enrol(Path(folder) / "store.sqlite3", credentials)
        coordinator = stack.enter_context(Coordinator(Path(folder), host=ANY))
        socket = f"unix:{folder}/store.sock"
        stack.enter_context(Swarm(coordinator.worker_address, WORKERS)).wait_connected()
        run_commands(socket, 1, WORKERS, 1.0)  # warms up
        for _ in range(rounds):
            for name in times_s:
                with attack(name, coordinator, credentials) if name in ATTACKS else nullcontext():
                    before, began = cpu_s(coordinator.process.pid), time.monotonic()
                    times_s[name] += run_commands(socket, 1, WORKERS, seconds)
                    used = cpu_s(coordinator.process.pid) - before
                    share[name].append(used / (time.monotonic() - began))
    quiet = spread(times_s["quiet"])
    return {
        name: {
            "commands": len(times_s[name]),
            **(found := spread(times_s[name])),
            "p99_by_quiet_p99": round(found["p99_ms"] / quiet["p99_ms"], 2),
            "coordinator_cpu_percent_of_a_core": round(100 * statistics.mean(share[name]), 1),
        }
        for name in times_s
    }


def main() -> None:
    """Measures and prints the document, or attacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one period")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attack", choices=[*ATTACKS], help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        uvloop.run(ATTACKS[options.attack](options.address))
        return
    document = {"benchmark": "attack_latency", "machine": machine("grpcio")}
    document |= measure(options.seconds, options.rounds)
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
