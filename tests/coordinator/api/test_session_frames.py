"""What a broken worker sends ends its own session, and touches nobody else."""

from collections.abc import Iterator
from threading import Event

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, errors_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.fleet_service_pb2 import GetWorkerRequest
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    CommandUpdate,
    ConnectRequest,
    ConnectResponse,
    Goodbye,
    Hello,
    OutputChunk,
    WorkloadEvent,
)

from tests.channels import open_worker_channel
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

METHOD = "/leasehold.worker.v1.SessionService/Connect"


def still_served(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    """The worker goes on as if nothing had happened: its stream lives, and what it says is stored."""
    known = coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker
    assert known.state == worker_pb2.WORKER_STATE_CONNECTED
    worker.update("c-none", command_pb2.COMMAND_STATE_SUCCEEDED)
    worker.wait(lambda frame: frame.command_ack.command_id == "c-none")
    assert not worker.ended
    other = coordinator.connect(make_hello("gamma"))
    assert other.welcome().epoch >= 1, "the store still takes writes"


def raw_stream(coordinator: CoordinatorProcess, *frames: bytes) -> list[ConnectResponse]:
    """What is answered to these bytes until the stream ends."""
    over = Event()

    def requests() -> Iterator[bytes]:
        yield from frames
        over.wait(20)

    with open_worker_channel(coordinator.worker_address) as channel:
        call: Iterator[ConnectResponse] = channel.stream_stream(
            METHOD,
            request_serializer=lambda data: data,
            response_deserializer=ConnectResponse.FromString,
        )(requests(), timeout=20)
        answers = []
        try:
            for answer in call:
                answers.append(answer)
        except grpc.RpcError:
            pass
        over.set()
    return answers


def hello_bytes() -> bytes:
    return ConnectRequest(hello=make_hello("beta")).SerializeToString()


def test_bytes_that_are_no_frame(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    raw_stream(coordinator, b"\xff\xff\xff")
    answers = raw_stream(coordinator, hello_bytes(), b"\xff\xff\xff")
    assert answers[0].HasField("welcome")
    assert answers[-1].goodbye.reason == session_pb2.GOODBYE_REASON_PROTOCOL_ERROR
    still_served(coordinator, worker)


def test_a_frame_that_is_too_large(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    chunk = OutputChunk(read_id="r", data=b"x" * 300_000)
    answers = raw_stream(coordinator, hello_bytes(), ConnectRequest(output_chunk=chunk).SerializeToString())
    assert not any(answer.HasField("command") for answer in answers)
    still_served(coordinator, worker)


def test_an_epoch_that_nobody_gave_out(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    for last_epoch in (2**63 - 1, -1):
        refused = coordinator.connect(make_hello("beta", last_epoch=last_epoch)).wait_end()
        assert refused.goodbye.error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    still_served(coordinator, worker)


@pytest.mark.parametrize(
    "moment",
    [Timestamp(seconds=250_000_000_000), Timestamp(seconds=2**62), Timestamp(seconds=1, nanos=-5)],
    ids=["too late to be stored", "no year", "no nanoseconds"],
)
def test_a_workload_with_a_time_that_no_clock_shows(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, moment: Timestamp
) -> None:
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    far = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1, start_time=moment)
    event = WorkloadEvent(workload=Workload(workload_id="w-far", name="far", status=far))
    beta.up.put(ConnectRequest(workload_event=event))
    assert beta.wait_end().goodbye.error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    still_served(coordinator, worker)
    assert not coordinator.workloads.ListWorkloads(ListWorkloadsRequest()).workloads


def test_a_workload_without_id(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    beta.up.put(ConnectRequest(workload_event=WorkloadEvent()))
    assert beta.wait_end().goodbye.error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    still_served(coordinator, worker)


def test_numbers_of_a_newer_worker_are_no_error(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    newer: CommandState.ValueType = 99  # type: ignore[assignment]  # what a newer release may add
    worker.up.put(ConnectRequest(command_update=CommandUpdate(command_id="c-1", state=newer)))
    worker.up.put(ConnectRequest())
    still_served(coordinator, worker)
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    beta.up.put(ConnectRequest(goodbye=Goodbye(reason=99)))  # type: ignore[arg-type]  # as above
    beta.wait_end()
    still_served(coordinator, worker)


def test_a_worker_without_gpus_or_facts_is_let_in(coordinator: CoordinatorProcess) -> None:
    bare = Hello(
        worker_id="worker-bare",
        name="bare",
        instance_id="i",
        protocol_version=session_pb2.ProtocolVersion(major=1, minor=7),
    )
    assert coordinator.connect(bare).welcome().epoch == 1
    known = coordinator.fleet.GetWorker(GetWorkerRequest(worker="bare")).worker
    assert known.HasField("gpu_count")
    assert known.gpu_count == 0
    assert not known.HasField("driver_version")
