"""Changes are whole: finished when their caller leaves, undone when they can't be stored."""

import asyncio
import gc
import logging
import time
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, event_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.operation_pb2 import Operation, RunOperation
from leasehold.v1.worker_pb2 import WORKER_STATE_LOST
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec
from leasehold.worker.v1.session_pb2 import (
    CommandUpdate,
    ConnectResponse,
    Heartbeat,
    OutputChunk,
    PlanAnswer,
    PlanQuery,
    ReadOutput,
)
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.commands.dispatcher import ASK_MINOR, NOTE_DELAY_S
from leasehold_coordinator.core import command_states
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import note_caller
from leasehold_coordinator.fleet.session import FRAME_LIMIT, Session
from leasehold_coordinator.log_context import ContextFilter
from leasehold_coordinator.server import server
from leasehold_coordinator.shielded_tasks import finish, settle
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import Change

from tests.coordinator.bench import FULL, Bench, on_bench, workload
from tests.coordinator.pages import all_events
from tests.coordinator.scripted_worker import make_hello

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
RUNNING, SUSPENDED, EXITED = (
    workload_pb2.WORKLOAD_STATE_RUNNING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_EXITED,
)


def tick_of(bench: Bench) -> server.Parts:
    return (*server._watches(bench.fleet), *server._writes(bench.fleet, bench.dispatcher))


def test_an_outcome_that_cannot_be_stored_is_not_acknowledged_and_counts_when_it_comes_again(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fleet.save_workload(workload(RUNNING, 1))
        await bench.send()
        bench.sent()
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch)
            for _ in range(2):
                with pytest.raises(FleetError, match="disk is full"):
                    await bench.update(SUCCEEDED)
                with pytest.raises(FleetError, match="disk is full"):
                    await bench.update(SUCCEEDED, workload(EXITED, 2))
        assert bench.sent() == []
        assert list(bench.fleet.ledger.commands) == ["c-1"]
        assert bench.fleet.workloads["w-1"] == workload(RUNNING, 1)
        await bench.update(SUCCEEDED, workload(EXITED, 2))
        assert [frame.command_ack.command_id for frame in bench.sent()] == ["c-1"]
        stored = await bench.store.find_command("c-1")
        assert stored is not None
        assert stored.state == SUCCEEDED
        ended = await bench.store.find_workload("w-1")
        assert ended == workload(EXITED, 2)
        assert not bench.fleet.ledger.commands
        assert not bench.fleet.workloads

    on_bench(tmp_path, scenario)


def test_an_acceptance_that_an_outcome_overtook_is_stored_if_the_outcome_cannot_be_stored(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        with pytest.MonkeyPatch.context() as monkeypatch:
            commands = bench.hold_writes(monkeypatch, schema.commands, FULL)
            await bench.update(command_states.ACCEPTED)
            outcome = asyncio.create_task(bench.update(SUCCEEDED))
            await commands.reached.wait()
            while bench.dispatcher._noted:  # noqa: ASYNC110 - what was noted has its turn by a timer
                await asyncio.sleep(NOTE_DELAY_S / 10)
            commands.opened.set()
            with pytest.raises(FleetError, match="disk is full"):
                await outcome
        async with asyncio.timeout(10):
            while not bench.fleet.ledger.on_disk["c-1"].accepted:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(NOTE_DELAY_S / 10)
        await settle()
        (stored,) = await bench.store.open_commands()
        assert stored.accepted, "a coordinator that restarts now does not send the command again"

    on_bench(tmp_path, scenario)


async def tick_until_refused(bench: Bench) -> None:
    async with asyncio.timeout(10):
        while True:
            await asyncio.sleep(0)
            await bench.dispatcher.tick()


@pytest.mark.parametrize("state", [command_states.ACCEPTED, command_states.RUNNING])
def test_a_step_that_cannot_be_stored_is_not_told_and_tried_again(
    tmp_path: Path, state: CommandState.ValueType
) -> None:
    async def scenario(bench: Bench) -> None:
        before = await bench.send()
        with bench.fleet.reader.command_hub.subscribe("c-1") as subscription:
            with pytest.MonkeyPatch.context() as monkeypatch:
                commands = bench.hold_writes(monkeypatch, schema.commands, FULL)
                await bench.update(state)
                await commands.reached.wait()
                assert await bench.fleet.reader.find_command("c-1") == before
                commands.opened.set()
                with pytest.raises(FleetError, match="disk is full"):
                    await tick_until_refused(bench)
                assert await bench.fleet.reader.find_command("c-1") == before == await bench.stored()
            await bench.dispatcher.tick()
            async with asyncio.timeout(10):
                change = await anext(subscription.changes())
            assert change is not None
            assert (
                change.message.command == await bench.stored() == await bench.fleet.reader.find_command("c-1")
            )
            assert change.message.command.state == state

    on_bench(tmp_path, scenario)


def test_steps_that_come_together_are_one_write_and_an_outcome_takes_their_place(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        writes: list[int] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            write_now = bench.store.write

            async def write(*rows: Change) -> None:
                writes.append(sum(row.table is schema.commands for row in rows))
                await write_now(*rows)

            monkeypatch.setattr(bench.store, "write", write)
            with bench.fleet.reader.command_hub.subscribe("c-1") as subscription:
                await bench.update(command_states.ACCEPTED)
                await bench.update(command_states.RUNNING)
                async with asyncio.timeout(10):
                    change = await anext(subscription.changes())
            assert change is not None
            assert change.message.command.state == command_states.RUNNING
            assert writes == [1]
            await bench.send("c-2", workload_id="w-2")
            update = CommandUpdate(command_id="c-2", state=command_states.ACCEPTED)
            await bench.dispatcher.update(bench.session, update)
            update.state = SUCCEEDED
            await bench.dispatcher.update(bench.session, update)
            while bench.dispatcher._is_noting:  # noqa: ASYNC110 - what was noted has its turn by a timer
                await asyncio.sleep(NOTE_DELAY_S / 10)
            await settle()
            assert writes == [1, 1, 1], "stored, running; created; ended"

    on_bench(tmp_path, scenario)


def test_a_command_that_cannot_be_stored_was_not_created(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch)
            with pytest.raises(FleetError):
                await bench.send()
        assert not bench.fleet.ledger.commands
        assert bench.sent() == []
        assert await bench.store.find_command("c-1") is None

    on_bench(tmp_path, scenario)


def test_a_change_is_finished_when_its_caller_leaves(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        bench.sent()
        with bench.fleet.reader.command_hub.subscribe("c-1") as subscription:
            update = CommandUpdate(command_id="c-1", state=SUCCEEDED)
            handler = asyncio.create_task(finish(bench.dispatcher.update(bench.session, update)))
            await asyncio.sleep(0)  # it has begun
            handler.cancel()
            with pytest.raises(asyncio.CancelledError):
                await handler
            async with asyncio.timeout(10):
                async for change in subscription.changes():
                    assert change is not None
                    assert change.message.command.state == SUCCEEDED
                    break
                assert bench.sent()
        assert not bench.fleet.ledger.commands

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (FleetError(errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT, "no checkpoint has this id"), []),
        (KeyError("a defect"), ["background work failed"]),
    ],
)
def test_a_failure_that_nobody_waits_for_is_logged_unless_it_is_a_refusal(
    caplog: pytest.LogCaptureFixture, error: Exception, logged: list[str]
) -> None:
    async def fail(left: asyncio.Event) -> None:
        await left.wait()
        raise error

    async def scenario() -> None:
        left = asyncio.Event()
        handler = asyncio.create_task(finish(fail(left)))
        await asyncio.sleep(0)  # it has begun
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        left.set()
        await settle()

    asyncio.run(scenario())
    gc.collect()
    assert [record.message for record in caplog.records] == logged


@pytest.mark.parametrize("state", [0, 1, 2, 10, 99])
def test_states_that_workers_do_not_report_are_ignored(tmp_path: Path, state: CommandState.ValueType) -> None:
    async def scenario(bench: Bench) -> None:
        before = await bench.send()
        bench.sent()
        await bench.update(state)
        assert bench.fleet.ledger.commands["c-1"].command == before
        assert bench.sent() == []

    on_bench(tmp_path, scenario)


def test_an_unknown_duration_of_a_command_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(bench: Bench) -> None:
        await bench.send()
        await bench.update(SUCCEEDED)

    on_bench(tmp_path, scenario)
    (ended,) = [each for each in caplog.records if hasattr(each, "outcome")]
    assert ended.message == "suspend SUCCEEDED"
    assert not hasattr(ended, "duration_s")


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_step_that_is_behind_is_no_warning_and_names_its_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_taken: bool
) -> None:
    """A worker reports its open commands as ACCEPTED again after a restart."""
    caplog.set_level(logging.DEBUG)
    caplog.handler.addFilter(ContextFilter())

    async def scenario(bench: Bench) -> None:
        await bench.send()
        await bench.update(command_states.RUNNING)
        update = CommandUpdate(command_id="c-1", state=command_states.ACCEPTED)
        left = (bench.dispatcher.take if is_taken else bench.dispatcher.update)(bench.session, update)
        if left is not None:
            await left

    on_bench(tmp_path, scenario)
    (behind,) = [each for each in caplog.records if each.message.startswith("ignored")]
    assert behind.message == "ignored an update to ACCEPTED: the command is RUNNING"
    assert behind.levelno == logging.DEBUG
    assert behind.__dict__["names"].items() >= {"command": "c-1", "workload": "w-1"}.items()


def test_an_outcome_is_final(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        for state in (SUCCEEDED, command_states.FAILED, command_states.RUNNING):
            await bench.update(state)
        stored = await bench.store.find_command("c-1")
        assert stored is not None
        assert (stored.state, stored.revision) == (SUCCEEDED, 2)

    on_bench(tmp_path, scenario)


def test_a_workload_is_reported_by_its_own_worker(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        beta = Session(make_hello("beta"))
        bench.fleet.sessions["worker-beta"] = beta
        await bench.fleet.apply_workload(workload(RUNNING, 1), bench.session)
        for reported, session in ((workload(EXITED, 2), beta), (Workload(), bench.session)):
            with pytest.raises(FleetError) as error:
                await bench.fleet.apply_workload(reported, session)
            assert error.value.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
            assert bench.fleet.workloads["w-1"].status.state == RUNNING

    on_bench(tmp_path, scenario)


def test_a_workload_that_was_not_started_fails_in_the_same_write(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        pending = workload(workload_pb2.WORKLOAD_STATE_PENDING, 0)
        run = Operation(run=RunOperation(name="one"))
        command = Command(command_id="c-1", worker_id="worker-alpha", workload_id="w-1", operation=run)
        await bench.dispatcher.create(command, pending)
        writes = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            write_now = bench.store.write

            async def write(*rows: Change) -> None:
                writes.append({row.table.name for row in rows})
                await write_now(*rows)

            monkeypatch.setattr(bench.store, "write", write)
            await bench.update(command_states.FAILED)
        assert writes == [{"commands", "workloads", "events"}]
        failed = await bench.store.find_workload("w-1")
        assert failed is not None
        assert failed.status.state == workload_pb2.WORKLOAD_STATE_FAILED
        assert not bench.fleet.workloads

    on_bench(tmp_path, scenario)


def test_a_report_that_cannot_be_stored_does_not_take_a_newer_one_back(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.fleet.save_workload(workload(RUNNING, 1))
        with pytest.MonkeyPatch.context() as monkeypatch:
            gate = bench.hold_writes(monkeypatch, schema.workloads, FULL)
            older = asyncio.create_task(bench.fleet.apply_workload(workload(SUSPENDED, 2), bench.session))
            await gate.reached.wait()
            monkeypatch.undo()
            await bench.fleet.apply_workload(workload(SUSPENDED, 3), bench.session)
            gate.opened.set()
            with pytest.raises(FleetError):
                await older
        assert bench.fleet.workloads["w-1"].status.generation == 3

    on_bench(tmp_path, scenario)


def test_a_step_that_cannot_be_stored_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        ids = ["c-1", "c-2", "c-3"]
        for number, command_id in enumerate(ids):
            await bench.send(command_id, workload_id=f"w-{number}", timeout_s=1e-9)
        del bench.fleet.sessions["worker-alpha"]
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch, times=1)
            with pytest.raises(FleetError, match="disk is full"):
                await bench.dispatcher.tick()
        states = [(await bench.stored(command_id)).state for command_id in ids]
        assert states == [command_states.DISPATCHED, command_states.UNKNOWN, command_states.UNKNOWN]
        await bench.dispatcher.tick()
        assert (await bench.stored()).state == command_states.UNKNOWN

    on_bench(tmp_path, scenario)


def test_no_part_of_a_tick_is_left_out_because_another_failed(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        session = Session(make_hello())
        await bench.service._welcome(session)
        await bench.send(timeout_s=1e-9)
        bench.service._forget(session)
        assert session.known is not None
        session.known.last_seen = -1e9
        with pytest.MonkeyPatch.context() as monkeypatch, bench.fleet.reader.fleet_hub.subscribe() as watcher:
            bench.fail_writes(monkeypatch, times=1)
            await server._tick_once(tick_of(bench))
            change = await anext(watcher.changes())
        assert change is not None
        assert change.message.worker.state == WORKER_STATE_LOST
        assert await all_events(bench.store, "worker-alpha")

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("is_full", [False, True], ids=["disk works", "disk is full at first"])
def test_a_command_whose_secret_variables_are_lost_ends_unless_the_worker_has_it(
    tmp_path: Path, is_full: bool
) -> None:
    pending = workload(workload_pb2.WORKLOAD_STATE_PENDING, 0)
    spec = WorkloadSpec(secret_environment={"TOKEN": "sealed with another key"})
    run = Operation(run=RunOperation(name="one", spec=spec))

    async def before(bench: Bench) -> None:
        del bench.fleet.sessions["worker-alpha"]
        for number in (1, 2):
            created = Workload()
            created.CopyFrom(pending)
            created.workload_id = f"w-{number}"
            command = Command(command_id=f"c-{number}", worker_id="worker-alpha", operation=run)
            command.workload_id = created.workload_id
            await bench.dispatcher.create(command, created)

    async def after(bench: Bench) -> None:
        await bench.fleet.load()
        bench.session.hello.protocol_version.minor = ASK_MINOR
        bench.session.hello.commands_in_flight.append("c-2")
        await bench.dispatcher.welcome(bench.session)
        (frame,) = bench.sent()
        assert frame.command.command.command_id == "c-2"
        assert frame.command.ask
        assert not frame.command.command.operation.run.spec.secret_environment["TOKEN"]
        if is_full:
            with pytest.MonkeyPatch.context() as monkeypatch:
                bench.fail_writes(monkeypatch)
                with pytest.raises(FleetError, match="disk is full"):
                    await bench.dispatcher.tick()
        await bench.dispatcher.tick()
        await bench.dispatcher.tick()
        assert bench.sent() == []
        ended = await bench.stored()
        assert ended.state == command_states.FAILED
        assert "the key of its secret variables is lost" in ended.error.message
        failed = await bench.store.find_workload("w-1")
        assert failed is not None
        assert failed.status.state == workload_pb2.WORKLOAD_STATE_FAILED
        assert list(bench.fleet.ledger.commands) == ["c-2"]

    on_bench(tmp_path, before)
    on_bench(tmp_path, after)


def test_the_stream_of_a_worker_that_hangs_is_ended_and_its_commands_are_unknown(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        session = Session(make_hello())
        await bench.service._welcome(session)
        await bench.send()
        assert session.known is not None
        await server._tick_once(tick_of(bench))
        assert not session.ended.done()
        session.known.last_seen = -1e9
        await server._tick_once(tick_of(bench))
        assert session.ended.done()
        goodbye = bench.sent(session)[-1].goodbye
        assert "worker alpha sent nothing" in goodbye.error.message
        bench.service._forget(session)
        await server._tick_once(tick_of(bench))
        assert (await bench.stored()).state == command_states.UNKNOWN

    on_bench(tmp_path, scenario)


def test_output_that_does_not_come_is_refused() -> None:
    async def run() -> None:
        session = Session(make_hello())
        with pytest.raises(FleetError) as late:
            await session.read_output(ReadOutput(), timeout_s=0.01)
        waiting = asyncio.create_task(session.read_output(ReadOutput(), timeout_s=60))
        await asyncio.sleep(0)
        session.end()
        with pytest.raises(FleetError) as ended:
            await waiting
        with pytest.raises(FleetError) as too_late:
            await asyncio.wait_for(session.read_output(ReadOutput(), timeout_s=60), 5)
        for error in (late, ended, too_late):
            assert error.value.reason == errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE

    asyncio.run(run())


def test_a_plan_that_does_not_come_is_refused_with_what_may_be_the_cause() -> None:
    async def run() -> None:
        session = Session(make_hello())
        with pytest.raises(FleetError, match=r"alpha sent no plan within 0.01 s.*look at the host") as late:
            await session.plan(PlanQuery(), timeout_s=0.01)
        waiting = asyncio.create_task(session.plan(PlanQuery(), timeout_s=60))
        await asyncio.sleep(0)
        session.end()
        with pytest.raises(FleetError, match="alpha disconnected") as ended:
            await waiting
        with pytest.raises(FleetError, match="alpha disconnected") as too_late:
            await asyncio.wait_for(session.plan(PlanQuery(), timeout_s=60), 5)
        for error in (late, ended, too_late):
            assert error.value.reason == errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE
            assert error.value.metadata == {"worker": "alpha"}

    asyncio.run(run())


def test_each_question_gets_its_own_answer_and_only_one() -> None:
    async def run() -> None:
        session = Session(make_hello())
        asked = [asyncio.create_task(session.plan(PlanQuery(), timeout_s=60)) for _ in range(2)]
        reading = asyncio.create_task(session.read_output(ReadOutput(), timeout_s=60))
        note_caller(Caller(Identity(Kind.USER, "ann"), "ipv4:192.0.2.1"))  # one caller has two places
        gone = asyncio.create_task(session.plan(PlanQuery(), timeout_s=60))
        await asyncio.sleep(0)
        first, second, read, left = session.frames
        gone.cancel()
        await asyncio.wait({gone})
        session.answer_plan(PlanAnswer(plan_id=left.plan_query.plan_id))
        session.answer_plan(PlanAnswer(plan_id="never asked"))
        session.answer_read(OutputChunk(read_id=first.plan_query.plan_id))
        answers = [PlanAnswer(plan_id=frame.plan_query.plan_id) for frame in (second, first)]
        for answer in [*answers, *answers]:
            session.answer_plan(answer)
        assert [await plan for plan in asked] == [answers[1], answers[0]]
        session.answer_read(OutputChunk(read_id=read.read_output.read_id, data=b"x"))
        assert (await reading).data == b"x"

    asyncio.run(run())


def test_a_worker_that_does_not_read_loses_its_session() -> None:
    async def run() -> None:
        session = Session(make_hello())
        for _ in range(FRAME_LIMIT):
            session.send(ConnectResponse(heartbeat=Heartbeat()))
        assert not session.ended.done()
        session.send(ConnectResponse(heartbeat=Heartbeat()))
        assert session.ended.done()
        session.send(ConnectResponse(heartbeat=Heartbeat()))
        assert len(session.frames) == FRAME_LIMIT + 1, "a goodbye"

    asyncio.run(run())


@pytest.mark.parametrize("jump_s", [30 * 86_400, -30 * 86_400])
def test_a_clock_that_jumps_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.fleet.sessions.clear()
        await bench.send(timeout_s=60)
        wall_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + jump_s * 10**9)
        await bench.dispatcher.tick()
        assert (await bench.stored()).state == command_pb2.COMMAND_STATE_PENDING
        bench.fleet.sessions["worker-alpha"] = bench.session
        await bench.dispatcher.welcome(bench.session)
        (frame,) = bench.sent()
        assert 30 < frame.command.command.timeout.seconds <= 60

        boot_ns = time.clock_gettime_ns
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + (jump_s + 61) * 10**9)
        monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: boot_ns(clock) + 61 * 10**9)
        bench.fleet.sessions.clear()
        await bench.dispatcher.tick()
        assert (await bench.stored()).state == command_pb2.COMMAND_STATE_UNKNOWN, "its time is over"

    on_bench(tmp_path, scenario)


def test_what_clients_do_not_see_of_a_command_is_neither_an_event_nor_a_change(tmp_path: Path) -> None:
    """The wish to cancel and the instance of the worker are stored, and the command keeps its revision."""

    async def scenario(bench: Bench) -> None:
        with bench.fleet.reader.command_hub.subscribe() as commands:
            await bench.dispatcher.cancel(await bench.send())
            again = Session(make_hello(instance_id="instance-2"))
            bench.fleet.sessions["worker-alpha"] = again
            again.earlier = frozenset(["c-1"])
            await bench.dispatcher.welcome(again)
            assert bench.fleet.ledger.on_disk["c-1"].instance_id == "instance-2"
            await bench.dispatcher.update(again, CommandUpdate(command_id="c-1", state=SUCCEEDED))
            changes = commands.until(bench.fleet.reader.command_hub.revision)
            revisions = [change.message.command.revision for change in changes]
        assert revisions == sorted({*revisions})
        kinds = [event.kind for event in await all_events(bench.store)]
        assert kinds == [event_pb2.EVENT_KIND_COMMAND_ENDED, event_pb2.EVENT_KIND_COMMAND_CREATED]

    on_bench(tmp_path, scenario)
