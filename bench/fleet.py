"""Measures one real coordinator with thousands of light workers, and a bare echo server with the same load.

For each size: CPU time and memory of the coordinator, latency of frames, of changes to a watcher and of
commands, commands per second, the detection of a silent worker, and the return of all workers after a kill.
In the same run the same streams send the same loads to a bare grpc.aio server that echoes each message. With
``--others`` the schedulers of Dask and Ray are measured as well. Prints one JSON document.

``--workers 100 --clients 64`` measures commands alone: commands per second, their latency, the coordinator's
commits, and the CPU time of the coordinator, the clients and the light workers.
"""

import argparse
import asyncio
import json
import os
import platform
import queue
import re
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    command_service_pb2_grpc,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    worker_pb2,
    workload_pb2,
    workload_service_pb2,
    workload_service_pb2_grpc,
)
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest, ConnectResponse, WorkerLoad
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub

from bench.light_workers import ECHO, hello, leases

SWARM_SIZE = 2_500
"""Light workers of one process."""

START_TIMEOUT_S = 300.0
LOAD_INTERVAL_S = 5.0
LOADS_PER_S = 200
"""Most loads per second of the whole fleet. The load interval grows with the number of workers."""

LATEST_S = 5.0
"""How long to wait for outcomes after the last command was created."""

PROBES = 200
CLIENTS = 16
PROBE_NUMBER = 900_000
OTHER_WORKERS = {"dask": 1_000, "ray": 20}
"""As many as run side by side on two cores."""


def cpu_s(pid: int) -> float:
    """CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, field: str) -> int:
    """VmRSS or VmHWM of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def spread(times_s: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(times_s)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50_ms": round(1e3 * statistics.median(ordered), 2), "p99_ms": round(1e3 * last, 2)}


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Polls until the condition holds. Returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > START_TIMEOUT_S:
            raise SystemExit(f"{what} did not happen within {START_TIMEOUT_S:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


class Coordinator:
    """A coordinator process, which keeps its address and its store over restarts."""

    def __init__(self, folder: Path) -> None:
        self._database = folder / "store.sqlite3"
        self.address = "127.0.0.1:0"

    def start(self) -> None:
        """Starts it."""
        options = ["--listen", self.address, "--database", str(self._database), "--log-level", "error"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leasehold_client", "coordinator", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        listening = re.search(r"on (\S+)$", self.process.stdout.readline().strip())
        if listening is None:
            raise SystemExit("the coordinator did not start")
        self.address = listening[1]

    def commits(self) -> int:
        """Number of commits of its store."""
        with closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as reader:
            (number,) = reader.execute("SELECT number FROM commits").fetchone()
        return int(number)

    def kill(self) -> None:
        """Kills the process by SIGKILL, like a crash."""
        self.process.kill()
        self.process.wait()


class Swarm:
    """Light workers in processes of their own."""

    def __init__(self, address: str, count: int, *, echo_interval_s: float | None = None) -> None:
        self._welcomed: dict[int, int] = {}
        self._processes = []
        for first in range(0, count, SWARM_SIZE):
            arguments = [address, str(min(SWARM_SIZE, count - first)), str(first)]
            arguments += [] if echo_interval_s is None else ["--echo-interval", str(echo_interval_s)]
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("light_workers.py")), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(first, process), daemon=True).start()

    def _read(self, first: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._welcomed[first] = json.loads(line)["welcomed"]

    @property
    def welcomed(self) -> int:
        """Number of workers with a session."""
        return sum(self._welcomed.values())

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes."""
        return sum(cpu_s(process.pid) for process in self._processes)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


class Probe:
    """One worker in this process, whose frames are timed."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._up: queue.Queue[ConnectRequest | None] = queue.Queue()
        self._down: queue.Queue[ConnectResponse] = queue.Queue()
        self._sequence = 0
        self._up.put(hello(PROBE_NUMBER, 0))
        self._call = SessionServiceStub(self._channel).Connect(iter(self._up.get, None))
        threading.Thread(target=self._read, daemon=True).start()
        welcome = self._next("welcome").welcome
        self.session_id = welcome.session_id
        self.load_interval_s = welcome.load_interval.ToNanoseconds() / 1e9

    def _read(self) -> None:
        try:
            for frame in self._call:
                self._down.put(frame)
        except grpc.RpcError:
            pass

    def _next(self, kind: str) -> ConnectResponse:
        while True:
            frame = self._down.get(timeout=60)
            if frame.WhichOneof("frame") == kind:
                return frame

    def round_trip_s(self, number: int) -> float:
        """Seconds from the outcome of an unknown command to its acknowledgement."""
        began = time.perf_counter()
        update = CommandUpdate(command_id=f"probe-{number}", state=command_pb2.COMMAND_STATE_REJECTED)
        self._up.put(ConnectRequest(command_update=update))
        self._next("command_ack")
        return time.perf_counter() - began

    def tell_load(self, taken: int) -> None:
        """Sends a load with this number of leased GPUs."""
        self._sequence += 1
        load = WorkerLoad(
            session_id=self.session_id, sequence=self._sequence, gpu_leases=leases(PROBE_NUMBER, taken)
        )
        self._up.put(ConnectRequest(worker_load=load))

    def close(self) -> None:
        """Breaks the stream."""
        self._up.put(None)
        self._call.cancel()
        self._channel.close()


def time_watcher(address: str, probe: Probe) -> list[float]:
    """Latency of changes of a lease from the worker to a watcher."""
    times_s: list[float] = []
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        watch = fleet_service_pb2_grpc.FleetServiceStub(channel).WatchFleet(
            fleet_service_pb2.WatchFleetRequest()
        )
        changes = iter(watch)
        while not next(changes).bookmark.snapshot_end:
            pass
        uuid = leases(PROBE_NUMBER)[0].gpu_uuid
        for number in range(PROBES):
            began = time.perf_counter()
            probe.tell_load((number + 1) % 2)
            while next(changes).gpu.gpu.uuid != uuid:
                pass
            times_s.append(time.perf_counter() - began)
        watch.cancel()
    return times_s


def time_silence(address: str, probe: Probe) -> dict[str, float]:
    """Seconds after which a silent worker is STALE and LOST, with the limits of the rule."""
    stale_s, lost_s = 2.5 * probe.load_interval_s, max(4 * probe.load_interval_s, 20.0)
    probe.tell_load(0)
    began = time.monotonic()
    seen: dict[str, float] = {}
    with grpc.insecure_channel(address) as channel:
        stub = fleet_service_pb2_grpc.FleetServiceStub(channel)
        while "LOST" not in seen and time.monotonic() - began < 1.5 * lost_s + 30:
            worker = stub.GetWorker(
                fleet_service_pb2.GetWorkerRequest(worker=f"worker-{PROBE_NUMBER:06d}")
            ).worker
            state = worker_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
            seen.setdefault(state, round(time.monotonic() - began, 2))
            time.sleep(0.05)
    return {
        "stale_s": seen.get("STALE", -1.0),
        "stale_rule_s": stale_s,
        "lost_s": seen.get("LOST", -1.0),
        "lost_rule_s": lost_s,
    }


def time_commands(address: str, workers: int, seconds: float) -> dict[str, Any]:
    """Commands per second of several concurrent clients, and the latency from request to outcome."""
    times_s: list[float] = []
    spec = workload_pb2.WorkloadSpec(arguments=["true"])
    deadline = time.monotonic() + seconds

    def ask(client: int) -> None:
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            workloads = workload_service_pb2_grpc.WorkloadServiceStub(channel)
            commands = command_service_pb2_grpc.CommandServiceStub(channel)
            number = client
            while time.monotonic() < deadline:
                began = time.perf_counter()
                request = workload_service_pb2.CreateWorkloadRequest(
                    spec=spec, worker=f"worker-{number % workers:06d}"
                )
                command = workloads.CreateWorkload(request).command
                for response in commands.WatchCommand(
                    command_service_pb2.WatchCommandRequest(command_id=command.command_id)
                ):
                    state = response.command.state
                if state == command_pb2.COMMAND_STATE_SUCCEEDED:
                    times_s.append(time.perf_counter() - began)
                number += CLIENTS

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(CLIENTS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken_s = time.monotonic() - began
    return {"clients": CLIENTS, "per_s": round(len(times_s) / taken_s, 1), **spread(times_s)}


async def ask(address: str, client: int, clients: int, workers: int, deadline: float) -> list[float]:
    """Runs something on workers, one command after the other. Returns the times of accepted commands."""
    times_s: list[float] = []
    spec = workload_pb2.WorkloadSpec(arguments=["true"])
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
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


def measure_commands(workers: int, clients: int, seconds: float) -> dict[str, Any]:
    """Commands of concurrent clients, and their costs."""
    import uvloop

    async def ask_all() -> list[float]:
        deadline = time.monotonic() + seconds
        asked = [ask(coordinator.address, client, clients, workers, deadline) for client in range(clients)]
        return [taken_s for times_s in await asyncio.gather(*asked) for taken_s in times_s]

    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder, ExitStack() as stack:
        coordinator = Coordinator(Path(folder))
        coordinator.start()
        stack.callback(lambda: coordinator.kill())
        swarm = Swarm(coordinator.address, workers)
        stack.callback(swarm.stop)
        wait_for(lambda: swarm.welcomed == workers, f"the welcome of {workers} workers")
        pid = coordinator.process.pid
        before = coordinator.commits(), cpu_s(pid), swarm.cpu_s, time.process_time()
        began = time.monotonic()
        times_s = uvloop.run(ask_all())
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


def measure(count: int, seconds: float) -> dict[str, Any]:
    """All measurements of one size."""
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as folder, ExitStack() as stack:
        coordinator = Coordinator(Path(folder))
        coordinator.start()
        stack.callback(lambda: coordinator.kill())
        time.sleep(1.0)
        idle_bytes = memory_bytes(coordinator.process.pid, "VmRSS")
        swarm = Swarm(coordinator.address, count)
        stack.callback(swarm.stop)
        connect_s = wait_for(lambda: swarm.welcomed == count, f"the welcome of {count} workers")
        settle(count)
        found: dict[str, Any] = {"workers": count, "connect_s": round(connect_s, 1)}
        found |= steady(coordinator.process.pid, swarm, seconds)
        resident = memory_bytes(coordinator.process.pid, "VmRSS")
        found["kib_per_worker"] = round((resident - idle_bytes) / count / 1024, 1)
        probe = Probe(coordinator.address)
        found["load_interval_s"] = probe.load_interval_s
        found["frame_round_trip"] = spread([probe.round_trip_s(number) for number in range(PROBES)])
        found["change_to_watcher"] = spread(time_watcher(coordinator.address, probe))
        found["silence"] = time_silence(coordinator.address, probe)
        probe.close()
        found["commands"] = time_commands(coordinator.address, count, seconds)
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


def load_interval_s(count: int) -> float:
    """The load interval of a fleet of this size."""
    return max(LOAD_INTERVAL_S, count / LOADS_PER_S)


def settle(count: int) -> None:
    """Waits until most workers have received the load interval of their fleet."""
    time.sleep(max(2 * LOAD_INTERVAL_S, 1.5 * load_interval_s(count)))


def steady(pid: int, swarm: Swarm, seconds: float) -> dict[str, Any]:
    """CPU time while only loads arrive."""
    server, clients, began = cpu_s(pid), swarm.cpu_s, time.monotonic()
    time.sleep(seconds)
    taken_s = time.monotonic() - began
    return {
        "cpu_percent_of_a_core": round(100 * (cpu_s(pid) - server) / taken_s, 1),
        "light_workers_cpu_percent": round(100 * (swarm.cpu_s - clients) / taken_s, 1),
    }


async def echo() -> None:
    """A bare server that echoes every message. Prints its address."""

    async def give_back(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while isinstance(message := await context.read(), bytes):
            await context.write(message)

    server = grpc.aio.server(options=[("grpc.http2.bdp_probe", 0)])
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(give_back)
    service, name = ECHO.lstrip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


@contextmanager
def echo_server() -> Iterator[tuple[str, int]]:
    """The bare server as a process. Yields its address and pid."""
    command = [sys.executable, "-m", "bench.fleet", "--serve-echo"]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.send_signal(signal.SIGKILL)


def measure_echo(count: int, seconds: float) -> dict[str, Any]:
    """The same measurements of the bare server with this number of streams."""
    with echo_server() as (address, pid):
        time.sleep(0.5)
        idle_bytes = memory_bytes(pid, "VmRSS")
        swarm = Swarm(address, count, echo_interval_s=load_interval_s(count))
        try:
            wait_for(lambda: swarm.welcomed == count, "the streams of the echo")
            settle(count)
            found = steady(pid, swarm, seconds)
            found["kib_per_worker"] = round((memory_bytes(pid, "VmRSS") - idle_bytes) / count / 1024, 1)
            return found
        finally:
            swarm.stop()


def measure_others(python: str) -> list[dict[str, Any]]:
    """The cost of idle workers in the schedulers of Dask and Ray, run by another Python that has both."""
    script = str(Path(__file__).with_name("other_schedulers.py"))
    found = []
    for name, count in OTHER_WORKERS.items():
        done = subprocess.run(
            [python, script, name, str(count)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def main() -> None:
    """Measures, and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1_000, 5_000, 10_000])
    parser.add_argument("--clients", type=int, help="measure only commands, with this number of clients")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--others", metavar="PYTHON", help="measure Dask and Ray too, with a Python that has both"
    )
    parser.add_argument("--serve-echo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_echo:
        import uvloop

        uvloop.run(echo())
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = []
    for count in options.workers:
        if options.clients:
            sizes.append(measure_commands(count, options.clients, options.seconds))
            continue
        found = measure(count, options.seconds)
        sys.stderr.write(json.dumps(found) + "\n")
        found["echo"] = measure_echo(count, options.seconds)
        sizes.append(found)
    facts = {
        "cpu_count": os.cpu_count(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
    }
    document = {"machine": facts, "gpus_per_worker": 8, "sizes": sizes}
    if options.others:
        document["others"] = measure_others(options.others)
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
