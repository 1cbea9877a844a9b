"""What happens while a worker is being let in: its hello is judged by what was known when it came."""

import asyncio
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.worker_pb2 import HostFacts
from leasehold.worker.v1.session_pb2 import CommandUpdate, Hello
from leasehold_coordinator.access.worker_bindings import WorkerBinding
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import CONNECT
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.audit_chain import Link
from leasehold_coordinator.storage.enrolment_rows import read_bindings
from leasehold_coordinator.storage.rows import worker_row

from tests.coordinator.bench import FULL, Bench, on_bench, workload
from tests.coordinator.scripted_worker import make_hello

DISPATCHED, RUNNING, SUCCEEDED = (
    command_pb2.COMMAND_STATE_DISPATCHED,
    command_pb2.COMMAND_STATE_RUNNING,
    command_pb2.COMMAND_STATE_SUCCEEDED,
)
EXITED = workload(workload_pb2.WORKLOAD_STATE_EXITED, 3)


def session_of(bench: Bench, hello: Hello | None = None) -> Session:
    """A stream on which only the hello has come."""
    bench.service._forget(bench.session)
    return Session(hello or make_hello())


def commands_on(bench: Bench, session: Session) -> list[str]:
    frames = bench.sent(session)
    assert frames[0].HasField("welcome"), "nothing comes before the welcome"
    return [frame.command.command.command_id for frame in frames[1:]]


@pytest.mark.parametrize("error", [None, FULL])
def test_a_command_that_is_being_stored_is_not_sent_by_the_welcome(
    tmp_path: Path, error: FleetError | None
) -> None:
    async def scenario(bench: Bench) -> None:
        session = session_of(bench)
        with pytest.MonkeyPatch.context() as monkeypatch:
            commands = bench.hold_writes(monkeypatch, schema.commands, error)
            workers = bench.hold_writes(monkeypatch, schema.workers)
            welcoming = asyncio.create_task(bench.service._welcome(session))
            await workers.reached.wait()
            creating = asyncio.create_task(bench.send())
            await commands.reached.wait()
            workers.opened.set()
            await welcoming
            await bench.dispatcher.tick()
            assert commands_on(bench, session) == []
            commands.opened.set()
            (result,) = await asyncio.gather(creating, return_exceptions=True)
        assert result == FULL if error else (await bench.stored()).state == DISPATCHED
        assert len(bench.sent(session)) == (0 if error else 1)

    on_bench(tmp_path, scenario)


def test_a_command_of_this_session_does_not_expire_by_its_welcome(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        session = session_of(bench)
        with pytest.MonkeyPatch.context() as monkeypatch:
            workers = bench.hold_writes(monkeypatch, schema.workers)
            welcoming = asyncio.create_task(bench.service._welcome(session))
            await workers.reached.wait()
            await bench.send(timeout_s=1e-9)
            workers.opened.set()
            await welcoming
        assert commands_on(bench, session) == ["c-1"]
        assert (await bench.stored()).state == DISPATCHED

    on_bench(tmp_path, scenario)


def test_a_command_that_waits_is_not_sent_before_the_hello_is_compared(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        session = session_of(bench)
        await bench.send()
        assert (await bench.stored()).state == command_pb2.COMMAND_STATE_PENDING
        with pytest.MonkeyPatch.context() as monkeypatch:
            workers = bench.hold_writes(monkeypatch, schema.workers)
            welcoming = asyncio.create_task(bench.service._welcome(session))
            await workers.reached.wait()
            await bench.dispatcher.tick()
            assert commands_on(bench, session) == []
            workers.opened.set()
            await welcoming
        assert [frame.command.command.command_id for frame in bench.sent(session)] == ["c-1"]

    on_bench(tmp_path, scenario)


def test_the_hello_of_a_stream_that_broke_ends_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        first, second = session_of(bench, make_hello(workloads=[EXITED])), Session(make_hello())
        with pytest.MonkeyPatch.context() as monkeypatch:
            reads = bench.hold_reads(monkeypatch)
            welcoming = asyncio.create_task(bench.service._welcome(first))
            await reads.reached.wait()
            bench.service._forget(first)
            following = asyncio.create_task(bench.service._welcome(second))
            reads.opened.set()
            await asyncio.gather(welcoming, following)
        assert commands_on(bench, second) == ["c-1"]
        assert not bench.fleet.workloads, "it was reported by the stream that broke"
        for state in (RUNNING, SUCCEEDED):
            await bench.dispatcher.update(second, CommandUpdate(command_id="c-1", state=state))
        assert (await bench.stored()).state == SUCCEEDED
        assert not bench.service._turns, "nothing is left of who was let in"

    on_bench(tmp_path, scenario)


def test_the_hello_of_a_stream_that_broke_fails_no_workload(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        running = workload(workload_pb2.WORKLOAD_STATE_RUNNING, 1)
        await bench.fleet.save_workload(running)
        session = session_of(bench)
        with pytest.MonkeyPatch.context() as monkeypatch:
            workers = bench.hold_writes(monkeypatch, schema.workers)
            welcoming = asyncio.create_task(bench.service._welcome(session))
            await workers.reached.wait()
            bench.service._forget(session)
            workers.opened.set()
            await welcoming
        assert bench.fleet.workloads == {"w-1": running}

    on_bench(tmp_path, scenario)


def test_a_stream_that_broke_before_its_turn_is_not_let_in(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        session = session_of(bench)
        bench.service._forget(session)
        await bench.service._welcome(session)
        assert not bench.fleet.sessions
        assert bench.fleet.registry.get("worker-alpha") is None

    on_bench(tmp_path, scenario)


def test_of_two_hosts_that_come_at_once_with_one_id_one_is_let_in(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        first = session_of(bench)
        second = Session(make_hello(host=HostFacts(hostname="host-2"), boot_id="boot-2"))
        results = await asyncio.gather(
            bench.service._welcome(first), bench.service._welcome(second), return_exceptions=True
        )
        assert results[0] is None
        assert isinstance(results[1], FleetError)
        assert results[1].reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID
        assert bench.fleet.sessions == {"worker-alpha": first}

    on_bench(tmp_path, scenario)


def test_what_came_on_a_superseded_stream_changes_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        with pytest.MonkeyPatch.context() as monkeypatch:
            reads = bench.hold_reads(monkeypatch)
            updating = asyncio.create_task(bench.update(SUCCEEDED, EXITED))
            await reads.reached.wait()
            newer = Session(make_hello(commands_unacknowledged=["c-1"]))
            await bench.service._welcome(newer)
            reads.opened.set()
            await updating
        assert (await bench.stored()).state == DISPATCHED
        assert await bench.store.find_workload("w-1") is None
        await bench.dispatcher.update(newer, CommandUpdate(command_id="c-1", state=SUCCEEDED))
        assert (await bench.stored()).state == SUCCEEDED

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("error", [None, FULL])
def test_an_outcome_that_is_being_stored_is_acknowledged_once_it_is(
    tmp_path: Path, error: FleetError | None
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        with pytest.MonkeyPatch.context() as monkeypatch:
            commands = bench.hold_writes(monkeypatch, schema.commands, error)
            updating = asyncio.create_task(bench.update(SUCCEEDED))
            await commands.reached.wait()
            newer = Session(make_hello(commands_unacknowledged=["c-1"]))
            await bench.service._welcome(newer)
            again = CommandUpdate(command_id="c-1", state=SUCCEEDED)
            repeating = asyncio.create_task(bench.dispatcher.update(newer, again))
            await bench.store.workers()  # time for whatever would go wrong
            assert [frame.WhichOneof("frame") for frame in bench.sent(newer)] == ["welcome"]
            monkeypatch.undo()
            commands.opened.set()
            results = await asyncio.gather(updating, repeating, return_exceptions=True)
        assert list(results) == [error, None]
        acknowledged = [frame.command_ack.command_id for frame in bench.sent(newer)]
        assert set(acknowledged) == {"c-1"}
        assert (await bench.stored()).state == SUCCEEDED

    on_bench(tmp_path, scenario)


def certified(bench: Bench) -> Session:
    """A stream with a certificate, on which only the hello has come."""
    session = session_of(bench)
    session.is_certified = True
    return session


def test_a_binding_whose_write_was_refused_is_stored_by_the_next_hello(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch)
            with pytest.raises(FleetError, match="the disk is full"):
                await bench.service._welcome(first := certified(bench))
            bench.service._forget(first)
        assert bench.fleet.bindings.get("alpha") is None
        await bench.service._welcome(certified(bench))
        assert await read_bindings(bench.store) == [bench.fleet.bindings.get("alpha")]
        entries = await bench.store.audit_after(Link(0, b""), 10)
        assert [one.method for one in entries or []] == [CONNECT]

    on_bench(tmp_path, scenario)


def test_the_loss_of_gpus_whose_write_was_refused_is_stored_by_the_next_hello(tmp_path: Path) -> None:
    old = make_hello("old")
    old.gpus[0].uuid = "GPU-alpha-0"

    async def scenario(bench: Bench) -> None:
        bench.fleet.registry._started -= 3600  # the old worker counts as LOST
        bench.fleet.registry.add_stored(old, 1)
        await bench.store.write(worker_row(1, old))
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch)
            with pytest.raises(FleetError, match="the disk is full"):
                await bench.service._welcome(first := session_of(bench))
            bench.service._forget(first)
            with pytest.raises(FleetError, match="the disk is full"):
                await bench.fleet.save_worker(bench.fleet.registry.find("old").hello, 2)
        await bench.service._welcome(Session(make_hello()))
        stored = {one.hello.name: [gpu.uuid for gpu in one.hello.gpus] for one in await bench.store.workers()}
        assert stored == {"old": ["GPU-old-1"], "alpha": ["GPU-alpha-0", "GPU-alpha-1"]}
        assert not bench.fleet._unstored

    on_bench(tmp_path, scenario)


def test_a_new_binding_waits_for_another_change_of_bindings(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async with bench.fleet.enrolling:
            welcoming = asyncio.create_task(bench.service._welcome(certified(bench)))
            await asyncio.sleep(0.05)
            beta = WorkerBinding("beta", "worker-beta", frozenset({"GPU-alpha-0"}))
            bench.fleet.bindings.put(beta)
        with pytest.raises(FleetError, match="belongs to worker/beta"):
            await welcoming
        assert list(bench.fleet.bindings) == [beta]
        assert bench.fleet.registry.get("worker-alpha") is None

    on_bench(tmp_path, scenario)


def test_a_later_hello_with_a_new_binding_waits_too(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.service._welcome(session := certified(bench))
        async with bench.fleet.enrolling:
            taking = asyncio.create_task(bench.service._take_hello(session, make_hello(gpu_count=3)))
            await asyncio.sleep(0.05)
            bench.fleet.bindings.put(WorkerBinding("beta", "worker-beta", frozenset({"GPU-alpha-2"})))
        with pytest.raises(FleetError, match="belongs to worker/beta"):
            await taking
        assert session.known is not None
        assert len(session.known.hello.gpus) == 2

    on_bench(tmp_path, scenario)
