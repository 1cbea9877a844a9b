"""The link in this process, with coordinators that read slowly or not at all."""

import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.operation_pb2 import RunOperation, StopOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.worker.v1.session_pb2 import (
    Authorities,
    CommandUpdate,
    ConnectRequest,
    ConnectResponse,
    Drain,
    Hello,
    OutputChunk,
    PlanQuery,
    ReadOutput,
)
from leasehold_client.config import credentials_directory
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands import journal_file
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.commands.ledger import UNACKNOWLEDGED_LIMIT, Entry
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.host.clock_offset import ClockOffset
from leasehold_worker.host.process_files import read_stat
from leasehold_worker.host.processes import command_line
from leasehold_worker.session import session as coordinator_session
from leasehold_worker.session.frame_sink import FrameSink
from leasehold_worker.session.outbox import FRAME_LIMIT
from leasehold_worker.session.plan_query import PlanQueries
from leasehold_worker.session.queries import PLANS_LIMIT, QUESTIONS_LIMIT, Queries
from leasehold_worker.session.reporter import Reporter, WorkerIdentity
from leasehold_worker.session.session import CoordinatorSession

from tests.worker.scripted_coordinator import TIMEOUT_S, ScriptedCoordinator, Session, make_command


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
async def open_link(
    coordinator: ScriptedCoordinator, state_path: Path, credentials: Path | None = None
) -> AsyncIterator[CoordinatorSession]:
    state = StateDirectory(state_path)
    async with (
        open_journal(state.journal_path) as journal,
        open_parts(WorkerConfig(), state.workloads_path, lambda _: None) as parts,
    ):
        frames = FrameSink()
        identity = WorkerIdentity.of_this_start("worker-1", "alpha", {})
        commands = Commands(
            parts.operations.perform,
            journal,
            lambda _: [],
            None,
            parts.nursery,
            lambda update: frames.send(ConnectRequest(command_update=update)),
        )
        reporter = Reporter(
            identity,
            commands,
            journal,
            inventory=parts.inventory,
            driver=parts.driver,
            pool=parts.pool,
            resources=parts.resources,
            workloads=parts.workloads,
            limits=parts.limits,
            criu=parts.criu,
            applications=parts.applications,
        )
        opened = CoordinatorSession(
            coordinator.address,
            credentials or credentials_directory(),
            parts.secrets,
            frames,
            state,
            reporter,
            commands,
            parts.pool,
            Queries(
                parts.workloads,
                PlanQueries(
                    parts.operations.preflight,
                    parts.durations,
                    parts.operations.check_run,
                    parts.operations.check_adoption,
                ),
                parts.disk,
                "worker-1",
            ),
            journal,
            ClockOffset(),
        )
        parts.nursery.start_soon(opened.run)
        yield opened


class LateCoordinator(ScriptedCoordinator):
    """Reads nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()

    def _read(self, session: Session, frames: Iterator[ConnectRequest]) -> None:
        self.reads.wait(TIMEOUT_S)
        super()._read(session, frames)


@pytest.fixture
def late() -> Iterator[LateCoordinator]:
    scripted = LateCoordinator()
    yield scripted
    scripted.stop()


async def next_session(coordinator: ScriptedCoordinator) -> Session:
    return await trio.to_thread.run_sync(coordinator.next_session)


async def test_credentials_are_read_for_each_session(
    coordinator: ScriptedCoordinator, state_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = tmp_path / "credentials"
    async with open_link(coordinator, state_path, credentials):
        with trio.fail_after(TIMEOUT_S):
            while "credentials for" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
                await trio.sleep(0.01)
        assert "start the coordinator as this user, or name the directory" in caplog.text
        assert f"can't be read: No such file or directory: '{credentials}" in caplog.text
        credentials.mkdir()
        for name in ("ca.pem", "worker.token"):
            shutil.copy(credentials_directory() / name, credentials)
        await trio.to_thread.run_sync(coordinator.next_session)


async def test_a_coordinator_that_does_not_read_is_left_at_once(
    deaf: DeafCoordinator, state_path: Path
) -> None:
    async with open_link(deaf, state_path) as opened:
        await next_session(deaf)
        chunk = ConnectRequest(output_chunk=OutputChunk(data=bytes(65_536)))
        for _ in range(2 * FRAME_LIMIT):
            opened._frames.send(chunk)
        again = await next_session(deaf)
        assert again.hello.worker_id == "worker-1"


@pytest.mark.long
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


async def test_readers_of_output_cut_no_worker_off(
    late: LateCoordinator, state_path: Path, tmp_path: Path
) -> None:
    async with open_link(late, state_path):
        session = await next_session(late)
        answers = await trio.to_thread.run_sync(read_much, late, session, tmp_path)
    refused = [chunk for chunk in answers if chunk.HasField("error")]
    assert {chunk.error.reason for chunk in refused} <= {errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES}
    assert late.sessions.empty()


def read_much(late: LateCoordinator, session: Session, folder: Path) -> list[OutputChunk]:
    """Asks for more than may wait while nothing is read, and then reads."""
    script = f"head -c 100000 /dev/zero; touch {folder}/told; exec sleep 1000"
    talkative = WorkloadSpec(arguments=["sh", "-c", script])
    session.send(make_command("c1", "w1", run=RunOperation(name="one", spec=talkative)))
    wait_for(folder / "told")
    for number in range(QUESTIONS_LIMIT + 50):
        session.down.put(ConnectResponse(read_output=ReadOutput(read_id=str(number), workload_id="w1")))
    last = WorkloadSpec(arguments=["touch", f"{folder}/taken"])
    session.send(make_command("c2", "w2", run=RunOperation(name="two", spec=last)))
    wait_for(folder / "taken")
    late.reads.set()
    session.outcome("c2")
    session.wait(lambda frame: frame.HasField("worker_load"))
    session.run("c3", "w1", stop=StopOperation(force=True))
    with session.arrived:
        assert session.arrived.wait_for(lambda: len(chunks(session)) >= QUESTIONS_LIMIT, TIMEOUT_S)
    wait_for_launchers(folder)
    return chunks(session)


def wait_for_launchers(folder: Path) -> None:
    """Waits until no launcher of a workload is left: the worker is in this process, which must reap them."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(is_launcher(int(path.name), folder) for path in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_launcher(pid: int, folder: Path) -> bool:
    """Whether a process may be a launcher. One that ends, or is not reaped yet, has no command line."""
    stat = read_stat(pid)
    arguments = command_line(pid)
    is_ending = stat is not None and stat.parent_pid == os.getpid() and not arguments
    return is_ending or str(folder) in " ".join(arguments)


def chunks(session: Session) -> list[OutputChunk]:
    return [frame.output_chunk for frame in session.frames if frame.HasField("output_chunk")]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


async def test_a_drain_for_ever_ends(
    coordinator: ScriptedCoordinator, state_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_session, "RECONNECT_LIMIT_S", 0.01)
    async with open_link(coordinator, state_path):
        session = await next_session(coordinator)
        session.down.put(ConnectResponse(drain=Drain(reconnect_after=Duration(seconds=10**11))))
        await next_session(coordinator)


async def test_a_defect_in_a_session_ends_that_session_alone(
    coordinator: ScriptedCoordinator, state_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = Reporter.hello
    failures = iter([ValueError("a defect")])

    def fail_once(*arguments: object) -> Hello:
        for error in failures:
            raise error
        return hello(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Reporter, "hello", fail_once)
    async with open_link(coordinator, state_path):
        await next_session(coordinator)


async def test_authorities_are_stored_one_at_a_time_and_the_newest_of_those_that_wait(
    coordinator: ScriptedCoordinator, state_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that repeats them takes neither memory nor the worker's threads."""
    stored: list[Sequence[bytes]] = []
    begun, released = threading.Event(), threading.Event()

    def keep_slowly(_: StateDirectory, certificates: Sequence[bytes]) -> list[str]:
        stored.append(certificates)
        begun.set()
        assert released.wait(TIMEOUT_S)
        return [certificates[0].decode()]

    monkeypatch.setattr(coordinator_session, "keep_authorities", keep_slowly)
    async with open_link(coordinator, state_path):
        session = await next_session(coordinator)
        try:
            for number in range(50):
                authorities = Authorities(certificates=[str(number).encode()])
                session.down.put(ConnectResponse(authorities=authorities))
            assert await trio.to_thread.run_sync(begun.wait, TIMEOUT_S)
            session.send(make_command("c1", "w1", stop=StopOperation()))
            await trio.to_thread.run_sync(session.outcome, "c1")  # so all frames before have come
        finally:
            released.set()
        newest = await trio.to_thread.run_sync(
            session.wait, lambda frame: "49" in frame.authorities_stored.serials
        )
    assert newest.authorities_stored.serials == ["49"]
    assert [int(certificates[0]) for certificates in stored] == [0, 49]


async def test_questions_for_plans_leave_places_to_readers_of_output(
    coordinator: ScriptedCoordinator, state_path: Path
) -> None:
    async with open_link(coordinator, state_path) as opened:
        opened._queries._waiting["plan_query"] = PLANS_LIMIT  # as if plans hung
        session = await next_session(coordinator)
        session.down.put(ConnectResponse(plan_query=PlanQuery(plan_id="p", workload_id="w1")))
        session.down.put(ConnectResponse(read_output=ReadOutput(read_id="r", workload_id="w1")))
        answers = await trio.to_thread.run_sync(answers_of, session)
    plan = next(frame.plan_answer for frame in answers if frame.HasField("plan_answer"))
    chunk = next(frame.output_chunk for frame in answers if frame.HasField("output_chunk"))
    assert plan.error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
    assert chunk.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD


def answers_of(session: Session) -> list[ConnectRequest]:
    """The first answers to a plan and to a reader of output."""
    return [
        session.wait(lambda f: f.HasField("plan_answer")),
        session.wait(lambda f: f.HasField("output_chunk")),
    ]
