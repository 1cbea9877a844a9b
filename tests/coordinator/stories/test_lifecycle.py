"""Commands that wait, end without their worker, or outlive the coordinator."""

import asyncio
import signal
import time
from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.command_service_pb2 import CancelCommandRequest, GetCommandRequest, WatchCommandRequest
from leasehold.v1.operation_pb2 import Operation, RunOperation
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec, WorkloadState, WorkloadStatus
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest, GetWorkloadRequest
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest, ProtocolVersion
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.command_states import is_terminal
from leasehold_coordinator.storage.rows import Row, command_row, worker_row, workload_row
from leasehold_coordinator.storage.store import Store

from tests.coordinator.api.test_command_service import ended, start, suspend
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

PENDING, DISPATCHED, ACCEPTED, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED = (
    command_pb2.COMMAND_STATE_PENDING,
    command_pb2.COMMAND_STATE_DISPATCHED,
    command_pb2.COMMAND_STATE_ACCEPTED,
    command_pb2.COMMAND_STATE_RUNNING,
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_CANCELLED,
    command_pb2.COMMAND_STATE_EXPIRED,
)


def store_pending(coordinator: CoordinatorProcess, timeout_s: int) -> None:
    """Leaves the store as a coordinator does that dies between storing a command and sending it."""
    coordinator.end(signal.SIGKILL)
    workload = Workload(workload_id="w-1", name="one", worker_id="worker-alpha")
    workload.status.state = workload_pb2.WORKLOAD_STATE_PENDING
    run = RunOperation(name="one", spec=WorkloadSpec(arguments=["program"]))
    command = Command(
        command_id="c-1",
        workload_id="w-1",
        worker_id="worker-alpha",
        state=PENDING,
        revision=1,
        timeout=Duration(seconds=timeout_s),
        operation=Operation(run=run),
    )
    for message in (workload, command):
        message.create_time.GetCurrentTime()
    write(
        coordinator, worker_row(7, make_hello()), workload_row(workload), command_row(StoredCommand(command))
    )
    coordinator.start()


def write(coordinator: CoordinatorProcess, *rows: Row) -> None:
    async def run() -> None:
        store = Store.open(str(coordinator.folder / "store.sqlite3"))
        await store.write(*rows)
        store.close()

    asyncio.run(run())


def state_of(coordinator: CoordinatorProcess, workload: str = "one") -> WorkloadState.ValueType:
    request = GetWorkloadRequest(workload=workload)
    return coordinator.workloads.GetWorkload(request).workload.status.state


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def states_until_the_end(coordinator: CoordinatorProcess, command_id: str) -> list[CommandState.ValueType]:
    request = WatchCommandRequest(command_id=command_id)
    return [r.command.state for r in coordinator.commands.WatchCommand(request, timeout=20)]


def test_a_command_that_was_stored_and_not_sent_is_sent_when_its_worker_comes(
    coordinator: CoordinatorProcess,
) -> None:
    store_pending(coordinator, timeout_s=60)
    worker = coordinator.connect()
    welcome = worker.welcome()
    assert (welcome.epoch, list(welcome.open_command_ids)) == (8, ["c-1"])
    assert worker.frames[0].HasField("welcome"), "nothing comes before the welcome"
    assert worker.succeed("run") == "c-1"
    assert ended(coordinator, "c-1").state == SUCCEEDED


@pytest.mark.long
def test_a_command_that_was_never_sent_expires_and_its_workload_has_failed(
    coordinator: CoordinatorProcess,
) -> None:
    store_pending(coordinator, timeout_s=1)
    outcome = ended(coordinator, "c-1")
    assert (outcome.state, outcome.error.reason) == (EXPIRED, errors_pb2.ERROR_REASON_EXPIRED)
    assert outcome.HasField("end_time")
    assert state_of(coordinator) == workload_pb2.WORKLOAD_STATE_FAILED
    worker = coordinator.connect()
    assert not worker.welcome().open_command_ids


def test_a_command_that_was_never_sent_is_cancelled_at_once(coordinator: CoordinatorProcess) -> None:
    store_pending(coordinator, timeout_s=60)
    request = CancelCommandRequest(command_id="c-1")
    cancelled = coordinator.commands.CancelCommand(request).command
    assert (cancelled.state, cancelled.error.reason) == (CANCELLED, errors_pb2.ERROR_REASON_CANCELLED)
    assert coordinator.commands.CancelCommand(request).command == cancelled, "a second time changes nothing"
    assert state_of(coordinator) == workload_pb2.WORKLOAD_STATE_FAILED
    assert not coordinator.connect().welcome().open_command_ids


def test_a_cancel_that_nobody_can_be_asked_for_is_remembered(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    command = suspend(coordinator)
    worker.command("suspend")
    coordinator.restart()
    request = CancelCommandRequest(command_id=command.command_id)
    assert not is_terminal(coordinator.commands.CancelCommand(request).command.state)
    coordinator.restart()
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=1)
    running = Workload(workload_id=started.workload_id, name="one", status=status)
    back = coordinator.connect(make_hello(workloads=[running]))
    back.command("suspend")
    assert back.command("suspend", cancel=True).command.command_id == command.command_id
    back.update(command.command_id, CANCELLED)
    assert ended(coordinator, command.command_id).state == CANCELLED


def test_a_watch_tells_every_state_in_order_from_the_creation_on(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    spec = WorkloadSpec(arguments=["program"])
    created = coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="one", spec=spec))
    watching = coordinator.commands.WatchCommand(
        WatchCommandRequest(command_id=created.command.command_id), timeout=20
    )
    first = next(watching).command
    seen = [first]
    worker.command("run")
    for state in (ACCEPTED, RUNNING, SUCCEEDED):
        worker.update(first.command_id, state, phase="at it" if state == RUNNING else "")
        while seen[-1].state != state:
            seen.append(next(watching).command)
    assert list(watching) == []
    order = [PENDING, DISPATCHED, ACCEPTED, RUNNING, SUCCEEDED]
    assert [command.state for command in seen] == order[order.index(first.state) :]
    assert [command.revision for command in seen] == sorted({command.revision for command in seen})
    assert seen[-2].phase == "at it"
    assert states_until_the_end(coordinator, first.command_id) == [SUCCEEDED]


def test_of_a_quick_command_steps_may_be_left_out_and_none_is_told_out_of_order(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    spec = WorkloadSpec(arguments=["program"])
    created = coordinator.workloads.CreateWorkload(CreateWorkloadRequest(name="one", spec=spec))
    watching = coordinator.commands.WatchCommand(
        WatchCommandRequest(command_id=created.command.command_id), timeout=20
    )
    seen = [next(watching).command]
    worker.succeed("run")
    seen += [response.command for response in watching]
    order = [PENDING, DISPATCHED, ACCEPTED, RUNNING, SUCCEEDED]
    assert [command.state for command in seen] == [
        state for state in order if state in {command.state for command in seen}
    ]
    assert seen[-1].state == SUCCEEDED


@pytest.mark.long
@pytest.mark.usefixtures("executed")
def test_an_acknowledged_outcome_survives_a_kill(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    suspend(coordinator, request_id="r1")
    command_id = worker.succeed("suspend")
    coordinator.restart()
    assert ended(coordinator, command_id).state == SUCCEEDED
    assert suspend(coordinator, request_id="r1").command_id == command_id


def test_a_workload_that_came_up_again_on_its_worker_is_the_same(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    coordinator.restart()
    assert state_of(coordinator) == workload_pb2.WORKLOAD_STATE_RUNNING, "unconfirmed is not gone"
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_SUSPENDED, generation=2)
    parked = Workload(workload_id=started.workload_id, name="one", status=status)
    back = coordinator.connect(make_hello(workloads=[parked]))
    back.welcome()
    until(lambda: state_of(coordinator) == workload_pb2.WORKLOAD_STATE_SUSPENDED)
    back.close()
    coordinator.connect(make_hello(instance_id="instance-2")).welcome()
    until(lambda: state_of(coordinator) == workload_pb2.WORKLOAD_STATE_FAILED)


def test_what_a_worker_brings_along_is_known_afterwards(coordinator: CoordinatorProcess) -> None:
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING, generation=4)
    coordinator.connect(
        make_hello(workloads=[Workload(workload_id="w-9", name="nine", status=status)])
    ).welcome()
    found = coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="nine")).workload
    assert (found.worker_id, found.status.generation) == ("worker-alpha", 4)


@pytest.mark.parametrize("remembers", [True, False])
def test_a_store_from_a_backup_asks_what_became_of_its_commands(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, remembers: bool
) -> None:
    started = start(coordinator, worker)
    command_id = suspend(coordinator).command_id
    worker.command("suspend")
    worker.update(command_id, ACCEPTED)
    until(lambda: command_of(coordinator, command_id).state == ACCEPTED)
    coordinator.end(signal.SIGKILL)
    files = [one for one in coordinator.folder.iterdir() if one.name.startswith("store.sqlite3")]
    backup = {one: one.read_bytes() for one in files}
    coordinator.start()
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_SUSPENDED, generation=2)
    parked = Workload(workload_id=started.workload_id, name="one", status=status)
    version = ProtocolVersion(major=1, minor=3)
    hello = make_hello(workloads=[parked], protocol_version=version, commands_in_flight=[command_id])
    hello.last_epoch = 1
    again = coordinator.connect(hello)
    assert again.welcome().epoch == 2
    again.update(command_id, SUCCEEDED)
    assert ended(coordinator, command_id).state == SUCCEEDED
    coordinator.end(signal.SIGKILL)
    for file, data in backup.items():
        file.write_bytes(data)
    coordinator.start()
    back = coordinator.connect(make_hello(workloads=[parked], protocol_version=version, last_epoch=2))
    assert back.command("suspend").ask
    if remembers:
        back.update(command_id, SUCCEEDED)
        assert ended(coordinator, command_id).state == SUCCEEDED
        return
    unknown = errors_pb2.Error(reason=errors_pb2.ERROR_REASON_UNKNOWN_COMMAND)
    rejected = CommandUpdate(command_id=command_id, state=command_pb2.COMMAND_STATE_REJECTED, error=unknown)
    back.up.put(ConnectRequest(command_update=rejected))
    over = ended(coordinator, command_id)
    assert (over.state, over.error.reason) == (FAILED, errors_pb2.ERROR_REASON_INTERRUPTED)


def command_of(coordinator: CoordinatorProcess, command_id: str) -> Command:
    return coordinator.commands.GetCommand(GetCommandRequest(command_id=command_id)).command
