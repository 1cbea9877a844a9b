"""A real worker on a simulated host, its suspended workloads, and commands for them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from leasehold.v1 import command_pb2
from leasehold.v1.command_service_pb2 import WatchCommandRequest
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.workload_service_pb2 import SuspendWorkloadRequest
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold_simgpu import SimulatedHost, Timing

from bench.fleet.processes import wait_for

LEASEHOLD: Final = (sys.executable, "-m", "leasehold_client")
COUNTER: Final = Path(__file__).resolve().parents[1] / "examples/counter.py"


class RealWorker(NamedTuple):
    """A worker's process.

    Attributes:
        pid: Its process id.
        socket: Its socket for programs of its host.
        variables: The environment of programs of its simulated host.
    """

    pid: int
    socket: Path
    variables: dict[str, str]


@contextmanager
def start_worker(folder: Path, *options: str, gpus: int = 1) -> Iterator[RealWorker]:
    """A worker on a simulated host whose driver takes no time. The files of both are in the folder."""
    host = SimulatedHost.create(folder / "host", gpus=gpus, chip="H100", timing=Timing.instant())
    variables = {**os.environ, **host.environment()}
    state = folder / "worker"
    socket = state / "worker.sock"
    arguments = [*LEASEHOLD, "worker", "--state-dir", str(state), "--log-level", "error", *options]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env=variables) as process:
        try:
            wait_for(socket.exists, "the start of the worker")
            yield RealWorker(process.pid, socket, variables)
        finally:
            process.terminate()


@contextmanager
def park(worker: RealWorker, channel: grpc.Channel, count: int) -> Iterator[None]:
    """Suspended workloads of a worker, named ``parked-0`` and so on.

    The user of the worker's host starts them. For a coordinator without TLS and for an enrolled user, a
    worker without ``run_as`` starts none.
    """
    with ExitStack() as stack:
        for number in range(count):
            name = f"parked-{number}"
            options = ["--socket", str(worker.socket), "--name", name]
            program = subprocess.Popen(
                [*LEASEHOLD, "exec", *options, "--", sys.executable, str(COUNTER), "--bytes", "1MiB"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=worker.variables,
            )
            stack.enter_context(program)
            stack.callback(program.kill)
            wait_for(partial(_is_suspended, channel, number), f"the suspend of {name}")
        yield


def suspend(channel: grpc.Channel, number: int) -> bool:
    """Suspends a workload, waits for the outcome as a client does, and returns whether it is success."""
    request = SuspendWorkloadRequest(workload=f"parked-{number}")
    command = WorkloadServiceStub(channel).SuspendWorkload(request).command
    state = command.state
    watch = WatchCommandRequest(command_id=command.command_id)
    for response in CommandServiceStub(channel).WatchCommand(watch):
        state = response.command.state
    return state == command_pb2.COMMAND_STATE_SUCCEEDED


def _is_suspended(channel: grpc.Channel, number: int) -> bool:
    """Whether a suspend succeeds. It fails until the workload has started."""
    try:
        return suspend(channel, number)
    except grpc.RpcError:
        return False
