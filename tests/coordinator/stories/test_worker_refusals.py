"""Commands that their workers refuse for lack of a right have a row of the audit, beside the outcome."""

import asyncio
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_REFUSED, AuditEntry
from leasehold.v1.command_pb2 import COMMAND_STATE_FAILED, COMMAND_STATE_REJECTED
from leasehold.v1.errors_pb2 import Error
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_entries import TEXT_LIMIT

from tests.coordinator.api.test_command_service import ended, start, suspend
from tests.coordinator.bench import FULL, Bench, on_bench
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker
from tests.coordinator.storage.test_audit_chain import is_whole, listed
from tests.coordinator.stories.test_audit import entries, verify
from tests.coordinator.stories.test_owners import OWN

REFUSED = Error(
    reason=errors_pb2.ERROR_REASON_NOT_PERMITTED, message="run_as maps\x1b[2J no user" + "x" * 1000
)


def refuse(worker: ScriptedWorker, command_id: str, state: int, error: Error) -> None:
    """The worker ends a command with an error."""
    worker.wait(lambda frame: frame.command.command.command_id == command_id)
    update = CommandUpdate(command_id=command_id, error=error)
    update.state = state  # type: ignore[assignment]  # one of two numbers
    worker.up.put(ConnectRequest(command_update=update))


def refusals(coordinator: CoordinatorProcess) -> list[AuditEntry]:
    return entries(coordinator, "outcome = REFUSED")


@pytest.mark.parametrize("state", [COMMAND_STATE_REJECTED, COMMAND_STATE_FAILED])
def test_a_refused_command_has_a_row(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, state: command_pb2.CommandState.ValueType
) -> None:
    workload = start(coordinator, worker)
    command = suspend(coordinator)
    for _ in range(2):  # a repeated update adds no row
        refuse(worker, command.command_id, state, REFUSED)
    assert ended(coordinator, command.command_id).state == state
    other = suspend(coordinator)
    refuse(worker, other.command_id, state, Error(reason=errors_pb2.ERROR_REASON_WORKLOAD_BUSY))
    ended(coordinator, other.command_id)
    (entry,) = refusals(coordinator)
    assert (entry.identity, entry.outcome, entry.count) == (OWN, AUDIT_OUTCOME_REFUSED, 1)
    assert (entry.command_id, entry.reason) == (command.command_id, REFUSED.reason)
    assert entry.resource == f"worker/worker-alpha, workload/{workload.workload_id}"
    assert entry.message.startswith("run_as maps\\x1b[2J no user")
    assert len(entry.message) == TEXT_LIMIT
    made = entries(coordinator, f'resource = "workload/{workload.workload_id}"')
    assert command.command_id in {one.command_id for one in made}
    assert not verify(coordinator).HasField("broken")


def test_the_row_is_written_with_the_outcome(tmp_path: Path) -> None:
    update = CommandUpdate(command_id="c-1", state=COMMAND_STATE_REJECTED, error=REFUSED)

    async def scenario(bench: Bench) -> None:
        await bench.send()
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch, 1)
            with pytest.raises(FleetError, match=FULL.message):
                await bench.dispatcher.update(bench.session, update)
        assert await listed(bench.store) == []
        written: list[object] = []
        write_now = bench.store.write

        async def write(*rows: object) -> None:
            written.append([type(row).__name__ for row in rows])
            await write_now(*rows)  # type: ignore[arg-type]  # the rows of the caller

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(bench.store, "write", write)
            async with asyncio.timeout(10):
                await bench.dispatcher.update(bench.session, update)
        assert (await bench.stored()).state == COMMAND_STATE_REJECTED
        assert [entry.command_id for entry in await listed(bench.store)] == ["c-1"]
        assert sum("AuditRow" in rows for rows in written) == len(written) == 1  # type: ignore[operator]
        assert await is_whole(bench.store)

    on_bench(tmp_path, scenario)
