"""The coordinator, spoken to by workers and clients that mean harm or are broken."""

import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.message import Message
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from leasehold.v1 import (
    access_service_pb2,
    audit_service_pb2,
    certificate_service_pb2,
    command_pb2,
    command_service_pb2,
    enrolment_service_pb2,
    event_service_pb2,
    fleet_service_pb2,
    lease_pb2,
    workload_pb2,
    workload_service_pb2,
)
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec, WorkloadStatus
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest, Hello, WorkerLoad, WorkloadEvent
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.core.hello_rules import NAME

from tests.channels import open_worker_channel
from tests.coordinator.api.test_roles import grant
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import make_hello
from tests.coordinator.unix_users import ANN, channel_as, needs_root

from .conftest import Examples
from .messages import fill

NO_BOUNDS = """
from leasehold_coordinator.fleet import hello_bounds
from leasehold_coordinator.fleet import report_bounds
hello_bounds.HELLO_BURST = report_bounds.NEW_BURST = 1_000_000
"""
"""The same few workers begin hundreds of sessions."""

SEEDS = st.integers(0, 2**32)
SECRET = "SECRET"
FINE = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""What a client may be answered, or UNAVAILABLE with details. UNKNOWN and INTERNAL are defects."""

SERVICES = [
    service
    for file in (
        access_service_pb2,
        audit_service_pb2,
        certificate_service_pb2,
        command_service_pb2,
        event_service_pb2,
        fleet_service_pb2,
        workload_service_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
]
SERVICES.append(enrolment_service_pb2.DESCRIPTOR.services_by_name["EnrolmentService"])
METHODS = [(service.full_name, method) for service in SERVICES for method in service.methods]


@pytest.fixture(autouse=True)
def own_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority that no other test uses. It may be rotated."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator on a fresh store. Its workers are never silent for too long."""
    started = CoordinatorProcess(tmp_path, load_interval_s=600, prelude=NO_BOUNDS)
    started.start()
    yield started
    for worker in started.workers:
        worker.close()
    assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


def damaged(seed: int) -> bytes:
    """A frame with any content, whole, cut off, or with some bytes changed."""
    choose = random.Random(seed)
    data = bytearray(fill(ConnectRequest, choose).SerializeToString()[:200_000])
    match choose.randrange(4):
        case 0:
            del data[choose.randrange(len(data) + 1) :]
        case 1:
            for _ in range(3):
                if data:
                    data[choose.randrange(len(data))] = choose.randrange(256)
    return bytes(data)


def rival(seed: int) -> bytes:
    """A hello that takes the honest worker's id, name or GPUs. Half have any content besides."""
    choose = random.Random(seed)
    honest, hello = make_hello("alpha"), make_hello(f"rival-{seed % 5}", instance_id=f"i-{seed}")
    match choose.randrange(3):
        case 0:
            hello.worker_id = honest.worker_id
        case 1:
            hello.name = honest.name
        case 2:
            del hello.gpus[:]
            hello.gpus.extend(honest.gpus)
    if choose.random() < 0.5:
        more = fill(Hello, choose)
        for field in ("worker_id", "instance_id", "name", "protocol_version"):
            more.ClearField(field)
        hello.MergeFrom(more)
    return ConnectRequest(hello=hello).SerializeToString()


def thief(seed: int, ids: dict[str, str]) -> bytes:
    """A frame that names what belongs to the honest worker. Half have any content besides."""
    choose = random.Random(seed)
    if choose.random() < 0.5:
        return choose.choice(claims(ids)).SerializeToString()
    frame = ConnectRequest()
    content = getattr(frame, choose.choice(ConnectRequest.DESCRIPTOR.fields).name)
    content.CopyFrom(fill(type(content), choose))
    content.SetInParent()
    take_ids(content, choose, ids)
    return frame.SerializeToString()


def claims(ids: dict[str, str]) -> list[ConnectRequest]:
    """Frames that would be valid from the honest worker."""
    exited = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_EXITED, generation=50)
    workload = Workload(workload_id=ids["workload_id"], status=exited)
    lease = GpuLease(gpu_uuid=ids["gpu_uuid"], state=lease_pb2.SLOT_STATE_LEASED)
    succeeded = command_pb2.COMMAND_STATE_SUCCEEDED
    return [
        ConnectRequest(workload_event=WorkloadEvent(workload=workload)),
        ConnectRequest(command_update=CommandUpdate(command_id=ids["command_id"], state=succeeded)),
        ConnectRequest(command_update=CommandUpdate(command_id="c-1", state=succeeded, workloads=[workload])),
        ConnectRequest(worker_load=WorkerLoad(sequence=2**40, gpu_leases=[lease])),
    ]


def take_ids(message: Message, choose: random.Random, ids: dict[str, str]) -> None:
    """Replaces most ids in a message."""
    for field in message.DESCRIPTOR.fields:
        is_text = field.type == field.TYPE_STRING and not field.is_repeated
        if is_text and field.name in ids and choose.random() < 0.8:
            setattr(message, field.name, ids[field.name])
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                take_ids(part, choose, ids)


def state_of_alpha(coordinator: CoordinatorProcess, ids: dict[str, str]) -> list[Message]:
    """What belongs to the honest worker."""
    listed = coordinator.fleet.ListGpus(fleet_service_pb2.ListGpusRequest(worker="worker-alpha"))
    for gpu in listed.gpus:
        gpu.ClearField("report_time")
    asked = workload_service_pb2.GetWorkloadRequest(workload=ids["workload_id"])
    command = command_service_pb2.GetCommandRequest(command_id=ids["command_id"])
    return [listed, coordinator.workloads.GetWorkload(asked), coordinator.commands.GetCommand(command)]


def speak(
    coordinator: CoordinatorProcess,
    frames: list[bytes],
) -> None:
    """Sends raw frames on a stream of their own, and waits until the coordinator has answered or ended it."""
    done = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from frames
        done.wait(0.2)

    with open_worker_channel(
        coordinator.worker_address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        connect: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/leasehold.worker.v1.SessionService/Connect"
        )
        call = connect(requests(), timeout=5)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        done.set()
        assert call.code() in FINE, call.details()


def test_a_hostile_worker_harms_nobody_else(
    coordinator: CoordinatorProcess,
    examples: Examples,
) -> None:
    honest = coordinator.connect(make_hello("alpha"))
    honest.welcome()

    @examples
    @given(SEEDS, st.sampled_from(["stranger", "let in", "rival"]))
    def play(seed: int, who: str) -> None:
        frames = [damaged(seed + number) for number in range(4)]
        if who == "let in":
            hello = ConnectRequest(hello=make_hello(f"hostile-{seed % 7}"))
            frames.insert(0, hello.SerializeToString())
        elif who == "rival":
            frames.insert(0, rival(seed))
        speak(coordinator, frames)
        honest.report()
        assert not honest.ended

    play()
    assert coordinator.process.poll() is None
    gpus = coordinator.fleet.ListGpus(fleet_service_pb2.ListGpusRequest(page_size=1000))
    assert {gpu.worker_id for gpu in gpus.gpus if "alpha" in gpu.gpu.uuid} == {"worker-alpha"}
    workers = coordinator.fleet.ListWorkers(fleet_service_pb2.ListWorkersRequest(page_size=1000))
    assert all(NAME.fullmatch(worker.name) for worker in workers.workers)
    workloads = coordinator.workloads.ListWorkloads(
        workload_service_pb2.ListWorkloadsRequest(include_ended=True)
    )
    for message in (gpus, workers, workloads):
        json_format.MessageToJson(message)
    spec = WorkloadSpec(arguments=["program"])
    request = workload_service_pb2.CreateWorkloadRequest(name="honest", spec=spec, worker="worker-alpha")
    coordinator.workloads.CreateWorkload(request)
    honest.succeed("run")


def test_nothing_of_another_worker_ever_changes(
    coordinator: CoordinatorProcess,
    examples: Examples,
) -> None:
    honest = coordinator.connect(make_hello("alpha"))
    honest.welcome()
    created = coordinator.workloads.CreateWorkload(
        workload_service_pb2.CreateWorkloadRequest(
            name="victim", spec=WorkloadSpec(arguments=["program"]), worker="worker-alpha"
        )
    )
    ids = {
        "workload_id": created.workload.workload_id,
        "command_id": created.command.command_id,
        "gpu_uuid": "GPU-alpha-0",
        "uuid": "GPU-alpha-0",
    }
    honest.update(ids["command_id"], command_pb2.COMMAND_STATE_ACCEPTED)
    honest.update(ids["command_id"], command_pb2.COMMAND_STATE_RUNNING)
    asked = command_service_pb2.GetCommandRequest(command_id=ids["command_id"])
    while coordinator.commands.GetCommand(asked).command.state != command_pb2.COMMAND_STATE_RUNNING:
        pass
    honest.report()
    before = state_of_alpha(coordinator, ids)

    @examples
    @given(SEEDS)
    def play(seed: int) -> None:
        hello = ConnectRequest(hello=make_hello(f"hostile-{seed % 7}"))
        speak(coordinator, [hello.SerializeToString(), *(thief(seed + number, ids) for number in range(4))])
        honest.report()
        assert not honest.ended
        assert state_of_alpha(coordinator, ids) == before

    play()


def test_a_hostile_client_gets_a_typed_answer(
    coordinator: CoordinatorProcess,
    examples: Examples,
) -> None:
    honest = coordinator.connect(make_hello("alpha"))
    honest.welcome()

    @examples
    @given(SEEDS, st.sampled_from(range(len(METHODS))))
    def play(seed: int, number: int) -> None:
        service, method = METHODS[number]
        request = fill(message_factory.GetMessageClass(method.input_type), random.Random(seed))
        path = f"/{service}/{method.name}"
        data = request.SerializeToString()
        call: grpc.Call
        if method.server_streaming:
            stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = coordinator.channel.unary_stream(path)
            call = stream(data, timeout=0.3)
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
        else:
            unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = coordinator.channel.unary_unary(path)
            future = unary.future(data, timeout=2)
            future.exception()
            call = future
        is_refusal = call.code() is grpc.StatusCode.UNAVAILABLE and rpc_status.from_call(call) is not None
        assert is_refusal or call.code() in FINE, (path, request, call.details())
        honest.report()

    play()
    assert coordinator.process.poll() is None
    assert not honest.ended


@needs_root
def test_a_hostile_user_reaches_nothing_of_another(
    coordinator: CoordinatorProcess,
    examples: Examples,
) -> None:
    honest = coordinator.connect(make_hello("alpha"))
    honest.welcome()
    spec = WorkloadSpec(arguments=[SECRET], environment={SECRET: SECRET})
    created = coordinator.workloads.CreateWorkload(
        workload_service_pb2.CreateWorkloadRequest(
            name="victim", spec=spec, worker="worker-alpha", labels={"team": SECRET}, request_id=SECRET
        )
    )
    honest.succeed("run")
    workload_id = created.workload.workload_id
    ids = {
        "workload_id": workload_id,
        "workload": "victim",
        "command_id": created.command.command_id,
        "hold_id": created.command.command_id,
        "request_id": SECRET,
        "gpu_uuid": "GPU-alpha-0",
    }
    before = state_of_alpha(coordinator, ids)
    grant(coordinator, ANN, Role.USER)
    with channel_as(coordinator.folder / "store.sock", ANN) as channel:

        @examples
        @given(SEEDS, st.sampled_from(range(len(METHODS))))
        def play(seed: int, number: int) -> None:
            service, method = METHODS[number]
            choose = random.Random(seed)
            request = fill(message_factory.GetMessageClass(method.input_type), choose)
            take_ids(request, choose, ids)
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                f"/{service}/{method.name}"
            )
            responses = call(request.SerializeToString(), timeout=0.3)
            with contextlib.suppress(grpc.RpcError):
                for response in responses:
                    assert SECRET.encode() not in response, (method.name, request)
            assert SECRET not in (responses.details() or "").replace(repr(SECRET), "")
            assert state_of_alpha(coordinator, ids) == before, (method.name, request)

        play()
