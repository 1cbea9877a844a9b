"""Clients that ask for commands while everything breaks, and remember what they were told."""

import contextlib
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from leasehold.v1 import command_pb2, fleet_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec

from .fleet import GPUS, TIMEOUT_S, ChaosFleet
from .judge import ENDED, GONE, RUNNING, SUSPENDED, Asked, Seen

COUNTER: Final = Path(__file__).resolve().parents[2] / "examples/counter.py"
RPC_TIMEOUT_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 30
RETRY_S: Final = 0.05
REFUSED_S: Final = 0.1
REFUSED_LIMIT: Final = 300
"""Requests of one client that may be refused, mostly because its worker is away, before it gives up."""

PASSING: Final = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}
"""Nobody has answered: the same request is made again, under the same id."""


class Refused(Exception):
    """The coordinator has refused a request, with this reason."""


@dataclass
class Life:
    """A workload of one client."""

    name: str
    workload_id: str = ""
    asked: list[Asked] = field(default_factory=list)


@final
class Client(threading.Thread):
    """Runs workloads on one worker, moves them about and stops them, one command after the other.

    Args:
        fleet: The fleet.
        worker: Where.
        number: Of the client; clients of one worker have different ones.
        commands: How many to ask for; it goes on until it is told that the trouble is over.
        seed: Of its choices.
    """

    def __init__(self, fleet: ChaosFleet, worker: str, number: int, commands: int, seed: int) -> None:
        super().__init__(name=f"{worker}-{number}")
        self._fleet = fleet
        self._worker = worker
        self._left = commands
        self._random = random.Random(f"{seed}-{worker}-{number}")
        self.lives: list[Life] = []
        self.refused = 0
        self.trouble_is_over = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            while self._left > 0 or not self.trouble_is_over.is_set():
                self._step()
        except BaseException as error:  # told by whoever waits for the thread
            self.problem = error

    def _step(self) -> None:
        self._left -= 1
        if not self.lives:
            self._start()
            return
        life = self.lives[-1]
        workload = self._workload(life)
        if workload.status.state in GONE:
            self._start()
            return
        kinds = {RUNNING: ["suspend", "remap", "stop"], SUSPENDED: ["restore", "restore", "stop"]}
        kind = self._random.choice(kinds.get(workload.status.state, ["restore", "stop"]))
        self._ask(life, kind, lambda request_id: self._request(kind, request_id, workload))

    def _start(self) -> None:
        life = Life(f"{self.name}-{uuid.uuid4().hex[:6]}")
        script = 'echo $$ >> starts; exec "$0" "$@"'
        counter = [sys.executable, str(COUNTER), "--bytes", "64KiB", "--interval-s", "0.05"]
        spec = WorkloadSpec(arguments=["sh", "-c", script, *counter], resources=Resources(gpu_count=1))

        def request(request_id: str) -> Command:
            created = self._fleet.workloads.CreateWorkload(
                fleet_pb2.CreateWorkloadRequest(
                    request_id=request_id,
                    name=life.name,
                    spec=spec,
                    worker=self._worker,
                    timeout=Duration(seconds=COMMAND_TIMEOUT_S),
                ),
                timeout=RPC_TIMEOUT_S,
            )
            life.workload_id = created.workload.workload_id
            return created.command

        self.lives.append(life)
        self._ask(life, "run", request)
        if not life.asked:
            self.lives.pop()
        elif life.asked[-1].state == command_pb2.COMMAND_STATE_SUCCEEDED:
            self._wait_counting(life)

    def _wait_counting(self, life: Life) -> None:
        """Until its program uses CUDA: before, there is nothing to suspend."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._fleet.counts(life.workload_id):
            if time.monotonic() > deadline:
                raise AssertionError(f"{life.name} does not count")
            time.sleep(RETRY_S)

    def _request(self, kind: str, request_id: str, workload: Workload) -> Command:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "timeout": Duration(seconds=COMMAND_TIMEOUT_S),
        }
        stub = self._fleet.workloads
        named = {**fields, "workload": workload.workload_id}
        match kind:
            case "suspend":
                suspend = fleet_pb2.SuspendWorkloadRequest(**named)
                return stub.SuspendWorkload(suspend, timeout=RPC_TIMEOUT_S).command
            case "restore":
                restore = fleet_pb2.RestoreWorkloadRequest(**named)
                return stub.RestoreWorkload(restore, timeout=RPC_TIMEOUT_S).command
            case "stop":
                operation = command_pb2.StopOperation(grace=Duration(nanos=300_000_000))
                stop = fleet_pb2.StopWorkloadRequest(**named, operation=operation)
                return stub.StopWorkload(stop, timeout=RPC_TIMEOUT_S).command
            case _:
                here = workload.status.lease.gpu_uuids[0]
                gpus = [gpu.uuid for gpu in self._fleet.hosts[self._worker].gpus]
                there = gpus[(gpus.index(here) + self._random.randrange(1, GPUS)) % GPUS]
                pair = {"old_uuid": here, "new_uuid": there}
                move = {"workload_id": workload.workload_id, "pairs": [pair]}
                remap = fleet_pb2.RemapWorkloadsRequest(**fields, operation={"moves": [move]})  # type: ignore[arg-type]
                return stub.RemapWorkloads(remap, timeout=RPC_TIMEOUT_S).command

    def _ask(self, life: Life, kind: str, request: Callable[[str], Command]) -> None:
        """Asks until somebody answers, and then until the command has ended."""
        request_id = uuid.uuid4().hex
        seen: set[str] = set()
        try:
            command = self._answered(lambda: request(request_id))
            seen.add(command.command_id)
            if self._random.random() < 0.2:  # whoever has not heard the answer asks again
                seen.add(self._answered(lambda: request(request_id)).command_id)
        except Refused:
            self.refused += 1
            if not seen:
                time.sleep(REFUSED_S)
                self._left += self.refused < REFUSED_LIMIT
                return
        get = fleet_pb2.GetCommandRequest(command_id=next(iter(seen)))
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            command = self._answered(
                lambda: self._fleet.commands.GetCommand(get, timeout=RPC_TIMEOUT_S).command
            )
            if command.state in ENDED or time.monotonic() > deadline:
                break
            time.sleep(RETRY_S)
        life.asked.append(Asked(kind, frozenset(seen), command.state, command.error.reason))

    def stop_for_good(self, life: Life) -> None:
        """Ends a workload, whatever is said of it."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._workload(life).status.state not in GONE and time.monotonic() < deadline:
            with contextlib.suppress(Refused):
                request = partial(self._request, "stop", uuid.uuid4().hex, self._workload(life))
                self._answered(request)
            time.sleep(RETRY_S)

    def _workload(self, life: Life) -> Workload:
        get = fleet_pb2.GetWorkloadRequest(workload=life.workload_id)
        found: Workload = self._answered(
            lambda: self._fleet.workloads.GetWorkload(get, timeout=RPC_TIMEOUT_S).workload
        )
        return found

    def _answered(self, request: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return request()
            except grpc.RpcError as error:
                call: Any = error
                status = rpc_status.from_call(call)
                if status is not None and status.details:
                    info = error_details_pb2.ErrorInfo()
                    status.details[0].Unpack(info)
                    raise Refused(info.reason) from error
                if call.code() not in PASSING or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)


def look(fleet: ChaosFleet, lives: list[Life], worker: str) -> list[Seen]:
    """What everybody says of the workloads, once all agree or the time is over."""
    host = fleet.hosts[worker]
    listed: dict[str, set[str]] = {}
    for gpu in fleet.fleet.ListGpus(fleet_pb2.ListGpusRequest(), timeout=10).gpus:
        if gpu.lease.workload_id:
            listed.setdefault(gpu.lease.workload_id, set()).add(gpu.gpu.uuid)
    found = []
    for life in lives:
        get = fleet_pb2.GetWorkloadRequest(workload=life.workload_id)
        status = fleet.workloads.GetWorkload(get, timeout=10).workload.status
        process = host.process(status.root_pid) if status.root_pid else None
        ended = status.state in GONE
        memory = frozenset(process.gpu_bytes) if process and process.resident else frozenset()
        found.append(
            Seen(
                name=life.name,
                asked=tuple(life.asked),
                state=status.state,
                lease=frozenset(status.lease.gpu_uuids),
                listed=frozenset(listed.get(life.workload_id, ())),
                starts=fleet.starts(life.workload_id),
                driver_state="" if process is None or ended else process.state.name,
                memory=frozenset() if ended else memory,
                counts=tuple(fleet.counts(life.workload_id)),
            )
        )
    return found
