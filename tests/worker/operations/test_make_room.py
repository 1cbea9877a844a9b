"""What is told of a command that moves other workloads to a lower tier first, with stubs."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandSpec, CommandUpdate
from leasehold_worker.commands.execution import CarryOut
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.commands.ledger import LOCAL_PREFIX
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.operations.handler import make_room
from leasehold_worker.planning.plan import MoveDown

from tests.worker.scripted_coordinator import make_command

EPOCH: Final = 1
MOVES: Final = [MoveDown(f"w-{name}", name, EvictionPolicy(), 1024, 1) for name in ("first", "second")]
STAYS: Final = MOVES[0].text


class Host:
    """Stubs of the operations of a host. A move lasts until it may end."""

    def __init__(self) -> None:
        self.moving, self.may_end, self.moved = trio.Event(), trio.Event(), list[str]()

    async def perform(self, command: CommandSpec, progress: Progress, carry_out: CarryOut) -> None:
        """Moves a workload, or suspends one after both moves, for which there is no room all the same."""
        if command.command_id.startswith(LOCAL_PREFIX):
            self.moving.set()
            await self.may_end.wait()
            self.moved.append(command.workload_id)
            return
        await make_room(MOVES, progress, carry_out)
        raise OperationError(errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY, "still too little")


def workloads(ids: Iterable[str]) -> list[Workload]:
    return [Workload(workload_id=one, status=WorkloadStatus(generation=1)) for one in ids]


def suspend(*, cancel: bool = False, timeout_s: int = 60) -> CommandFrame:
    command = make_command("c1", "w1", suspend=SuspendOperation())
    command.timeout.seconds = timeout_s
    return CommandFrame(epoch=EPOCH, command=command, cancel=cancel)


@asynccontextmanager
async def open_commands(path: Path, host: Host) -> AsyncIterator[tuple[Commands, list[CommandUpdate]]]:
    told: list[CommandUpdate] = []
    async with open_journal(path / "journal.sqlite3") as journal, trio.open_nursery() as nursery:
        with trio.fail_after(20):
            yield Commands(host.perform, journal, workloads, None, nursery, told.append), told
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("timeout_s", "state", "how"),
    [
        (60, command_pb2.COMMAND_STATE_CANCELLED, "cancelled"),
        (1, command_pb2.COMMAND_STATE_FAILED, "timed out"),
    ],
)
async def test_a_move_that_is_under_way_ends_before_its_command_is_undone_and_stays(
    tmp_path: Path, timeout_s: int, state: command_pb2.CommandState.ValueType, how: str
) -> None:
    host = Host()
    async with open_commands(tmp_path, host) as (commands, told):
        commands.receive(suspend(timeout_s=timeout_s), EPOCH)
        await host.moving.wait()
        if timeout_s == 60:
            commands.receive(suspend(cancel=True), EPOCH)
        else:
            await trio.sleep(1.5 * timeout_s)
        await trio.testing.wait_all_tasks_blocked()
        assert commands.in_flight == ["c1"]
        host.may_end.set()
        await commands.wait_finished()
    assert host.moved == ["w-first"]
    assert (told[-1].state, list(told[-1].result.warnings)) == (state, [STAYS])
    assert told[-1].error.message == (
        f"{how} before the point of no return; not all is undone (see warnings)"
    )


async def test_a_command_that_is_refused_after_a_move_has_failed(tmp_path: Path) -> None:
    host = Host()
    host.may_end.set()
    async with open_commands(tmp_path, host) as (commands, told):
        commands.receive(suspend(), EPOCH)
        await commands.wait_finished()
    assert host.moved == ["w-first", "w-second"]
    assert told[-1].state == command_pb2.COMMAND_STATE_FAILED
    assert told[-1].result.warnings[0] == STAYS
