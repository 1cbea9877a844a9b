"""Times a command from client to worker and back, and the transport alone.

Everything runs as processes on this machine: a coordinator with its store, a worker on a simulated host
whose driver takes no time, and the client. Each round suspends a suspended workload. This command has no
effect, but is stored, dispatched and carried out, and its outcome is stored and watched. Rounds alternate
with two raw gRPC hops (client to relay to echo and back) on the same machine. Then several clients do the
same concurrently, each with a workload of its own. The commit numbers of store and journal give the commits
of both sides. Prints one JSON document.
"""

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    command_service_pb2_grpc,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    workload_pb2,
    workload_service_pb2,
    workload_service_pb2_grpc,
)
from leasehold_simgpu import SimulatedHost, Timing

from bench.machine import machine
from tests.channels import LISTENING, open_channel

COUNTER = Path(__file__).resolve().parents[1] / "examples/counter.py"
START_TIMEOUT_S = 30.0
LOAD_CLIENTS = 8
"""Concurrent clients: as many as a worker has commands."""

WARM_UP_ROUNDS = 20


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A ``leasehold`` process, which ends with the context."""
    with subprocess.Popen(
        [sys.executable, "-m", "leasehold_client", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    ) as started:
        try:
            yield started
        finally:
            started.terminate()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Polls until the condition holds."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not happen within {START_TIMEOUT_S:g} s")
        time.sleep(0.02)


@contextmanager
def fleet(folder: Path, parked: int = 1) -> Iterator[grpc.Channel]:
    """A coordinator and one worker with suspended workloads, named ``parked-0`` and so on."""
    host = SimulatedHost.create(folder / "host", gpus=1, chip="H100", timing=Timing.instant())
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            process(
                *("coordinator", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
                *("--database", str(folder / "store.sqlite3")),
            )
        )
        assert coordinator.stdout is not None
        listening = LISTENING.search(coordinator.stdout.readline())
        if listening is None:
            raise SystemExit("the coordinator did not start")
        address, worker_address = listening.groups()
        worker_options = ["--coordinator", worker_address, "--state-dir", str(folder / "worker")]
        worker_options += ["--stop-workloads", "stop"]  # by default, workloads outlive their worker
        stack.enter_context(process("worker", *worker_options, **host.environment()))
        channel = stack.enter_context(open_channel(address))
        workloads = workload_service_pb2_grpc.WorkloadServiceStub(channel)
        workers = fleet_service_pb2_grpc.FleetServiceStub(channel)
        wait_for(
            lambda: bool(workers.ListGpus(fleet_service_pb2.ListGpusRequest()).gpus), "the worker's hello"
        )
        spec = workload_pb2.WorkloadSpec(
            arguments=[sys.executable, str(COUNTER), "--bytes", "1MiB"],
            resources=workload_pb2.Resources(gpu_count=1),
        )
        for number in range(parked):
            workloads.CreateWorkload(
                workload_service_pb2.CreateWorkloadRequest(name=f"parked-{number}", spec=spec)
            )
            while suspend(channel, number) != command_pb2.COMMAND_STATE_SUCCEEDED:
                time.sleep(0.02)
        yield channel


def suspend(channel: grpc.Channel, number: int = 0) -> int:
    """Suspends a workload, and waits for the outcome as a client does."""
    workloads = workload_service_pb2_grpc.WorkloadServiceStub(channel)
    try:
        request = workload_service_pb2.SuspendWorkloadRequest(workload=f"parked-{number}")
        command = workloads.SuspendWorkload(request).command
    except grpc.RpcError:
        return command_pb2.COMMAND_STATE_UNSPECIFIED
    watch = command_service_pb2.WatchCommandRequest(command_id=command.command_id)
    state = command.state
    for response in command_service_pb2_grpc.CommandServiceStub(channel).WatchCommand(watch):
        state = response.command.state
    return state


def commits(folder: Path) -> dict[str, int]:
    """The commit numbers of store and journal. Older releases have none."""
    found = {}
    for side, name in (("coordinator", "store.sqlite3"), ("worker", "worker/journal.sqlite3")):
        with (
            closing(sqlite3.connect(f"{(folder / name).as_uri()}?mode=ro", uri=True)) as reader,
            suppress(sqlite3.OperationalError),
        ):
            (found[side],) = reader.execute("SELECT number FROM commits").fetchone()
    return found


@contextmanager
def commits_counted(folder: Path, rounds: int) -> Iterator[dict[str, float]]:
    """Fills in the commits of each side per round after all rounds."""
    found: dict[str, float] = {}
    before = commits(folder)
    yield found
    found |= {side: round((number - before[side]) / rounds, 2) for side, number in commits(folder).items()}
    if len(found) > 1:
        found["both"] = round(sum(found.values()), 2)


def serve(handler: Callable[[bytes, grpc.ServicerContext], bytes]) -> tuple[grpc.Server, str]:
    """A server with one raw unary method."""
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(handler)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", {"Hop": method}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    return server, address


def run_hop(downstream: str | None) -> None:
    """Serves one hop in a process of its own: an echo, or a relay to another hop. Prints its address."""
    if downstream is None:
        server, address = serve(lambda request, _: request)
    else:
        onwards: grpc.UnaryUnaryMultiCallable[bytes, bytes] = grpc.insecure_channel(downstream).unary_unary(
            "/raw/Hop"
        )
        server, address = serve(lambda request, _: onwards(request))
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    server.wait_for_termination()


@contextmanager
def hop(downstream: str | None = None) -> Iterator[str]:
    """The address of a hop in its own process."""
    arguments = [sys.executable, "-m", "bench.command_latency", "--hop", downstream or "echo"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started.stdout.readline().strip()
        finally:
            started.terminate()


def timed_ms(action: Callable[[], object]) -> float:
    """Seconds that the action takes."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def percentiles(samples_ms: list[float]) -> dict[str, float]:
    """The reported figures."""
    cuts = statistics.quantiles(samples_ms, n=100)
    return {"p50_ms": round(cuts[49], 3), "p99_ms": round(cuts[98], 3)}


def tail(samples_ms: list[float]) -> float:
    """The ratio of the 99th percentile to the median."""
    cuts = statistics.quantiles(samples_ms, n=100)
    return round(cuts[98] / cuts[49], 2)


def measure(rounds: int) -> dict[str, object]:
    """Times commands and raw hops in turn."""
    command_ms: list[float] = []
    hops_ms: list[float] = []
    loaded_ms: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        channel = stack.enter_context(fleet(Path(folder), LOAD_CLIENTS))
        relay = stack.enter_context(hop(stack.enter_context(hop())))
        raw_channel = stack.enter_context(grpc.insecure_channel(relay))
        raw: grpc.UnaryUnaryMultiCallable[bytes, bytes] = raw_channel.unary_unary("/raw/Hop")
        for _ in range(WARM_UP_ROUNDS):
            suspend(channel)
            raw(b"x" * 1024)
        with commits_counted(Path(folder), rounds) as alone:
            for _ in range(rounds):
                command_ms.append(timed_ms(lambda: suspend(channel)))
                hops_ms.append(timed_ms(lambda: raw(b"x" * 1024)))

        def load(client: int) -> None:
            for _ in range(rounds // LOAD_CLIENTS):
                loaded_ms.append(timed_ms(lambda: suspend(channel, client)))

        began = time.monotonic()
        with (
            commits_counted(Path(folder), rounds // LOAD_CLIENTS * LOAD_CLIENTS) as loaded,
            futures.ThreadPoolExecutor(LOAD_CLIENTS) as clients,
        ):
            list(clients.map(load, range(LOAD_CLIENTS)))
        loaded_s = time.monotonic() - began
    ratio = statistics.median(command_ms) / statistics.median(hops_ms)
    return {
        "benchmark": "command_latency",
        "rounds": rounds,
        "command": percentiles(command_ms),
        "p99_by_p50": tail(command_ms),
        "commits_per_command": alone,
        "under_load": {
            "clients": LOAD_CLIENTS,
            "command": percentiles(loaded_ms),
            "p99_by_p50": tail(loaded_ms),
            "commands_per_s": round(len(loaded_ms) / loaded_s, 1),
            "commits_per_command": loaded,
        },
        "two_raw_grpc_hops": percentiles(hops_ms),
        "median_ratio": round(ratio, 2),
        "machine": machine("grpcio"),
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="commands to time")
    parser.add_argument("--hop", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hop is not None:
        run_hop(None if options.hop == "echo" else options.hop)
    else:
        sys.stdout.write(json.dumps(measure(options.rounds), indent=2) + "\n")


if __name__ == "__main__":
    main()
