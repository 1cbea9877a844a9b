"""Checkpoints: asked of every worker, made and deleted by commands, and begun with."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import errors_pb2, eviction_pb2, lease_pb2, workload_pb2
from leasehold.v1.checkpoint_pb2 import CHECKPOINT_KIND_APPLICATION, CHECKPOINT_KIND_IMAGE, Checkpoint
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.errors_pb2 import Error
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.fleet_service_pb2 import GetWorkerRequest
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.operation_pb2 import (
    CheckpointOperation,
    DeleteCheckpointsOperation,
    Operation,
    RestoreOperation,
    SuspendOperation,
)
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec
from leasehold.v1.workload_service_pb2 import (
    CheckpointWorkloadRequest,
    CreateWorkloadRequest,
    CreateWorkloadResponse,
    DeleteCheckpointsRequest,
    ListCheckpointsRequest,
    ListCheckpointsResponse,
    PlanRequest,
    RestoreWorkloadRequest,
)
from leasehold.worker.v1.session_pb2 import (
    CheckpointAnswer,
    CheckpointQuery,
    ConnectRequest,
    PlanAnswer,
    WorkerLoad,
    WorkloadEvent,
)
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.commands.checkpoint_list import find_holders, list_checkpoints
from leasehold_coordinator.fleet.callers import note_caller
from leasehold_coordinator.fleet.checkpoint_listings import WORKLOAD_LISTINGS
from leasehold_coordinator.fleet.session import Session

from tests.coordinator.api.test_command_service import SPEC, refusal, reported, start, suspend
from tests.coordinator.bench import Bench, on_bench, workload
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.fleet.test_event_log import listed
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import state_of, until

Code = grpc.StatusCode
CHECKPOINTED, STOPPED, SLEEPING = (
    workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
    workload_pb2.WORKLOAD_STATE_STOPPED,
    workload_pb2.WORKLOAD_STATE_SLEEPING,
)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """For calls that wait while the test plays the workers."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


def made(checkpoint_id: str, seconds: int = 1, **fields: object) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=checkpoint_id,
        kind=CHECKPOINT_KIND_APPLICATION,
        create_time=Timestamp(seconds=seconds),
        **fields,  # type: ignore[arg-type]  # fields by name
    )


def ask(
    coordinator: CoordinatorProcess, aside: ThreadPoolExecutor, **fields: str
) -> Future[ListCheckpointsResponse]:
    request = ListCheckpointsRequest(**fields)
    return aside.submit(lambda: coordinator.workloads.ListCheckpoints(request, timeout=20))


def ids(response: ListCheckpointsResponse) -> list[str]:
    return [one.checkpoint_id for one in response.checkpoints]


def tell(worker: ScriptedWorker, workload: Workload) -> None:
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=workload)))


def delete(coordinator: CoordinatorProcess, *checkpoint_ids: str, worker: str = "alpha") -> Command:
    operation = DeleteCheckpointsOperation(checkpoint_ids=checkpoint_ids, force=True)
    request = DeleteCheckpointsRequest(request_id="r-1", worker=worker, operation=operation)
    return coordinator.workloads.DeleteCheckpoints(request).command


def test_a_filter_selects_checkpoints_of_all_workers(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    asked = ask(coordinator, aside, filter="kind = APPLICATION AND NOT in_use = true AND worker = alpha")
    in_use, idle = made("k-1", in_use=True), made("k-2", 2)
    image = made("k-3", 3)
    image.kind = CHECKPOINT_KIND_IMAGE
    worker.answer_checkpoints(CheckpointAnswer(checkpoints=[in_use, idle, image]))
    assert ids(asked.result(20)) == ["k-2"]
    request = ListCheckpointsRequest(filter="kind = PAPER")
    invalid = (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert refusal(lambda: coordinator.workloads.ListCheckpoints(request)) == invalid


def test_workers_are_asked_at_once_and_the_newest_come_first(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    asked = ask(coordinator, aside)
    # Each is asked before any has answered.
    beta.wait(lambda frame: frame.HasField("checkpoint_query"))
    first = worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-4", 4), made("k-2", 2)]))
    beta.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-3", 3, worker_id="another")]))
    response = asked.result(20)
    assert ids(response) == ["k-4", "k-3", "k-2"]
    assert [one.worker_id for one in response.checkpoints] == ["worker-alpha", "worker-beta", "worker-alpha"]
    assert not response.unreachable
    assert (first.workload_id, first.after_checkpoint_id) == ("", "")


def test_long_lists_come_page_by_page(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    asked = ask(coordinator, aside, worker="worker-alpha")
    worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-3", 3), made("k-2", 2)], more=True))
    second = worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-1", 1)], more=True), 1)
    third = worker.answer_checkpoints(CheckpointAnswer(more=True), 2)  # it promises more, and has none
    assert ids(asked.result(20)) == ["k-3", "k-2", "k-1"]
    assert not asked.result().truncated
    assert (second.after_checkpoint_id, third.after_checkpoint_id) == ("k-2", "k-1")


def test_a_list_that_begins_anew_has_each_once(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    asked = ask(coordinator, aside, worker="worker-alpha")
    worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-3", 3), made("k-2", 2)], more=True))
    # k-2 was deleted meanwhile.
    again = worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-3", 3)], more=True), 1)
    last = worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-1", 1)]), 2)
    assert ids(asked.result(20)) == ["k-3", "k-2", "k-1"]
    assert (again.after_checkpoint_id, last.after_checkpoint_id) == ("k-2", "k-3")


def test_more_than_an_answer_holds_is_cut_off(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    asked = ask(coordinator, aside)
    for page in range(18):  # the worker is not asked for more than the answer holds, whatever it has
        large = [made(f"k-{page}-{one}", 9999 - page, custom={"what": "x" * 40_000}) for one in range(5)]
        worker.answer_checkpoints(CheckpointAnswer(checkpoints=large, more=True), page)
    found = asked.result(20)
    assert ids(found)[0] == "k-0-0"
    assert 3_000_000 < found.ByteSize() < 2**22
    assert found.truncated


def test_one_worker_and_one_workload_go_by_their_names(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    beta = coordinator.connect(make_hello("beta", gpu_count=0))
    beta.welcome()
    one = start(coordinator, worker)
    tell(worker, reported(one, workload_pb2.WORKLOAD_STATE_EXITED, 9))
    until(lambda: state_of(coordinator) == workload_pb2.WORKLOAD_STATE_EXITED)
    asked = ask(coordinator, aside, worker="alpha", workload="one")
    query = worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-1")]))
    assert query.workload_id == one.workload_id
    assert ids(asked.result(20)) == ["k-1"]
    assert not any(frame.HasField("checkpoint_query") for frame in beta.frames)
    calls = coordinator.workloads
    assert refusal(lambda: calls.ListCheckpoints(ListCheckpointsRequest(worker="nobody"))) == (
        Code.NOT_FOUND,
        "UNKNOWN_WORKER",
    )
    assert refusal(lambda: calls.ListCheckpoints(ListCheckpointsRequest(workload="nobody"))) == (
        Code.NOT_FOUND,
        "UNKNOWN_WORKLOAD",
    )


@pytest.mark.long
def test_who_did_not_say_is_named(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    for name in ("beta", "gamma", "delta"):
        coordinator.connect(make_hello(name)).welcome()
    beta, gamma, delta = coordinator.workers[1:]
    asked = ask(coordinator, aside)
    worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-1")]))
    unreadable = Error(reason=errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, message="the disk is gone")
    beta.answer_checkpoints(CheckpointAnswer(error=unreadable))
    gamma.wait(lambda frame: frame.HasField("checkpoint_query"))
    gamma.close()
    delta.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-2")], more=True))  # and never its rest
    response = asked.result(20)
    assert ids(response) == ["k-1"]
    assert sorted(response.unreachable) == ["worker-beta", "worker-delta", "worker-gamma"]
    assert "the disk is gone" in coordinator.log()
    again = ask(coordinator, aside, worker="gamma")
    assert again.result(20) == ListCheckpointsResponse(unreachable=["worker-gamma"])


def uses(response: ListCheckpointsResponse) -> list[tuple[str, str, str]]:
    """Worker and id of each checkpoint, and whether it is in use."""
    return [
        (one.worker_id, one.checkpoint_id, "unknown" if one.in_use_unknown else str(one.in_use))
        for one in response.checkpoints
    ]


def test_what_workers_share_is_in_use_if_its_owner_or_another_worker_needs_it(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    asked = ask(coordinator, aside)
    of_alpha = {"owner_worker_id": "worker-alpha"}
    worker.answer_checkpoints(
        CheckpointAnswer(checkpoints=[made("k-4", 4, in_use=True, **of_alpha), made("k-3", 3, **of_alpha)])
    )
    beta.answer_checkpoints(
        CheckpointAnswer(
            checkpoints=[
                made("k-4", 4, **of_alpha),
                made("k-3", 3, in_use=True, in_use_unknown=True, **of_alpha),  # by a worker that guesses
                made("k-2", 2, **of_alpha),  # the list of alpha was already made
                made("k-1", 1),
            ]
        )
    )
    assert uses(asked.result(20)) == [
        ("worker-alpha", "k-4", "True"),
        ("worker-beta", "k-4", "True"),
        ("worker-alpha", "k-3", "False"),
        ("worker-beta", "k-3", "False"),
        ("worker-beta", "k-2", "unknown"),
        ("worker-beta", "k-1", "False"),
    ]


def test_what_the_workload_of_a_silent_worker_needs_is_in_use_and_the_rest_is_unknown(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    one = reported(start(coordinator, worker), STOPPED, 2)
    one.status.checkpoint_id = "k-3"
    tell(worker, one)
    until(lambda: state_of(coordinator) == STOPPED)
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    shared = [made("k-3", 3, owner_worker_id="worker-alpha"), made("k-2", 2, owner_worker_id="worker-alpha")]
    listed = CheckpointAnswer(checkpoints=[*shared, made("k-1", owner_worker_id="worker-beta")])
    expected = {"k-3": "True", "k-2": "unknown", "k-1": "False"}
    asked = ask(coordinator, aside, worker="beta")
    beta.answer_checkpoints(listed)
    assert {one: use for _, one, use in uses(asked.result(20))} == expected
    worker.close()
    for number, (expression, found) in enumerate(
        {"": [*expected], "in_use = false": ["k-1"], "in_use_unknown = true": ["k-2"]}.items(), 1
    ):
        asked = ask(coordinator, aside, filter=expression)
        beta.answer_checkpoints(listed, number)
        assert {one: use for _, one, use in uses(asked.result(20))} == {one: expected[one] for one in found}


def test_a_running_workload_is_checkpointed(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    one = start(coordinator, worker)
    calls = coordinator.workloads
    planned = aside.submit(
        lambda: calls.CheckpointWorkload(
            CheckpointWorkloadRequest(workload="one", validate_only=True), timeout=20
        )
    )
    query = worker.answer_plan(PlanAnswer(plan=Plan()))
    assert query.operation == Operation(checkpoint=CheckpointOperation())
    assert not planned.result(20).HasField("command")
    plan = aside.submit(
        lambda: (
            calls.Plan(PlanRequest(workload="one", checkpoint=query.operation.checkpoint), timeout=20).plan
        )
    )
    worker.answer_plan(PlanAnswer(plan=Plan(steps=["save"])), 1)
    assert list(plan.result(20).steps) == ["save"]
    request = CheckpointWorkloadRequest(request_id="r-1", workload="one")
    command = calls.CheckpointWorkload(request).command
    assert calls.CheckpointWorkload(request).command.command_id == command.command_id
    assert (command.workload_id, command.timeout.seconds) == (one.workload_id, 600)
    assert refusal(lambda: suspend(coordinator))[1] == "WORKLOAD_BUSY"
    assert worker.succeed("checkpoint", reported(one, CHECKPOINTED, 2)) == command.command_id
    until(lambda: state_of(coordinator) == CHECKPOINTED)
    assert refusal(lambda: calls.CheckpointWorkload(CheckpointWorkloadRequest(workload="one"))) == (
        Code.FAILED_PRECONDITION,
        "WRONG_STATE",
    )
    assert "checkpoint of one is SUCCEEDED" in [event.message for event in listed(coordinator)]


def test_checkpoints_are_deleted_by_their_worker(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    command = delete(coordinator, "k-1", "k-2")
    assert delete(coordinator, "k-1", "k-2").command_id == command.command_id
    sent = worker.command("delete_checkpoints").command
    assert list(sent.operation.delete_checkpoints.checkpoint_ids) == ["k-1", "k-2"]
    assert sent.operation.delete_checkpoints.force
    assert sent.workload_id == ""
    assert worker.succeed("delete_checkpoints") == command.command_id
    told = [event.message for event in listed(coordinator)]
    assert "delete checkpoints of worker alpha is SUCCEEDED" in told
    calls = coordinator.workloads
    assert refusal(lambda: calls.DeleteCheckpoints(DeleteCheckpointsRequest(worker="alpha"))) == (
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
    )
    twice = DeleteCheckpointsOperation(checkpoint_ids=["k-1", "k-2", "k-1"])
    with pytest.raises(grpc.RpcError, match="named twice"):
        calls.DeleteCheckpoints(DeleteCheckpointsRequest(worker="alpha", operation=twice))
    operation = DeleteCheckpointsOperation(checkpoint_ids=["k-1"])
    nobody = DeleteCheckpointsRequest(worker="nobody", operation=operation)
    assert refusal(lambda: calls.DeleteCheckpoints(nobody)) == (Code.NOT_FOUND, "UNKNOWN_WORKER")


def test_who_is_parked_in_any_way_is_woken_parked_harder_or_stopped(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    for name, state in (("one", SLEEPING), ("two", STOPPED)):
        parked = start(coordinator, worker, name)
        tell(worker, reported(parked, state, 2))
        until(lambda name=name, state=state: state_of(coordinator, name) == state)  # type: ignore[misc]
    policy = EvictionPolicy(process_strategy=eviction_pb2.PROCESS_STRATEGY_STOP)
    suspend(coordinator, operation=SuspendOperation(policy=policy))
    assert worker.command("suspend").command.operation.suspend.policy == policy
    operation = RestoreOperation(checkpoint_id="k-1")
    request = RestoreWorkloadRequest(workload="two", operation=operation)
    coordinator.workloads.RestoreWorkload(request)
    assert worker.command("restore").command.operation.restore.checkpoint_id == "k-1"
    # What is stopped has no GPUs that it comes back to: as many as its spec says are spoken for.
    third = CreateWorkloadRequest(spec=WorkloadSpec(arguments=["program"]))
    third.spec.resources.gpu_count = 2
    assert refusal(lambda: coordinator.workloads.CreateWorkload(third))[1] == "NO_FREE_GPU"


def test_what_is_on_disk_survives_the_reboot_of_its_host(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    image, stopped = start(coordinator, worker), start(coordinator, worker, "two")
    workloads = [reported(image, CHECKPOINTED, 2), reported(stopped, STOPPED, 2)]
    for parked in workloads:
        tell(worker, parked)
    until(lambda: [state_of(coordinator), state_of(coordinator, "two")] == [CHECKPOINTED, STOPPED])
    worker.close()
    back = coordinator.connect(make_hello(boot_id="boot-2", instance_id="i-2", workloads=workloads))
    back.welcome()
    assert [state_of(coordinator), state_of(coordinator, "two")] == [CHECKPOINTED, STOPPED]
    known = GetWorkerRequest(worker="alpha")
    assert coordinator.fleet.GetWorker(known).worker.free_gpu_count == 2
    assert refusal(lambda: start(coordinator, back, "two"))[1] == "WORKLOAD_EXISTS"


def create(
    coordinator: CoordinatorProcess, aside: ThreadPoolExecutor, **fields: object
) -> Future[CreateWorkloadResponse]:
    request = CreateWorkloadRequest(spec=SPEC, checkpoint_id="k-1", **fields)  # type: ignore[arg-type]
    return aside.submit(lambda: coordinator.workloads.CreateWorkload(request, timeout=20))


def test_a_workload_begins_where_its_checkpoint_is(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    beta = coordinator.connect(make_hello("beta", gpu_count=8))
    beta.welcome()
    asked = create(coordinator, aside, request_id="r-1")
    beta.wait(lambda frame: frame.HasField("checkpoint_query"))
    # Nothing else waits for the answers.
    coordinator.workloads.CreateWorkload(CreateWorkloadRequest(spec=SPEC, worker="beta"))
    beta.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-2")]))
    worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-1")]))
    created = asked.result(20)
    assert created.workload.worker_id == "worker-alpha"
    assert worker.command("run").command.operation.run.checkpoint_id == "k-1"
    assert create(coordinator, aside, request_id="r-1").result(20).command.command_id == (
        created.command.command_id
    )
    queries = [frame for frame in worker.frames if frame.HasField("checkpoint_query")]
    assert len(queries) == 1


def test_of_several_that_have_a_checkpoint_one_with_room_is_chosen(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    for name in ("beta", "gamma"):
        coordinator.connect(make_hello(name, gpu_count=1)).welcome()
    beta, gamma = coordinator.workers[1:]
    leased = [GpuLease(gpu_uuid="GPU-beta-0", state=lease_pb2.SLOT_STATE_LEASED)]
    beta.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=leased)))
    known = GetWorkerRequest(worker="beta")
    until(lambda: coordinator.fleet.GetWorker(known).worker.free_gpu_count == 0)
    for number in range(2):
        asked = create(coordinator, aside)
        worker.answer_checkpoints(CheckpointAnswer(), number)
        beta.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-1")]), number)
        having = CheckpointAnswer(checkpoints=[made("k-1")] if not number else [])
        gamma.answer_checkpoints(having, number)
        if not number:
            assert asked.result(20).workload.worker_id == "worker-gamma"
            continue
        with pytest.raises(grpc.RpcError, match="requested 1 GPU; beta: 1 GPU, 1 leased"):
            asked.result(20)


def test_a_checkpoint_that_nobody_has(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, aside: ThreadPoolExecutor
) -> None:
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()

    asked = create(coordinator, aside)
    worker.answer_checkpoints(CheckpointAnswer(checkpoints=[made("k-2")]))
    beta.answer_checkpoints(CheckpointAnswer(error=Error(message="no disk")))
    with pytest.raises(grpc.RpcError, match=r"has the checkpoint 'k-1' \(beta could not be asked\)"):
        asked.result(20)
    assert refusal(lambda: asked.result(20)) == (Code.NOT_FOUND, "UNKNOWN_CHECKPOINT")
    assert not coordinator.commands.ListCommands(ListCommandsRequest()).commands


def test_a_worker_that_is_named_looks_itself(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    calls: list[Callable[[], CreateWorkloadResponse]] = [
        lambda: coordinator.workloads.CreateWorkload(
            CreateWorkloadRequest(spec=SPEC, checkpoint_id="k-1", worker="alpha")
        ),
        lambda: coordinator.workloads.CreateWorkload(
            CreateWorkloadRequest(spec=SPEC, checkpoint_id="k-1", gpu_uuids=["GPU-alpha-1"])
        ),
    ]
    for call in calls:
        assert call().command.operation.run.checkpoint_id == "k-1"
    assert not any(frame.HasField("checkpoint_query") for frame in worker.frames)


async def connected(bench: Bench, *names: str) -> list[Session]:
    """Sessions of workers that were let in."""
    sessions = [Session(make_hello(name)) for name in names]
    for session in sessions:
        await bench.service._welcome(session)
        bench.sent(session)
    return sessions


async def asked(bench: Bench, session: Session) -> list[CheckpointQuery]:
    """The questions that a worker has got since the last call, once everything that can begin has begun."""
    for _ in range(50):
        await asyncio.sleep(0)
    return [one.checkpoint_query for one in bench.sent(session) if one.HasField("checkpoint_query")]


def test_requests_share_the_next_listing_of_all_workers(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        alpha, beta = await connected(bench, "alpha", "beta")
        requests = [asyncio.create_task(find_holders(bench.fleet.reader, "k-1"))]
        (first,) = await asked(bench, alpha)
        requests += [asyncio.create_task(find_holders(bench.fleet.reader, "k-2")) for _ in range(20)]
        assert not await asked(bench, alpha), "the next listing waits for the first"
        requests[1].cancel()  # it would have begun the listing that the others share
        alpha.answer_checkpoints(CheckpointAnswer(query_id=first.query_id, checkpoints=[made("k-1")]))
        (other,) = await asked(bench, beta)
        beta.answer_checkpoints(CheckpointAnswer(query_id=other.query_id))
        (second,) = await asked(bench, alpha)
        made_since = [made("k-1"), made("k-2")]
        alpha.answer_checkpoints(CheckpointAnswer(query_id=second.query_id, checkpoints=made_since))
        (other,) = await asked(bench, beta)
        beta.answer_checkpoints(CheckpointAnswer(query_id=other.query_id))
        del requests[1]
        assert await asyncio.gather(*requests) == [{"worker-alpha"}] * 20

    on_bench(tmp_path, scenario)


def test_listings_of_one_caller_hold_up_no_other_while_a_worker_is_silent(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        silent, other = await connected(bench, "silent", "other")
        await bench.fleet.save_workload(workload(workload_pb2.WORKLOAD_STATE_RUNNING, 1))
        request = ListCheckpointsRequest(workload="w-1")

        def ask(name: str) -> asyncio.Task[object]:
            note_caller(Caller(Identity(Kind.USER, name), "ipv4:192.0.2.1", role=Role.OPERATOR))
            return asyncio.create_task(list_checkpoints(bench.fleet.reader, request))

        flood = [ask("mallory") for _ in range(50)]
        await asked(bench, silent)
        quiet = ask("alice")
        for session in (silent, other):
            query = (await asked(bench, session))[-1]
            session.answer_checkpoints(CheckpointAnswer(query_id=query.query_id))
        await asyncio.wait_for(quiet, 5)
        for one in flood:
            one.cancel()
        await asyncio.wait(flood)

    on_bench(tmp_path, scenario)


def test_few_listings_of_a_workload_ask_all_workers_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        workers = await connected(bench, *(f"w{number}" for number in range(10)))
        await bench.fleet.save_workload(workload(workload_pb2.WORKLOAD_STATE_RUNNING, 1))
        before, request = len(asyncio.all_tasks()), ListCheckpointsRequest(workload="w-1")
        requests = [asyncio.create_task(list_checkpoints(bench.fleet.reader, request)) for _ in range(3 * 10)]
        while any(not one.done() for one in requests):
            queries = {session: await asked(bench, session) for session in workers}
            waiting = sum(not one.done() for one in requests)
            assert len(asyncio.all_tasks()) - before <= waiting + WORKLOAD_LISTINGS * len(workers)
            for session, some in queries.items():
                for query in some:
                    session.answer_checkpoints(CheckpointAnswer(query_id=query.query_id))
        assert not any(one.result().unreachable for one in requests)

    on_bench(tmp_path, scenario)
