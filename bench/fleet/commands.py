"""Commands of concurrent clients, from the request to the outcome."""

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import uvloop
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    command_service_pb2_grpc,
    workload_pb2,
    workload_service_pb2,
    workload_service_pb2_grpc,
)

from bench.fleet.processes import Coordinator, Swarm, cpu_s, spread
from tests.channels import open_aio_channel

LATEST_S = 5.0
"""How long to wait for outcomes after the last command was created."""


async def ask(address: str, client: int, clients: int, workers: int, deadline: float) -> list[float]:
    """Runs something on workers, one command after the other. Returns the times of accepted commands."""
    times_s: list[float] = []
    spec = workload_pb2.WorkloadSpec(arguments=["true"])
    async with open_aio_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        workloads = workload_service_pb2_grpc.WorkloadServiceStub(channel)
        commands = command_service_pb2_grpc.CommandServiceStub(channel)
        number = client
        while time.monotonic() < deadline:
            began = time.perf_counter()
            request = workload_service_pb2.CreateWorkloadRequest(
                spec=spec, worker=f"worker-{number % workers:06d}"
            )
            number += clients
            state = command_pb2.COMMAND_STATE_UNSPECIFIED
            left_s = deadline + LATEST_S - time.monotonic()
            try:
                command = (await workloads.CreateWorkload(request, timeout=left_s)).command
                watch = command_service_pb2.WatchCommandRequest(command_id=command.command_id)
                async for response in commands.WatchCommand(watch, timeout=left_s):
                    state = response.command.state
            except grpc.aio.AioRpcError:  # an overloaded coordinator may count workers as silent
                await asyncio.sleep(0.1)
            if state == command_pb2.COMMAND_STATE_SUCCEEDED:
                times_s.append(time.perf_counter() - began)
    return times_s


def run_commands(address: str, clients: int, workers: int, seconds: float) -> list[float]:
    """The times of the commands that all clients had accepted."""

    async def ask_all() -> list[float]:
        deadline = time.monotonic() + seconds
        asked = [ask(address, client, clients, workers, deadline) for client in range(clients)]
        return [taken_s for times_s in await asyncio.gather(*asked) for taken_s in times_s]

    return uvloop.run(ask_all())


def measure_commands(workers: int, clients: int, seconds: float) -> dict[str, Any]:
    """Commands of concurrent clients, and their costs."""
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder, ExitStack() as stack:
        coordinator = stack.enter_context(Coordinator(Path(folder)))
        swarm = stack.enter_context(Swarm(coordinator.worker_address, workers))
        swarm.wait_connected()
        pid = coordinator.process.pid
        before = coordinator.commits(), cpu_s(pid), swarm.cpu_s, time.process_time()
        began = time.monotonic()
        times_s = run_commands(coordinator.address, clients, workers, seconds)
        per_s = len(times_s) / (time.monotonic() - began)
        after = coordinator.commits(), cpu_s(pid), swarm.cpu_s, time.process_time()
        commits, *used_s = ((now - then) / len(times_s) for now, then in zip(after, before, strict=True))
        return {
            "workers": workers,
            "clients": clients,
            "commands": len(times_s),
            "per_s": round(per_s, 1),
            **spread(times_s),
            "coordinator_commits_per_command": round(commits, 2),
            "cpu_ms_per_command": dict(
                zip(
                    ("coordinator", "light_workers", "clients"),
                    (round(1e3 * one, 3) for one in used_s),
                    strict=True,
                )
            ),
        }
