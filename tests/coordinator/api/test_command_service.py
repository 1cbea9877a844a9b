"""Commands from a client's call to their end, with a scripted worker."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from leasehold.v1 import (
    command_pb2,
    fleet_service_pb2,
    lease_pb2,
    worker_pb2,
    workload_pb2,
    workload_service_pb2,
)
from leasehold.v1.command_pb2 import Command, CommandResult
from leasehold.v1.command_service_pb2 import (
    CancelCommandRequest,
    GetCommandRequest,
    ListCommandsRequest,
    WatchCommandRequest,
)
from leasehold.v1.fleet_service_pb2 import CordonRequest
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.operation_pb2 import CordonOperation, Move, RemapOperation, RestoreOperation
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec, WorkloadStatus
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    GetWorkloadRequest,
    ListWorkloadsRequest,
    ReadWorkloadOutputRequest,
    RemapWorkloadsRequest,
    RestoreWorkloadRequest,
    StopWorkloadRequest,
    SuspendWorkloadRequest,
    WatchWorkloadsRequest,
)
from leasehold.worker.v1.session_pb2 import (
    CommandUpdate,
    ConnectRequest,
    Goodbye,
    OutputChunk,
    ProtocolVersion,
    WorkerLoad,
    WorkloadEvent,
)
from leasehold_coordinator.core.command_ledger import UNFINISHED_LIMIT

from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

SPEC = WorkloadSpec(arguments=["program"], resources=Resources(gpu_count=1))
DISPATCHED, ACCEPTED, SUCCEEDED, FAILED, CANCELLED, EXPIRED, UNKNOWN = (
    command_pb2.COMMAND_STATE_DISPATCHED,
    command_pb2.COMMAND_STATE_ACCEPTED,
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_CANCELLED,
    command_pb2.COMMAND_STATE_EXPIRED,
    command_pb2.COMMAND_STATE_UNKNOWN,
)


def reported(workload: Workload, state: workload_pb2.WorkloadState.ValueType, generation: int) -> Workload:
    status = WorkloadStatus(state=state, generation=generation)
    return Workload(workload_id=workload.workload_id, name=workload.name, status=status)


def start(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, name: str = "one", spec: WorkloadSpec = SPEC
) -> Workload:
    """A workload that runs, as its worker says."""
    created = coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name=name, spec=spec)).workload
    frame = worker.wait(lambda frame: frame.command.command.workload_id == created.workload_id).command
    running = reported(created, workload_pb2.WORKLOAD_STATE_RUNNING, 1)
    for state in (ACCEPTED, SUCCEEDED):
        worker.update(frame.command.command_id, state, running)
    ended(coordinator, frame.command.command_id)
    return created


def suspend(coordinator: CoordinatorProcess, workload: str = "one", **fields: object) -> Command:
    request = SuspendWorkloadRequest(workload=workload, **fields)  # type: ignore[arg-type]  # fields by name
    return coordinator.workloads.SuspendWorkload(request).command


def ended(coordinator: CoordinatorProcess, command_id: str) -> Command:
    """The command once its watch has ended."""
    request = WatchCommandRequest(command_id=command_id)
    return [response.command for response in coordinator.commands.WatchCommand(request, timeout=20)][-1]


def wait_command(coordinator: CoordinatorProcess, command_id: str, state: int) -> Command:
    deadline = time.monotonic() + 20
    while True:
        command = coordinator.commands.GetCommand(GetCommandRequest(command_id=command_id)).command
        if command.state == state:
            return command
        assert time.monotonic() < deadline, command
        time.sleep(0.01)


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The code and reason of a call that is refused."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    call_error = cast("grpc.Call", error.value)  # every error of a stub is its call too
    status = rpc_status.from_call(call_error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "leasehold.dev"
    assert call_error.details()
    bad = error_details_pb2.BadRequest()
    fields = [one.field for detail in status.details if detail.Unpack(bad) for one in bad.field_violations]
    wanted = call_error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert fields == ([info.metadata["field"]] if wanted else [])
    return call_error.code(), info.reason


def retry_delay_s(call: Callable[[], object]) -> float:
    """The delay of google.rpc.RetryInfo in a refusal."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    status = rpc_status.from_call(cast("grpc.Call", error.value))
    retry = error_details_pb2.RetryInfo()
    assert status is not None
    assert [detail for detail in status.details if detail.Unpack(retry)]
    return float(retry.retry_delay.ToTimedelta().total_seconds())


def test_a_command_is_told_from_stored_to_done(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    command = suspend(coordinator)
    watching = coordinator.commands.WatchCommand(WatchCommandRequest(command_id=command.command_id))
    assert next(watching).command.state == DISPATCHED
    for state in (ACCEPTED, command_pb2.COMMAND_STATE_RUNNING, SUCCEEDED):
        worker.update(command.command_id, state)
        assert next(watching).command.state == state
    assert list(watching) == []
    assert worker.command("suspend").epoch == worker.welcome().epoch


def test_a_command_is_sent_again_to_the_same_instance_until_it_has_ended(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    command = suspend(coordinator)
    worker.command("suspend")
    running = reported(started, workload_pb2.WORKLOAD_STATE_RUNNING, 1)
    back = coordinator.connect(make_hello(workloads=[running]))
    assert back.command("suspend").command.command_id == command.command_id
    coordinator.restart()
    again = coordinator.connect(make_hello(workloads=[running], commands_in_flight=[command.command_id]))
    again.welcome()
    assert again.succeed("suspend") == command.command_id
    assert ended(coordinator, command.command_id).state == SUCCEEDED
    idle = coordinator.connect(make_hello(workloads=[running]))
    assert list(idle.welcome().open_command_ids) == []


def test_an_outcome_that_comes_twice_is_acknowledged_twice_and_stored_once(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    suspend(coordinator)
    command_id = worker.succeed("suspend")
    revision = ended(coordinator, command_id).revision
    worker.update(command_id, FAILED)
    deadline = time.monotonic() + 20
    while sum(frame.command_ack.command_id == command_id for frame in worker.frames) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ended(coordinator, command_id).revision == revision


def test_a_command_that_was_accepted_and_is_not_in_the_journal_is_interrupted(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    command = suspend(coordinator)
    worker.command("suspend")
    worker.update(command.command_id, ACCEPTED)
    wait_command(coordinator, command.command_id, ACCEPTED)
    worker.close()
    coordinator.connect(make_hello(instance_id="instance-2")).welcome()
    outcome = ended(coordinator, command.command_id)
    assert (outcome.state, outcome.error.reason) == (FAILED, 39)
    workload = coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="one")).workload
    assert workload.status.state == workload_pb2.WORKLOAD_STATE_FAILED


def test_a_request_id_creates_once(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    request = CreateWorkloadRequest(request_id="r1", name="one", spec=SPEC)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(coordinator.workloads.CreateWorkload, [request] * 4))
    assert len({answer.command.command_id for answer in answers}) == 1
    running = reported(answers[0].workload, workload_pb2.WORKLOAD_STATE_RUNNING, 1)
    worker.succeed("run", running)
    assert coordinator.workloads.CreateWorkload(request).command.state == SUCCEEDED
    twice = [suspend(coordinator, request_id="r2").command_id for _ in range(2)]
    assert twice[0] == twice[1]
    assert len(coordinator.commands.ListCommands(ListCommandsRequest()).commands) == 2


def test_a_workload_that_could_not_be_started_has_failed_and_its_name_is_free(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="one", spec=SPEC))
    worker.update(worker.command("run").command.command_id, command_pb2.COMMAND_STATE_REJECTED)
    deadline = time.monotonic() + 20
    request = GetWorkloadRequest(workload="one")
    while coordinator.workloads.GetWorkload(request).workload.status.state != 10:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    start(coordinator, worker)


def test_a_workload_that_lives_after_its_failed_run_is_not_called_failed(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    """Its load failed, and so did the stop of its program, which is stuck in the kernel."""
    created = coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="one", spec=SPEC)).workload
    command = worker.command("run").command
    stuck = reported(created, workload_pb2.WORKLOAD_STATE_UNKNOWN, 1)
    worker.update(command.command_id, FAILED, stuck)
    assert ended(coordinator, command.command_id).state == FAILED
    found = coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="one")).workload
    assert found.status.state == workload_pb2.WORKLOAD_STATE_UNKNOWN


def test_refusals_carry_their_code_and_reason_and_change_nothing(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    calls = coordinator.workloads
    code = grpc.StatusCode

    def create(**fields: object) -> Callable[[], object]:
        values = {"name": "two", "spec": SPEC} | fields
        return lambda: calls.CreateWorkload(CreateWorkloadRequest(**values))  # type: ignore[arg-type]

    def remap(*moves: Move) -> Callable[[], object]:
        return lambda: calls.RemapWorkloads(RemapWorkloadsRequest(operation=RemapOperation(moves=moves)))

    pair = GpuPair(old_uuid="a", new_uuid="b")
    elsewhere = RestoreOperation(gpu_uuids=["x"])
    huge = WorkloadSpec(arguments=["x" * 140_000])
    four = WorkloadSpec(arguments=["x"], resources=Resources(gpu_count=4))
    no_time = duration_pb2.Duration()
    cases: list[tuple[Callable[[], object], grpc.StatusCode, str]] = [
        (lambda: suspend(coordinator, "no"), code.NOT_FOUND, "UNKNOWN_WORKLOAD"),
        (lambda: suspend(coordinator, expected_generation=9), code.ABORTED, "GENERATION_MISMATCH"),
        (lambda: suspend(coordinator, timeout=no_time), code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (create(worker="no"), code.NOT_FOUND, "UNKNOWN_WORKER"),
        (create(name="one"), code.ALREADY_EXISTS, "WORKLOAD_EXISTS"),
        (create(name="2"), code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (create(spec=WorkloadSpec()), code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (create(spec=huge), code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (create(spec=four), code.RESOURCE_EXHAUSTED, "NO_FREE_GPU"),
        (create(gpu_uuids=["GPU-x"]), code.NOT_FOUND, "UNKNOWN_GPU"),
        (create(gpu_uuids=["GPU-alpha-0"] * 2), code.INVALID_ARGUMENT, "DUPLICATE_GPU"),
        (remap(), code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (remap(Move(), Move()), code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (remap(Move(workload_id="one")), code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (remap(Move(workload_id="no", pairs=[pair])), code.NOT_FOUND, "UNKNOWN_WORKLOAD"),
        (
            lambda: calls.RestoreWorkload(RestoreWorkloadRequest(workload="one", operation=elsewhere)),
            code.FAILED_PRECONDITION,
            "WRONG_STATE",
        ),
        (
            lambda: coordinator.commands.GetCommand(GetCommandRequest(command_id="c-0")),
            code.NOT_FOUND,
            "UNKNOWN_COMMAND",
        ),
        (
            lambda: calls.ListWorkloads(ListWorkloadsRequest(page_token="?")),
            code.INVALID_ARGUMENT,
            "INVALID_TOKEN",
        ),
        (
            lambda: list(calls.WatchWorkloads(WatchWorkloadsRequest(resume_token="?"))),
            code.INVALID_ARGUMENT,
            "INVALID_TOKEN",
        ),
    ]
    for call, wanted_code, wanted_reason in cases:
        assert refusal(call) == (wanted_code, wanted_reason)
    assert len(coordinator.commands.ListCommands(ListCommandsRequest()).commands) == 1
    assert len(calls.ListWorkloads(ListWorkloadsRequest(include_ended=True)).workloads) == 1


def test_one_command_per_workload_and_eight_at_a_time(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    cpu = WorkloadSpec(arguments=["program"])
    for number in range(10):
        start(coordinator, worker, f"w{number}", cpu)
    commands = [suspend(coordinator, f"w{number}").command_id for number in range(10)]
    assert refusal(lambda: suspend(coordinator, "w0")) == (grpc.StatusCode.ABORTED, "WORKLOAD_BUSY")
    assert wait_command(coordinator, commands[7], DISPATCHED)
    assert wait_command(coordinator, commands[8], command_pb2.COMMAND_STATE_PENDING)
    worker.update(commands[5], SUCCEEDED)
    wait_command(coordinator, commands[8], DISPATCHED)
    coordinator.restart()
    version = ProtocolVersion(major=1, minor=3)
    held = [one for one in commands[:9] if one != commands[5]]
    back = coordinator.connect(make_hello(commands_in_flight=held, protocol_version=version))
    back.update(commands[0], SUCCEEDED)
    back.wait(lambda frame: frame.command.command.command_id == commands[9])


@pytest.mark.long
def test_there_is_room_for_many_commands_and_a_refusal_says_when_to_try_again(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    def cordon() -> object:
        operation = CordonOperation(reason="x", cordoned_by="me")
        return coordinator.fleet.Cordon(CordonRequest(worker="alpha", operation=operation))

    for _ in range(UNFINISHED_LIMIT // 2):
        cordon()
        worker.report()  # a busy host may take longer than a worker may be silent
    with pytest.raises(grpc.RpcError) as error:
        cordon()
    status = rpc_status.from_call(cast("grpc.Call", error.value))
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.seconds == 1
    assert refusal(cordon) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_COMMANDS")


def test_gpus_that_a_command_may_still_take_are_not_promised_twice(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    request = CreateWorkloadRequest(spec=SPEC)
    for _ in range(2):
        coordinator.workloads.CreateWorkload(request)
    assert refusal(lambda: coordinator.workloads.CreateWorkload(request))[1] == "NO_FREE_GPU"


def test_a_worker_out_of_contact(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    start(coordinator, worker)
    worker.close()
    deadline = time.monotonic() + 20
    while coordinator.fleet.GetWorker(fleet_service_pb2.GetWorkerRequest(worker="alpha")).worker.state == 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gone = (grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE")
    assert refusal(lambda: suspend(coordinator)) == gone
    assert refusal(lambda: suspend(coordinator, validate_only=True)) == gone
    assert refusal(lambda: coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=SPEC))) == gone
    assert refusal(lambda: list(read_output(coordinator)))[1] == "WORKER_UNAVAILABLE"
    assert retry_delay_s(lambda: suspend(coordinator)) == 1, "it may be back soon"


def test_a_worker_that_somebody_must_start_first(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    worker.up.put(ConnectRequest(goodbye=Goodbye()))
    deadline = time.monotonic() + 20
    left, get = worker_pb2.WORKER_STATE_DISCONNECTED, fleet_service_pb2.GetWorkerRequest(worker="alpha")
    while coordinator.fleet.GetWorker(get).worker.state != left:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert retry_delay_s(lambda: suspend(coordinator)) == 60


def test_what_was_sent_is_unknown_until_its_worker_returns(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    command = suspend(coordinator, timeout=duration_pb2.Duration(nanos=1))
    worker.command("suspend")
    worker.close()
    unknown = wait_command(coordinator, command.command_id, UNKNOWN)
    assert unknown.error.message
    running = reported(started, workload_pb2.WORKLOAD_STATE_RUNNING, 3)
    hello = make_hello(workloads=[running], commands_unacknowledged=[command.command_id])
    leased = hello.gpu_leases[0]  # the worker restored it by itself
    leased.state, leased.workload_id = lease_pb2.SLOT_STATE_LEASED, started.workload_id
    back = coordinator.connect(hello)
    outcome = CommandUpdate(
        command_id=command.command_id,
        state=SUCCEEDED,
        workloads=[running],
        result=CommandResult(released_gpu_uuids=[leased.gpu_uuid]),
    )
    back.up.put(ConnectRequest(command_update=outcome))
    found = ended(coordinator, command.command_id)
    assert found.state == SUCCEEDED
    assert not found.HasField("error")
    gpus = coordinator.fleet.ListGpus(fleet_service_pb2.ListGpusRequest()).gpus
    assert [one.lease.state for one in gpus] == [lease_pb2.SLOT_STATE_LEASED, lease_pb2.SLOT_STATE_FREE]


def test_a_command_is_cancelled_by_its_worker(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    command = suspend(coordinator)
    worker.command("suspend")
    coordinator.commands.CancelCommand(CancelCommandRequest(command_id=command.command_id))
    assert worker.command("suspend", cancel=True).command.command_id == command.command_id
    worker.update(command.command_id, ACCEPTED)
    worker.update(command.command_id, CANCELLED)
    assert ended(coordinator, command.command_id).state == CANCELLED


def test_workloads_are_watched_and_found_after_their_end(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    watching = coordinator.workloads.WatchWorkloads(WatchWorkloadsRequest())
    assert next(iter(watching)).workload.name == "one"
    assert next(iter(watching)).bookmark.snapshot_end
    for generation, state in (
        (1, workload_pb2.WORKLOAD_STATE_SUSPENDED),
        (5, workload_pb2.WORKLOAD_STATE_EXITED),
    ):
        event = WorkloadEvent(workload=reported(started, state, generation))
        worker.up.put(ConnectRequest(workload_event=event))
    change = next(iter(watching)).workload
    assert change.status.generation == 5, "an older generation is no news"
    watching.cancel()
    assert not coordinator.workloads.ListWorkloads(ListWorkloadsRequest()).workloads
    found = coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="one")).workload
    assert found.status.state == workload_pb2.WORKLOAD_STATE_EXITED
    assert found.spec == SPEC
    stopped = coordinator.workloads.StopWorkload(StopWorkloadRequest(workload="one")).command
    assert worker.succeed("stop") == stopped.command_id


def test_the_holder_of_a_gpu_is_named(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    started = start(coordinator, worker)
    lease = GpuLease(
        gpu_uuid="GPU-alpha-1", state=lease_pb2.SLOT_STATE_LEASED, workload_id=started.workload_id
    )
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=[lease])))
    deadline = time.monotonic() + 20
    while True:
        gpu = coordinator.fleet.GetGpu(fleet_service_pb2.GetGpuRequest(uuid="GPU-alpha-1")).gpu
        if gpu.workload_name == "one":
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    taken = CreateWorkloadRequest(spec=SPEC, gpu_uuids=["GPU-alpha-1"])
    assert refusal(lambda: coordinator.workloads.CreateWorkload(taken))[1] == "NO_FREE_GPU"


def test_output_comes_piece_by_piece(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    start(coordinator, worker)
    text = b"0123456789"

    def answer() -> None:
        answered: set[str] = set()
        while True:
            frame = worker.wait(
                lambda frame: frame.HasField("read_output") and frame.read_output.read_id not in answered
            )
            request = frame.read_output
            answered.add(request.read_id)
            data = text[request.offset : request.offset + 4]
            end = request.offset + 4 >= len(text)
            chunk = OutputChunk(read_id=request.read_id, data=data, end=end)
            worker.up.put(ConnectRequest(output_chunk=chunk))
            if end:
                return

    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer)
        pieces = list(read_output(coordinator))
    assert [(piece.data, piece.next_offset) for piece in pieces] == [(b"0123", 4), (b"4567", 8), (b"89", 10)]


def read_output(coordinator: CoordinatorProcess) -> Iterator[workload_service_pb2.ReadWorkloadOutputResponse]:
    return coordinator.workloads.ReadWorkloadOutput(ReadWorkloadOutputRequest(workload="one", follow=True))


def test_health_and_reflection_answer(coordinator: CoordinatorProcess) -> None:
    service = "leasehold.v1.WorkloadService"
    check: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    check = coordinator.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    answer = check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    database = ProtoReflectionDescriptorDatabase(coordinator.channel)
    assert service in database.get_services()
    assert database.FindFileByName("leasehold/v1/fleet_service.proto").package == "leasehold.v1"
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    reflect: grpc.StreamStreamMultiCallable[bytes, bytes] = coordinator.channel.stream_stream(method)
    assert refusal(lambda: list(reflect(iter([b"\xff\xff"])))) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
    )
    assert "Traceback" not in coordinator.log()
