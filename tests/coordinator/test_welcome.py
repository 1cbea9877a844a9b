"""What happens while a worker is being let in: its hello is judged by what was known when it came."""

import asyncio
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2
from leasehold.v1.worker_session_pb2 import Hello
from leasehold_coordinator import schema
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.sessions import Session

from .bench import FULL, Bench, on_bench
from .scripted_worker import make_hello

DISPATCHED = command_pb2.COMMAND_STATE_DISPATCHED


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
