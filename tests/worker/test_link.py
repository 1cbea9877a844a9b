"""The link in this process, with coordinators that read slowly or not at all."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from leasehold.v1 import command_pb2
from leasehold.v1.worker_session_pb2 import CommandUpdate, ConnectRequest, OutputChunk
from leasehold_worker import journal_file
from leasehold_worker.command_ledger import UNACKNOWLEDGED_LIMIT, Entry
from leasehold_worker.commands import Commands
from leasehold_worker.config import WorkerConfig
from leasehold_worker.journal import open_journal
from leasehold_worker.link import Link
from leasehold_worker.operate import operate
from leasehold_worker.outbox import FRAME_LIMIT
from leasehold_worker.parts import open_parts
from leasehold_worker.planning import Planning
from leasehold_worker.reports import Reporter, WorkerIdentity
from leasehold_worker.state_directory import StateDirectory

from .scripted_coordinator import ScriptedCoordinator, Session, make_command


class DeafCoordinator(ScriptedCoordinator):
    """Welcomes workers, and then reads nothing."""

    def _read(self, session: Session, frames: Iterator[ConnectRequest]) -> None:
        pass


@pytest.fixture
def deaf() -> Iterator[DeafCoordinator]:
    scripted = DeafCoordinator()
    yield scripted
    scripted.stop()


@pytest.fixture
def state_path(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


@asynccontextmanager
async def open_link(coordinator: ScriptedCoordinator, state_path: Path) -> AsyncIterator[Link]:
    state = StateDirectory(state_path)
    async with (
        open_journal(state.journal_path) as journal,
        open_parts(WorkerConfig(), state.workloads_path, lambda _: None) as parts,
    ):
        identity = WorkerIdentity.of_this_start("worker-1", "alpha", {})
        commands = Commands(
            partial(operate, parts),
            journal,
            lambda _: [],
            None,
            parts.nursery,
            lambda update: link.send(ConnectRequest(command_update=update)),
        )
        reporter = Reporter(identity, parts, commands, journal)
        link = Link(
            coordinator.address,
            state,
            reporter,
            commands,
            parts.workloads,
            parts.pool,
            Planning(parts.operations.preflight, parts.durations),
            parts.disk,
            journal,
        )
        parts.nursery.start_soon(link.run)
        yield link


async def next_session(coordinator: ScriptedCoordinator) -> Session:
    return await trio.to_thread.run_sync(coordinator.next_session)


async def test_a_coordinator_that_does_not_read_is_left_at_once(
    deaf: DeafCoordinator, state_path: Path
) -> None:
    async with open_link(deaf, state_path) as link:
        await next_session(deaf)
        chunk = ConnectRequest(output_chunk=OutputChunk(data=bytes(65_536)))
        for _ in range(2 * FRAME_LIMIT):
            link.send(chunk)
        again = await next_session(deaf)
        assert again.hello.worker_id == "worker-1"


async def test_outcomes_beyond_what_may_wait_are_told_in_one_session(
    coordinator: ScriptedCoordinator, state_path: Path
) -> None:
    ids = [f"c{number}" for number in range(UNACKNOWLEDGED_LIMIT)]
    file = journal_file.JournalFile(StateDirectory(state_path).journal_path)
    for command_id in ids:
        update = CommandUpdate(command_id=command_id, state=command_pb2.COMMAND_STATE_SUCCEEDED)
        file.commit(journal_file.keep_command(Entry(make_command(command_id, "w1"), 1, 0.0, update)))
    file.close()
    async with open_link(coordinator, state_path):
        session = await next_session(coordinator)
        for command_id in ids:
            await trio.to_thread.run_sync(partial(session.outcome, command_id))
    assert coordinator.sessions.empty()
