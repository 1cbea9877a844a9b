"""How long a command takes from client to worker and back, beside the transport alone.

Everything runs as processes on this machine: a coordinator with its store, a worker on a simulated host
whose driver takes no time, and the client. Each round suspends a parked workload, which is a command with
nothing to do: stored, dispatched, carried out, its outcome stored and watched. In turn with each round, two
raw gRPC hops (client to relay to echo and back) are timed on the same machine. Prints one JSON document.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
from leasehold.v1 import command_pb2, fleet_pb2, fleet_pb2_grpc, workload_pb2
from leasehold_simgpu import SimulatedHost, Timing

COUNTER = Path(__file__).resolve().parents[1] / "examples/counter.py"
START_TIMEOUT_S = 30.0


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A ``leasehold`` process, ended on the way out."""
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
def fleet(folder: Path) -> Iterator[grpc.Channel]:
    """A coordinator and one worker with a parked workload named ``parked``."""
    host = SimulatedHost.create(folder / "host", gpus=1, chip="H100", timing=Timing.instant())
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            process("coordinator", "--listen", "127.0.0.1:0", "--database", str(folder / "store.sqlite3"))
        )
        assert coordinator.stdout is not None
        listening = re.search(r"on (\S+)$", coordinator.stdout.readline().strip())
        if listening is None:
            raise SystemExit("the coordinator did not start")
        address = listening.group(1)
        worker_options = ["--coordinator", address, "--state-dir", str(folder / "worker")]
        worker_options += ["--stop-workloads", "stop"]  # by default they outlive their worker
        stack.enter_context(process("worker", *worker_options, **host.environment()))
        channel = stack.enter_context(grpc.insecure_channel(address))
        workloads = fleet_pb2_grpc.WorkloadServiceStub(channel)
        workers = fleet_pb2_grpc.FleetServiceStub(channel)
        wait_for(lambda: bool(workers.ListGpus(fleet_pb2.ListGpusRequest()).gpus), "the worker's hello")
        spec = workload_pb2.WorkloadSpec(
            arguments=[sys.executable, str(COUNTER), "--bytes", "1MiB"],
            resources=workload_pb2.Resources(gpu_count=1),
        )
        workloads.CreateWorkload(fleet_pb2.CreateWorkloadRequest(name="parked", spec=spec))
        wait_for(lambda: suspend(channel) == command_pb2.COMMAND_STATE_SUCCEEDED, "the first suspend")
        yield channel


def suspend(channel: grpc.Channel) -> int:
    """Suspends the workload, and waits for the outcome as a client does."""
    workloads = fleet_pb2_grpc.WorkloadServiceStub(channel)
    try:
        request = fleet_pb2.SuspendWorkloadRequest(workload="parked")
        command = workloads.SuspendWorkload(request).command
    except grpc.RpcError:
        return command_pb2.COMMAND_STATE_UNSPECIFIED
    watch = fleet_pb2.WatchCommandRequest(command_id=command.command_id)
    state = command.state
    for response in fleet_pb2_grpc.CommandServiceStub(channel).WatchCommand(watch):
        state = response.command.state
    return state


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
    arguments = [sys.executable, __file__, "--hop", downstream or "echo"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started.stdout.readline().strip()
        finally:
            started.terminate()


def timed_ms(action: Callable[[], object]) -> float:
    """How long the action takes."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def percentiles(samples_ms: list[float]) -> dict[str, float]:
    """The figures that are reported."""
    cuts = statistics.quantiles(samples_ms, n=100)
    return {"p50_ms": round(cuts[49], 3), "p99_ms": round(cuts[98], 3)}


def measure(rounds: int) -> dict[str, object]:
    """Times commands and raw hops in turn."""
    command_ms: list[float] = []
    hops_ms: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        channel = stack.enter_context(fleet(Path(folder)))
        relay = stack.enter_context(hop(stack.enter_context(hop())))
        raw_channel = stack.enter_context(grpc.insecure_channel(relay))
        raw: grpc.UnaryUnaryMultiCallable[bytes, bytes] = raw_channel.unary_unary("/raw/Hop")
        for _ in range(20):
            suspend(channel)
            raw(b"x" * 1024)
        for _ in range(rounds):
            command_ms.append(timed_ms(lambda: suspend(channel)))
            hops_ms.append(timed_ms(lambda: raw(b"x" * 1024)))
    ratio = statistics.median(command_ms) / statistics.median(hops_ms)
    return {
        "benchmark": "command_latency",
        "rounds": rounds,
        "command": percentiles(command_ms),
        "two_raw_grpc_hops": percentiles(hops_ms),
        "median_ratio": round(ratio, 2),
        "machine": {
            "cpu_count": os.cpu_count(),
            "architecture": platform.machine(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "grpcio": grpc.__version__,
        },
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
