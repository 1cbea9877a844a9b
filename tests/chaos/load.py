"""Clients that ask for commands while everything breaks, and remember what they were told.

Several clients share a worker with fewer GPUs than they want. Some commands are cancelled, some get less time
than they need, and some come at the same time for one workload.
"""

import contextlib
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    fleet_service_pb2,
    operation_pb2,
    workload_service_pb2,
)
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec

from .fleet import GPUS, TIMEOUT_S, ChaosFleet
from .judge import ENDED, GONE, RUNNING, SUSPENDED, Asked, Seen

COUNTER: Final = Path(__file__).resolve().parents[2] / "examples/counter.py"
RPC_TIMEOUT_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 30.0
SHORT_TIMEOUT_S: Final = (0.01, 0.3)
"""The range of timeouts that may pass."""

LIVES_AT_ONCE: Final = 2
"""Workloads of one client that live at the same time."""

CANCELLED_SHARE: Final = 0.15
EXPIRING_SHARE: Final = 0.1
CONTENDED_SHARE: Final = 0.2
REPEATED_SHARE: Final = 0.2
"""Of requests: those whose command is cancelled, or gets a short timeout, those that come with another for
the same workload, and those that are made again although they were answered."""

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

UNCERTAIN: Final = {"STORAGE_UNAVAILABLE"}
"""Reasons that leave open whether the request was stored: likewise."""


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
    """Runs workloads on one worker, moves them about and stops them.

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
        living = [
            (life, workload)
            for life in self.lives[-LIVES_AT_ONCE:]
            if (workload := self._workload(life)).status.state not in GONE
        ]
        if len(living) < LIVES_AT_ONCE and (not living or self._random.random() < 0.2):
            self._start()
            return
        life, workload = self._random.choice(living)
        kinds = {RUNNING: ["suspend", "remap", "stop"], SUSPENDED: ["restore", "restore", "stop"]}
        possible = kinds.get(workload.status.state, ["restore", "stop"])
        if len(living) == 2 and all(workload.status.state == RUNNING for _, workload in living):
            possible = ["swap", *possible]
        kind = self._random.choice(possible)
        if kind == "swap":
            self._ask([life for life, _ in living], kind, self._swap([workload for _, workload in living]))
            return
        first = self._begin([life], kind, self._operation(kind, workload))
        if self._random.random() < CONTENDED_SHARE:
            other = self._random.choice(["suspend", "restore", "stop"])
            self._end(self._begin([life], other, self._operation(other, workload)))
        self._end(first)

    def _timeout(self) -> Duration:
        expires = self._random.random() < EXPIRING_SHARE
        timeout = Duration()
        timeout.FromMilliseconds(
            round(1000 * (self._random.uniform(*SHORT_TIMEOUT_S) if expires else COMMAND_TIMEOUT_S))
        )
        return timeout

    def _start(self) -> None:
        life = Life(f"{self.name}-{uuid.uuid4().hex[:6]}")
        script = 'echo $$ >> starts; exec "$0" "$@"'
        counter = [sys.executable, str(COUNTER), "--bytes", "64KiB", "--interval-s", "0.05"]
        spec = WorkloadSpec(arguments=["sh", "-c", script, *counter], resources=Resources(gpu_count=1))
        timeout = self._timeout()

        def request(request_id: str) -> Command:
            created = self._fleet.workloads.CreateWorkload(
                workload_service_pb2.CreateWorkloadRequest(
                    request_id=request_id, name=life.name, spec=spec, worker=self._worker, timeout=timeout
                ),
                timeout=RPC_TIMEOUT_S,
            )
            life.workload_id = created.workload.workload_id
            return created.command

        self.lives.append(life)
        self._ask([life], "run", request)
        if not life.asked:
            self.lives.remove(life)
        elif life.asked[-1].state == command_pb2.COMMAND_STATE_SUCCEEDED:
            self._wait_counting(life)

    def _wait_counting(self, life: Life) -> None:
        """Until its program uses CUDA: before, there is nothing to suspend."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._fleet.counts(life.workload_id):
            if time.monotonic() > deadline:
                raise AssertionError(f"{life.name} does not count")
            time.sleep(RETRY_S)

    def _operation(self, kind: str, workload: Workload) -> Callable[[str], Command]:
        """Makes one request of a kind for a workload, under the same id as often as it is called."""
        stub = self._fleet.workloads
        timeout = self._timeout()
        here = workload.status.lease.gpu_uuids[0] if workload.status.lease.gpu_uuids else ""
        gpus = [gpu.uuid for gpu in self._fleet.hosts[self._worker].gpus]
        there = gpus[(gpus.index(here) + self._random.randrange(1, GPUS)) % GPUS] if here else ""

        def request(request_id: str) -> Command:
            fields: dict[str, Any] = {"request_id": request_id, "timeout": timeout}
            named = {**fields, "workload": workload.workload_id}
            match kind:
                case "suspend":
                    suspend = workload_service_pb2.SuspendWorkloadRequest(**named)
                    return stub.SuspendWorkload(suspend, timeout=RPC_TIMEOUT_S).command
                case "restore":
                    restore = workload_service_pb2.RestoreWorkloadRequest(**named)
                    return stub.RestoreWorkload(restore, timeout=RPC_TIMEOUT_S).command
                case "stop":
                    operation = operation_pb2.StopOperation(grace=Duration(nanos=300_000_000))
                    stop = workload_service_pb2.StopWorkloadRequest(**named, operation=operation)
                    return stub.StopWorkload(stop, timeout=RPC_TIMEOUT_S).command
                case _:
                    return self._remap(fields, [(workload, here, there)])

        return request

    def _swap(self, workloads: Sequence[Workload]) -> Callable[[str], Command]:
        first, second = (workload.status.lease.gpu_uuids[0] for workload in workloads)
        moves = [(workloads[0], first, second), (workloads[1], second, first)]
        timeout = self._timeout()
        return lambda request_id: self._remap({"request_id": request_id, "timeout": timeout}, moves)

    def _remap(self, fields: dict[str, Any], moves: Sequence[tuple[Workload, str, str]]) -> Command:
        operation = {
            "moves": [
                {"workload_id": workload.workload_id, "pairs": [{"old_uuid": old, "new_uuid": new}]}
                for workload, old, new in moves
            ]
        }
        request = workload_service_pb2.RemapWorkloadsRequest(**fields, operation=operation)  # type: ignore[arg-type]
        return self._fleet.workloads.RemapWorkloads(request, timeout=RPC_TIMEOUT_S).command

    def _ask(self, lives: Sequence[Life], kind: str, request: Callable[[str], Command]) -> None:
        """Asks until somebody answers, and then until the command has ended."""
        self._end(self._begin(lives, kind, request))

    def _begin(
        self, lives: Sequence[Life], kind: str, request: Callable[[str], Command]
    ) -> tuple[Sequence[Life], str, set[str]]:
        """Asks until somebody answers, and may cancel what it has asked for. No ids: it was refused."""
        request_id = uuid.uuid4().hex
        seen: set[str] = set()
        try:
            command = self._answered(lambda: request(request_id))
            seen.add(command.command_id)
            if self._random.random() < REPEATED_SHARE:  # whoever has not heard the answer asks again
                seen.add(self._answered(lambda: request(request_id)).command_id)
        except Refused:
            self.refused += 1
            if not seen:
                time.sleep(REFUSED_S)
                self._left += self.refused < REFUSED_LIMIT
        if seen and self._random.random() < CANCELLED_SHARE:
            cancel = command_service_pb2.CancelCommandRequest(command_id=next(iter(seen)))
            with contextlib.suppress(Refused):
                self._answered(lambda: self._fleet.commands.CancelCommand(cancel, timeout=RPC_TIMEOUT_S))
        return lives, kind, seen

    def _end(self, begun: tuple[Sequence[Life], str, set[str]]) -> None:
        """Waits until a command has ended, and notes how."""
        lives, kind, seen = begun
        if not seen:
            return
        get = command_service_pb2.GetCommandRequest(command_id=next(iter(seen)))
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            command = self._answered(
                lambda: self._fleet.commands.GetCommand(get, timeout=RPC_TIMEOUT_S).command
            )
            if command.state in ENDED or time.monotonic() > deadline:
                break
            time.sleep(RETRY_S)
        ended_at = command.end_time.ToNanoseconds()
        for life in lives:
            life.asked.append(Asked(kind, frozenset(seen), command.state, command.error.reason, ended_at))

    def stop_for_good(self, life: Life) -> None:
        """Ends a workload, whatever is said of it."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._workload(life).status.state not in GONE and time.monotonic() < deadline:
            with contextlib.suppress(Refused):
                request = self._operation("stop", self._workload(life))
                self._answered(partial(request, uuid.uuid4().hex))
            time.sleep(RETRY_S)

    def _workload(self, life: Life) -> Workload:
        get = workload_service_pb2.GetWorkloadRequest(workload=life.workload_id)
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
                    if info.reason not in UNCERTAIN:
                        raise Refused(info.reason) from error
                if call.code() not in PASSING or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)


def look(fleet: ChaosFleet, lives: list[Life], worker: str) -> list[Seen]:
    """What everybody says of the workloads, once all agree or the time is over."""
    host = fleet.hosts[worker]
    listed: dict[str, set[str]] = {}
    for gpu in fleet.fleet.ListGpus(fleet_service_pb2.ListGpusRequest(), timeout=10).gpus:
        if gpu.lease.workload_id:
            listed.setdefault(gpu.lease.workload_id, set()).add(gpu.gpu.uuid)
    found = []
    for life in lives:
        get = workload_service_pb2.GetWorkloadRequest(workload=life.workload_id)
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
                last_gpu=fleet.last_gpu(life.workload_id),
                calls=None if process is None or ended else dict(process.calls),
                worker_starts=fleet.starts_of[worker],
            )
        )
    return found
