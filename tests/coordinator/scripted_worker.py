"""A worker that does what a test says, on the real stream."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
from leasehold.v1 import command_pb2, lease_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.worker_pb2 import HostFacts
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    CheckpointAnswer,
    CheckpointQuery,
    CommandFrame,
    CommandUpdate,
    ConnectRequest,
    ConnectResponse,
    Hello,
    PlanAnswer,
    PlanQuery,
    ProtocolVersion,
    WorkerLoad,
)
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub

TIMEOUT_S = 20


def make_hello(name: str = "alpha", gpu_count: int = 2, **fields: object) -> Hello:
    """A hello with free GPUs."""
    uuids = [f"GPU-{name}-{slot}" for slot in range(gpu_count)]
    hello = Hello(
        worker_id=f"worker-{name}",
        name=name,
        instance_id="instance-1",
        boot_id="boot-1",
        protocol_version=ProtocolVersion(major=1),
        host=HostFacts(hostname="host-1"),
        gpus=[Gpu(uuid=uuid, slot=slot, name="H100") for slot, uuid in enumerate(uuids)],
        gpu_leases=[
            GpuLease(gpu_uuid=uuid, slot=slot, state=lease_pb2.SLOT_STATE_FREE)
            for slot, uuid in enumerate(uuids)
        ],
    )
    hello.MergeFrom(Hello(**fields))  # type: ignore[arg-type]  # fields by name
    return hello


@dataclass
class ScriptedWorker:
    """One stream to a coordinator. Close it to break the stream without a goodbye."""

    channel: grpc.Channel
    first: ConnectRequest
    up: queue.Queue[ConnectRequest | None] = field(default_factory=queue.Queue)
    frames: list[ConnectResponse] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    ended: bool = False

    sequence: int = 0

    def __post_init__(self) -> None:
        self.call = SessionServiceStub(self.channel).Connect(self._requests())
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _requests(self) -> Iterator[ConnectRequest]:
        yield self.first
        while (frame := self.up.get()) is not None:
            yield frame

    def _read(self) -> None:
        try:
            for frame in self.call:
                with self.arrived:
                    self.frames.append(frame)
                    self.arrived.notify_all()
        except grpc.RpcError:
            pass
        with self.arrived:
            self.ended = True
            self.arrived.notify_all()

    def report(self) -> None:
        """Tells its load, as a worker does every few seconds; one that is silent is lost."""
        self.sequence += 1
        load = WorkerLoad(sequence=self.sequence, gpu_leases=self.first.hello.gpu_leases)
        self.up.put(ConnectRequest(worker_load=load))

    def wait(self, wanted: Callable[[ConnectResponse], bool]) -> ConnectResponse:
        """The first frame that is wanted, as soon as it is there."""
        found: list[ConnectResponse] = []

        def look() -> bool:
            found.extend(frame for frame in self.frames if wanted(frame))
            return bool(found)

        with self.arrived:
            assert self.arrived.wait_for(look, TIMEOUT_S), self.frames
        return found[0]

    def wait_ended(self) -> None:
        """Waits until the coordinator has ended the stream."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.ended, TIMEOUT_S)

    def wait_end(self) -> ConnectResponse:
        """The last frame before the coordinator ended the stream."""
        self.wait_ended()
        return self.frames[-1]

    def welcome(self) -> session_pb2.Welcome:
        """The coordinator's welcome."""
        return self.wait(lambda frame: frame.HasField("welcome")).welcome

    def command(self, kind: str, *, cancel: bool = False) -> CommandFrame:
        """The first command of a kind."""
        return self.wait(
            lambda frame: (
                frame.command.command.operation.WhichOneof("kind") == kind and frame.command.cancel == cancel
            )
        ).command

    def update(
        self, command_id: str, state: CommandState.ValueType, *workloads: Workload, phase: str = ""
    ) -> None:
        """Tells how a command stands."""
        update = CommandUpdate(command_id=command_id, state=state, phase=phase, workloads=workloads)
        self.up.put(ConnectRequest(command_update=update))

    def succeed(self, kind: str, *workloads: Workload) -> str:
        """Waits for a command, carries it out in words, and waits for the acknowledgement."""
        command_id = self.command(kind).command.command_id
        self.update(command_id, command_pb2.COMMAND_STATE_ACCEPTED)
        self.update(command_id, command_pb2.COMMAND_STATE_RUNNING, phase="at it")
        self.update(command_id, command_pb2.COMMAND_STATE_SUCCEEDED, *workloads)
        self.wait(lambda frame: frame.command_ack.command_id == command_id)
        return command_id

    def answer_plan(self, answer: PlanAnswer, number: int = 0) -> PlanQuery:
        """Answers a question for a plan, the first or a later one, and returns the question."""

        def asked(frame: ConnectResponse) -> bool:
            earlier = [one.plan_query for one in self.frames if one.HasField("plan_query")][:number]
            return frame.HasField("plan_query") and frame.plan_query not in earlier

        query = self.wait(asked).plan_query
        answer.plan_id = query.plan_id
        self.up.put(ConnectRequest(plan_answer=answer))
        return query

    def answer_checkpoints(self, answer: CheckpointAnswer, number: int = 0) -> CheckpointQuery:
        """Answers a question for checkpoints, the first or a later one, and returns the question."""

        def asked(frame: ConnectResponse) -> bool:
            earlier = [one.checkpoint_query for one in self.frames if one.HasField("checkpoint_query")]
            return frame.HasField("checkpoint_query") and frame.checkpoint_query not in earlier[:number]

        query = self.wait(asked).checkpoint_query
        answer.query_id = query.query_id
        self.up.put(ConnectRequest(checkpoint_answer=answer))
        return query

    def close(self) -> None:
        """Breaks the stream."""
        self.up.put(None)
        self.call.cancel()
        self._reader.join(TIMEOUT_S)
        self.channel.close()
