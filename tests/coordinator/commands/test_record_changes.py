"""Changes of records on a disk that hangs."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.fleet_service_pb2 import DeleteWorkerRequest
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import DeleteWorkloadRequest, UpdateWorkloadRequest
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.access.worker_bindings import WorkerBinding
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.decisions import Decision
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import fleet
from leasehold_coordinator.fleet.callers import note_caller, note_request
from leasehold_coordinator.shielded_tasks import settle
from leasehold_coordinator.storage import schema, statements
from leasehold_coordinator.storage.enrolment_rows import binding_row, read_bindings
from leasehold_coordinator.storage.rows import AuditRow, Change, command_row, workload_row

from tests.coordinator.bench import FULL, Bench, Gate, on_bench, workload
from tests.coordinator.scripted_worker import make_hello


@pytest.mark.parametrize(
    ("kind", "shown_by"),
    [("update", "workloads --all"), ("delete", "workloads --all"), ("delete_worker", "workers")],
)
def test_a_change_of_a_record_is_refused_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shown_by: str
) -> None:
    """The refusal names the list that shows the change, since the requests have no request_id."""

    async def scenario(bench: Bench) -> None:
        creation = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds)
        records = RecordChanges(bench.fleet, creation.decisions)
        bench.fleet.registry.add_stored(make_hello("gone"), 1)
        ended = Workload(workload_id="w-1", name="one", worker_id="worker-gone")
        ended.status.state = workload_pb2.WORKLOAD_STATE_EXITED
        await bench.store.write(workload_row(ended))
        changed = Workload(workload_id="w-1", labels={"team": "red"})
        gate, write_now = Gate(), bench.store.write

        async def write(*rows: Change) -> None:
            await gate()
            await write_now(*rows)

        monkeypatch.setattr(bench.store, "write", write)
        change: Coroutine[Any, Any, object]
        if kind == "update":
            change = records.update_workload(UpdateWorkloadRequest(workload=changed))
        elif kind == "delete":
            change = records.delete_workload(DeleteWorkloadRequest(workload="w-1"))
        else:
            change = records.delete_worker(DeleteWorkerRequest(worker="gone"))
        under_way = asyncio.create_task(change)
        await gate.reached.wait()
        bench.store.health._stalled.set()
        try:
            with pytest.raises(FleetError, match=f"stored is unknown: look at `leasehold get {shown_by}`"):
                await asyncio.wait_for(under_way, 10)
        finally:
            bench.store.health._stalled.clear()
            gate.opened.set()
            await settle()

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_deleted_workload_and_its_row_of_the_audit_are_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    for module in (statements, fleet):
        monkeypatch.setattr(module, "DELETE_LIMIT", 2)

    async def scenario(bench: Bench) -> None:
        decisions = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds).decisions
        records = RecordChanges(bench.fleet, decisions)
        ended = Workload(workload_id="w-1", name="one", worker_id="worker-alpha")
        ended.status.state = workload_pb2.WORKLOAD_STATE_EXITED
        commands = [
            Command(command_id=f"c-{number}", workload_id="w-1", state=COMMAND_STATE_SUCCEEDED)
            for number in range(3)
        ]
        await bench.store.write(workload_row(ended), *(command_row(StoredCommand(one)) for one in commands))
        commits: list[tuple[Change, ...]] = []
        write_now = bench.store.write

        async def write(*rows: Change) -> None:
            if len(commits) == failing:
                raise FULL
            commits.append(rows)
            await write_now(*rows)

        note_caller(Caller(Identity(Kind.USER, "ann"), "ipv4:192.0.2.1", role=Role.OPERATOR))
        request = DeleteWorkloadRequest(workload="w-1")
        note_request("/leasehold.v1.WorkloadService/DeleteWorkload", request)
        monkeypatch.setattr(bench.store, "write", write)
        if failing:
            assert (await records.delete_workload(request)).deleted_command_count == 2
        else:
            with pytest.raises(FleetError):
                await records.delete_workload(request)
        is_gone = await bench.store.find_workload("w-1") is None
        audited = [row for rows in commits for row in rows if isinstance(row, AuditRow)]
        assert (is_gone, len(audited)) == (bool(failing), failing)

    on_bench(tmp_path, scenario)


def test_updates_on_a_slow_disk_hold_up_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        decisions = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds).decisions
        records = RecordChanges(bench.fleet, decisions)
        ended = Workload(workload_id="w-1", name="one", worker_id="worker-alpha")
        ended.status.state = workload_pb2.WORKLOAD_STATE_EXITED
        await bench.store.write(workload_row(ended))
        gate = bench.hold_writes(monkeypatch, schema.workloads)
        wanted = Workload(workload_id="w-1", labels={"team": "red"})
        update = asyncio.create_task(records.update_workload(UpdateWorkloadRequest(workload=wanted)))
        await gate.reached.wait()

        async def decide() -> Decision[str]:
            return Decision("made")

        try:
            assert await asyncio.wait_for(decisions.decide(decide), 10) == "made"
        finally:
            gate.opened.set()
        assert (await update).labels == {"team": "red"}

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "being stored"])
def test_an_update_never_ends_a_workload_that_its_worker_reports_again_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    async def scenario(bench: Bench) -> None:
        records = RecordChanges(
            bench.fleet, CommandCreation(bench.fleet, bench.dispatcher, bench.bounds).decisions
        )
        lives = Workload(workload_id="w-1", name="one", worker_id="worker-alpha")
        lives.status.state = workload_pb2.WORKLOAD_STATE_RUNNING
        ended = Workload()
        ended.CopyFrom(lives)
        ended.status.state = workload_pb2.WORKLOAD_STATE_FAILED
        await bench.store.write(workload_row(ended))
        gate, find_now = Gate(), bench.store.find_workload

        async def find(id_or_name: str, owner: str) -> Workload | None:
            found = await find_now(id_or_name, owner)
            await gate()
            return found

        monkeypatch.setattr(bench.store, "find_workload", find)
        wanted = Workload(workload_id="w-1", labels={"team": "red"})
        update = asyncio.create_task(records.update_workload(UpdateWorkloadRequest(workload=wanted)))
        await gate.reached.wait()
        if is_stored:
            await bench.fleet.save_workload(lives)
            gate.opened.set()
        else:
            writing = bench.hold_writes(monkeypatch, schema.workloads)
            reported = asyncio.create_task(bench.fleet.save_workload(lives))
            await writing.reached.wait()
            gate.opened.set()
            await asyncio.sleep(0)  # the update goes on
            writing.opened.set()
            await reported
        updated = await update
        assert updated.status.state == workload_pb2.WORKLOAD_STATE_RUNNING
        assert bench.fleet.workloads["w-1"].labels == {"team": "red"}

    on_bench(tmp_path, scenario)


def test_an_update_never_brings_back_a_workload_whose_end_is_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench) -> None:
        records = RecordChanges(
            bench.fleet, CommandCreation(bench.fleet, bench.dispatcher, bench.bounds).decisions
        )
        await bench.fleet.save_workload(workload(workload_pb2.WORKLOAD_STATE_RUNNING, 1))
        with monkeypatch.context() as slow_disk:
            writing = bench.hold_writes(slow_disk, schema.workloads)
            exited = workload(workload_pb2.WORKLOAD_STATE_EXITED, 2)
            reported = asyncio.create_task(bench.fleet.apply_workload(exited, bench.session))
            await writing.reached.wait()
        wanted = Workload(workload_id="w-1", labels={"team": "red"})
        update = asyncio.create_task(records.update_workload(UpdateWorkloadRequest(workload=wanted)))
        await asyncio.sleep(0.1)  # the update reads the store
        writing.opened.set()
        await reported
        updated = await update
        assert updated.status.state == workload_pb2.WORKLOAD_STATE_EXITED
        assert updated.labels == {"team": "red"}
        assert "w-1" not in bench.fleet.workloads
        stored = await bench.store.find_workload("w-1")
        assert stored == updated

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("is_report_stored", [False, True])
def test_a_report_and_an_update_that_fail_together_leave_the_workload_as_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_report_stored: bool
) -> None:
    """The report would otherwise stay in memory alone, and the worker's next hello would not be newer."""

    async def scenario(bench: Bench) -> None:
        records = RecordChanges(
            bench.fleet, CommandCreation(bench.fleet, bench.dispatcher, bench.bounds).decisions
        )
        await bench.fleet.save_workload(workload(workload_pb2.WORKLOAD_STATE_RUNNING, 1))
        suspended = workload(workload_pb2.WORKLOAD_STATE_SUSPENDED, 2)
        with monkeypatch.context() as broken_disk:
            writing = bench.hold_writes(broken_disk, schema.workloads, None if is_report_stored else FULL)
            reported = asyncio.create_task(bench.fleet.apply_workload(suspended, bench.session))
            await writing.reached.wait()
            if is_report_stored:
                bench.fail_writes(broken_disk)
            wanted = Workload(workload_id="w-1", labels={"team": "red"})
            request = UpdateWorkloadRequest(workload=wanted)
            update = asyncio.create_task(records.update_workload(request))
            await asyncio.wait({update}, timeout=20 if is_report_stored else 0.1)
            writing.opened.set()
            results = await asyncio.gather(reported, update, return_exceptions=True)
        assert [isinstance(result, FleetError) for result in results] == [not is_report_stored, True]
        await bench.fleet.apply_workload(suspended, bench.session)
        assert bench.fleet.workloads["w-1"] == suspended
        assert await bench.store.find_workload("w-1") == suspended

    on_bench(tmp_path, scenario)


def test_a_workload_of_a_deleted_worker_has_no_processes_and_is_not_parked(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.fleet.registry.add_stored(make_hello("gone"), 1)
        known = bench.fleet.registry.find("gone")
        parked = workload(workload_pb2.WORKLOAD_STATE_SUSPENDED, 1)
        parked.worker_id = known.hello.worker_id
        parked.status.members.add(pid=7)
        parked.status.parked_gpu_uuids.append("GPU-gone-0")
        parked.status.parked_bytes = parked.status.disk_bytes = 9
        parked.status.park_time.FromSeconds(1)
        await bench.fleet.save_workload(parked)
        async with bench.fleet.enrolling:
            assert await bench.fleet.delete_worker(known) == ["w-1"]
        found = await bench.store.find_workload("w-1")
        assert found is not None
        status = found.status
        assert status.error.reason == errors_pb2.ERROR_REASON_WORKER_DELETED
        assert {field.name for field, _ in status.ListFields()} == {
            "state",
            "generation",
            "error",
            "end_time",
        }

    on_bench(tmp_path, scenario)


def test_the_deletion_of_a_worker_waits_for_another_change_of_bindings(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        creation = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds)
        records = RecordChanges(bench.fleet, creation.decisions)
        bench.fleet.registry.add_stored(make_hello("gone"), 1)
        async with bench.fleet.enrolling:
            deleting = asyncio.create_task(records.delete_worker(DeleteWorkerRequest(worker="gone")))
            await asyncio.sleep(0.05)
            bound = WorkerBinding("gone", "worker-gone", frozenset({"GPU-9"}))
            await bench.store.write(binding_row(bound))
            bench.fleet.bindings.put(bound)
        await deleting
        assert not list(bench.fleet.bindings)
        assert not await read_bindings(bench.store)

    on_bench(tmp_path, scenario)
