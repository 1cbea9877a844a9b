"""What is told of commands, and when: on a real journal, without a GPU."""

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.operation_pb2 import Operation, RunOperation, StopOperation
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_RUNNING, Workload, WorkloadSpec, WorkloadStatus
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandUpdate, ConnectRequest
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands import journal_file
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import Journal, open_journal
from leasehold_worker.commands.ledger import FORGET_AT_ONCE, LOCAL_PREFIX, Entry
from leasehold_worker.errors import OperationError
from leasehold_worker.session import channel
from trio.testing import wait_all_tasks_blocked

from tests.worker.disks import refusing
from tests.worker.scripted_coordinator import make_command

ACCEPTED, REJECTED, SUCCEEDED, CANCELLED = (
    command_pb2.COMMAND_STATE_ACCEPTED,
    command_pb2.COMMAND_STATE_REJECTED,
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_CANCELLED,
)
EPOCH = 1
FRAME_LIMIT_BYTES = dict(channel.OPTIONS)["grpc.max_send_message_length"]
Observer = Callable[[CommandUpdate], None]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("leasehold_worker.commands.journal_file.BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr("leasehold_worker.commands.journal.RETRY_S", 0.01)
    return tmp_path / "journal.sqlite3"


def nothing(_: Iterable[str]) -> list[Workload]:
    return []


@asynccontextmanager
async def open_commands(
    path: Path, observer: Observer, workloads_of: Callable[[Iterable[str]], list[Workload]] = nothing
) -> AsyncIterator[tuple[Commands, Journal]]:
    config = WorkerConfig()
    async with (
        open_journal(path) as journal,
        open_parts(config, path.parent / "workloads", lambda _: None) as parts,
    ):
        yield (
            Commands(parts.operations.perform, journal, workloads_of, None, parts.nursery, observer),
            journal,
        )


def run_frame(command_id: str = "c1", *, cancel: bool = False) -> CommandFrame:
    run = RunOperation(name=command_id, spec=WorkloadSpec(arguments=["true"]))
    return CommandFrame(epoch=EPOCH, command=make_command(command_id, "w1", run=run), cancel=cancel)


def kept(path: Path) -> dict[str, Entry]:
    """The commands on disk."""
    file = journal_file.JournalFile(path)
    file.close()
    return {entry.command_id: entry for entry in file.contents.entries}


def keep(path: Path, *entries: Entry) -> None:
    """Commands of an earlier start of the worker."""
    file = journal_file.JournalFile(path)
    file.commit([statement for entry in entries for statement in journal_file.keep_command(entry)])
    file.close()


async def test_an_outcome_is_not_told_before_it_is_on_disk(path: Path) -> None:
    told: list[CommandUpdate] = []
    with ExitStack() as disk:

        def observe(update: CommandUpdate) -> None:
            told.append(update)
            if update.state == ACCEPTED:
                disk.enter_context(refusing(path))

        async with open_commands(path, observe) as (commands, journal):
            commands.receive(run_frame(), EPOCH)
            with trio.fail_after(10):
                while not commands.in_flight or commands.open_entries or not told:  # noqa: ASYNC110
                    await trio.sleep(0.001)
            commands.receive(run_frame(), EPOCH)
            assert commands.unacknowledged == [], "what hello lists and what is told again on each connect"
            assert commands.in_flight == ["c1"]
            disk.close()
            assert [entry.update.state for entry in kept(path).values()] == [ACCEPTED]
            assert REJECTED not in [update.state for update in told]
            with trio.fail_after(10):
                await journal.wait_settled()
            assert commands.in_flight == []
            (outcome,) = commands.unacknowledged
    assert outcome.state == REJECTED
    assert outcome.error.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
    assert [update for update in told if update.state == REJECTED] == [outcome, outcome]
    assert kept(path)["c1"].update == outcome


async def test_a_command_that_is_cancelled_while_the_disk_refuses_it_is_told_as_it_is_kept(
    path: Path,
) -> None:
    told: list[CommandUpdate] = []
    async with open_commands(path, told.append) as (commands, journal):
        with refusing(path):
            commands.receive(run_frame(), EPOCH)
            await wait_all_tasks_blocked()  # it is being written
            commands.receive(run_frame(cancel=True), EPOCH)
            with trio.fail_after(10):
                while journal.refusal is None:  # noqa: ASYNC110 - it tells nobody
                    await trio.sleep(0.001)
        with trio.fail_after(10):
            await commands.wait_finished()
            await journal.wait_settled()
    assert [update.state for update in told if update.state in (ACCEPTED, REJECTED)] == [ACCEPTED]
    assert told[-1].state == CANCELLED
    assert kept(path)["c1"].update == told[-1]


async def test_a_name_that_is_no_utf_8_in_an_error_ends_the_command_and_not_the_worker(path: Path) -> None:
    told: list[CommandUpdate] = []
    group = os.fsdecode(b"/sys/fs/cgroup/a\xff")  # every user with a delegated control group may make it

    async def perform(*_: Any, **__: Any) -> None:
        reason = errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY
        raise OperationError(reason, f"control group {group}", {"control_group": group})

    async with open_journal(path) as journal, trio.open_nursery() as nursery:
        commands = Commands(perform, journal, nothing, None, nursery, told.append)
        commands.receive(run_frame(), EPOCH)
        with trio.fail_after(10):
            await commands.wait_finished()
            await journal.wait_settled()
    assert told[-1].error.message == r"control group /sys/fs/cgroup/a\udcff"
    assert told[-1].error.metadata == {"control_group": r"/sys/fs/cgroup/a\udcff"}


def large(workload_id: str) -> Workload:
    """A workload with the largest spec that there may be."""
    status = WorkloadStatus(generation=3, state=WORKLOAD_STATE_RUNNING)
    return Workload(workload_id=workload_id, spec=WorkloadSpec(arguments=["x" * 131_000]), status=status)


async def test_a_worker_that_stops_says_what_can_be_done(path: Path) -> None:
    told: list[CommandUpdate] = []
    stop = CommandFrame(epoch=EPOCH, command=make_command("c2", "w1", stop=StopOperation()))
    async with open_commands(path, told.append) as (commands, _):
        commands.close()
        commands.receive(run_frame(), EPOCH)
        commands.receive(stop, EPOCH)
    again = "try again once it has started again"
    assert [(update.state, update.error.message) for update in told] == [
        (REJECTED, f"the worker is stopping: choose another worker, or {again}"),
        (REJECTED, f"the worker is stopping: {again}"),
    ]


async def test_an_outcome_fits_into_a_frame_however_many_workloads_it_carries(path: Path) -> None:
    told: list[CommandUpdate] = []

    def workloads_of(_: Iterable[str]) -> list[Workload]:
        return [large(f"w{number}") for number in range(3)]

    async with open_commands(path, told.append, workloads_of) as (commands, journal):
        stop = make_command("c1", "w1", stop=StopOperation())
        commands.receive(CommandFrame(epoch=EPOCH, command=stop), EPOCH)
        with trio.fail_after(10):
            await commands.wait_finished()
            await journal.wait_settled()
    outcome = told[-1]
    assert ConnectRequest(command_update=outcome).ByteSize() < FRAME_LIMIT_BYTES
    assert [workload.status.generation for workload in outcome.workloads] == [3, 3, 3]
    assert kept(path)["c1"].update == outcome


async def test_an_outcome_that_an_older_worker_kept_fits_into_a_frame(path: Path) -> None:
    update = CommandUpdate(
        command_id="c1", state=SUCCEEDED, workloads=[large(f"w{number}") for number in range(3)]
    )
    keep(path, Entry(make_command("c1", "w1"), EPOCH, 0.0, update))
    told: list[CommandUpdate] = []
    async with open_commands(path, told.append) as (commands, _):
        commands.receive(run_frame(), EPOCH)
        assert told == commands.unacknowledged
    (outcome,) = told
    assert ConnectRequest(command_update=outcome).ByteSize() < FRAME_LIMIT_BYTES
    assert outcome.state == SUCCEEDED


async def test_all_that_is_forgotten_is_taken_off_the_disk(path: Path) -> None:
    def ended(command_id: str, acknowledged_s: float | None) -> Entry:
        update = CommandUpdate(command_id=command_id, state=SUCCEEDED)
        return Entry(make_command(command_id, "w1"), EPOCH, 0.0, update, acknowledged_s=acknowledged_s)

    old = [ended(f"old{number}", 1.0) for number in range(FORGET_AT_ONCE + 1)]
    keep(path, *old, ended("c1", None), ended("c2", None))
    async with open_commands(path, lambda _: None) as (commands, journal):
        commands.acknowledge("c1")
        commands.acknowledge("c2")
        with trio.fail_after(10):
            await journal.wait_settled()
    assert kept(path).keys() == {"c1", "c2"}


async def test_commands_of_the_worker_itself_leave_nothing_on_disk(path: Path) -> None:
    def ended(command_id: str, acknowledged_s: float | None) -> Entry:
        update = CommandUpdate(command_id=command_id, state=SUCCEEDED)
        return Entry(make_command(command_id, "w1"), 0, 0.0, update, acknowledged_s=acknowledged_s)

    keep(
        path, ended(f"{LOCAL_PREFIX}told", None), ended(f"{LOCAL_PREFIX}acknowledged", 1.0), ended("c1", 1.0)
    )
    async with open_commands(path, lambda _: None) as (commands, journal):
        with trio.fail_after(10):
            outcome = await commands.carry_out("w1", Operation(stop=StopOperation()))
            assert outcome.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD
            await journal.wait_settled()
    assert kept(path).keys() == {"c1"}
