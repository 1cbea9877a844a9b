"""Measures the resident memory of a coordinator and of a real worker over many commands.

Some clients suspend a suspended workload of one real worker on a simulated host, which has no effect. Other
clients run something on light workers at the same time. The resident memory of both processes is read before
the first command and after every 5,000 commands. It must level off. Prints one JSON document.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    command_service_pb2_grpc,
    workload_pb2,
    workload_service_pb2,
    workload_service_pb2_grpc,
)

from bench.fleet.processes import Coordinator, Swarm, memory_bytes
from bench.machine import machine
from bench.real_worker import park, start_worker
from tests.channels import open_aio_channel, open_channel

LIGHT_WORKERS = 20
LIGHT_CLIENTS = 12
REAL_CLIENTS = 4
"""Clients of the real worker, each with a workload of its own."""

SAMPLE_COMMANDS = 5_000
COMMAND_TIMEOUT_S = 60.0


@dataclass
class Progress:
    """Counts ended commands, and reads the memory of both processes.

    Attributes:
        commands: Number of commands to create.
        deadline: When to create no more commands, by the monotonic clock.
        coordinator: The coordinator's pid.
        worker: The real worker's pid.
    """

    commands: int
    deadline: float
    coordinator: int
    worker: int
    asked: int = 0
    light: int = 0
    real: int = 0
    samples: list[dict[str, float]] = field(default_factory=list)

    def may_ask(self) -> bool:
        """Whether to create another command, which is counted."""
        if self.asked >= self.commands or time.monotonic() > self.deadline:
            return False
        self.asked += 1
        return True

    def sample(self) -> None:
        """Reads the resident memory of both processes."""
        self.samples.append(
            {
                "commands": self.light + self.real,
                "of_the_real_worker": self.real,
                "coordinator_mib": round(memory_bytes(self.coordinator, "VmRSS") / 2**20, 1),
                "worker_mib": round(memory_bytes(self.worker, "VmRSS") / 2**20, 1),
            }
        )

    def note(self, *, is_real: bool) -> None:
        """Counts a succeeded command."""
        self.real += is_real
        self.light += not is_real
        if (self.light + self.real) % SAMPLE_COMMANDS == 0:
            self.sample()


async def ask(address: str, client: int, progress: Progress) -> None:
    """Creates one command after the other: for a suspended workload, or for the light workers in turn."""
    is_real = client < REAL_CLIENTS
    spec = workload_pb2.WorkloadSpec(arguments=["true"])
    async with open_aio_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        workloads = workload_service_pb2_grpc.WorkloadServiceStub(channel)
        commands = command_service_pb2_grpc.CommandServiceStub(channel)
        number = client
        while progress.may_ask():
            number += LIGHT_CLIENTS
            if is_real:
                parked = workload_service_pb2.SuspendWorkloadRequest(workload=f"parked-{client}")
                command = (await workloads.SuspendWorkload(parked, timeout=COMMAND_TIMEOUT_S)).command
            else:
                run = workload_service_pb2.CreateWorkloadRequest(
                    spec=spec, worker=f"worker-{number % LIGHT_WORKERS:06d}"
                )
                command = (await workloads.CreateWorkload(run, timeout=COMMAND_TIMEOUT_S)).command
            watch = command_service_pb2.WatchCommandRequest(command_id=command.command_id)
            state = command.state
            async for response in commands.WatchCommand(watch, timeout=COMMAND_TIMEOUT_S):
                state = response.command.state
            if state == command_pb2.COMMAND_STATE_SUCCEEDED:
                progress.note(is_real=is_real)


async def ask_all(address: str, progress: Progress) -> None:
    """Runs all clients until there were enough commands, or the time is over."""
    async with asyncio.TaskGroup() as tasks:
        for client in range(REAL_CLIENTS + LIGHT_CLIENTS):
            tasks.create_task(ask(address, client, progress))


def measure(commands: int, seconds: float) -> dict[str, Any]:
    """Runs this number of commands, or as many as fit into the time."""
    import uvloop

    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        coordinator = stack.enter_context(Coordinator(folder))
        channel = stack.enter_context(open_channel(coordinator.address))
        worker = stack.enter_context(start_worker(folder, "--coordinator", coordinator.worker_address))
        stack.enter_context(park(worker, channel, REAL_CLIENTS))
        stack.enter_context(Swarm(coordinator.worker_address, LIGHT_WORKERS)).wait_connected()
        began = time.monotonic()
        progress = Progress(commands, began + seconds, coordinator.process.pid, worker.pid)
        progress.sample()
        uvloop.run(ask_all(coordinator.address, progress))
        progress.sample()
        taken_s = time.monotonic() - began
        return {
            "commands": progress.light + progress.real,
            "of_the_real_worker": progress.real,
            "that_did_not_succeed": progress.asked - progress.light - progress.real,
            "per_s": round((progress.light + progress.real) / taken_s, 1),
            "samples": progress.samples,
        }


def main() -> None:
    """Measures, and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=100_000)
    parser.add_argument(
        "--seconds", type=float, default=360.0, help="seconds after which no command is created"
    )
    options = parser.parse_args()
    document = {
        "benchmark": "memory",
        **measure(options.commands, options.seconds),
        "machine": machine("grpcio"),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
