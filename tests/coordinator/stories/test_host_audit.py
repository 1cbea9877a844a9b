"""Workloads that users of a worker's host register have rows of the audit: of the begin and of the end."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from leasehold.v1 import workload_pb2
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_ALLOWED
from leasehold.v1.workload_pb2 import Workload, WorkloadOrigin, WorkloadState, WorkloadStatus
from leasehold.v1.workload_service_pb2 import StopWorkloadRequest, UpdateWorkloadRequest
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import report_bounds
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import AuditRow, Change

from tests.coordinator.api.test_command_service import start
from tests.coordinator.bench import FULL, Bench, on_bench
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.storage.test_audit_chain import listed
from tests.coordinator.stories.test_audit import entries, verify
from tests.coordinator.stories.test_lifecycle import until

RUNNING, EXITED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_EXITED
EXEC, CLAIM = workload_pb2.WORKLOAD_ORIGIN_EXEC, workload_pb2.WORKLOAD_ORIGIN_CLAIM


def of_host(
    number: int,
    state: WorkloadState.ValueType = RUNNING,
    generation: int = 1,
    origin: WorkloadOrigin.ValueType = EXEC,
) -> Workload:
    status = WorkloadStatus(state=state, generation=generation)
    return Workload(workload_id=f"w-host-{number}", user="ann", origin=origin, status=status)


def report(worker: ScriptedWorker, *workloads: Workload) -> None:
    for workload in workloads:
        worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=workload)))


def audited(coordinator: CoordinatorProcess) -> list[tuple[str, str]]:
    """The method and the workload of each entry of a host, oldest first."""
    found = reversed(entries(coordinator, 'identity = "host/alpha/ann"'))
    return [(entry.method, entry.resource.removeprefix("workload/")) for entry in found]


def test_each_workload_of_a_host_has_a_row_of_its_begin_and_of_its_end(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    report(
        worker,
        of_host(1),
        of_host(1),  # repeated
        of_host(2, origin=CLAIM),
        of_host(1, RUNNING, 2),
        of_host(1, EXITED, 3),
        of_host(1, EXITED, 3),
        of_host(3, EXITED),  # short
        of_host(4, origin=workload_pb2.WORKLOAD_ORIGIN_RUN),  # of a run that the store does not know
    )
    expected = [
        ("host/exec", "w-host-1"),
        ("host/claim", "w-host-2"),
        ("host/end", "w-host-1"),
        ("host/exec", "w-host-3"),
        ("host/end", "w-host-3"),
        ("host/report", "w-host-4"),
    ]
    until(lambda: len(audited(coordinator)) >= len(expected))
    assert audited(coordinator) == expected
    coordinator.workloads.UpdateWorkload(
        UpdateWorkloadRequest(workload=Workload(workload_id="w-host-3", labels={"team": "a"}))
    )
    coordinator.workloads.StopWorkload(StopWorkloadRequest(workload="w-host-2"))
    worker.succeed("stop", of_host(2, EXITED, 2, CLAIM))
    expected.append(("host/end", "w-host-2"))
    assert audited(coordinator) == expected
    (first, *_) = entries(coordinator, "method:host/exec AND resource:host-1")
    assert (first.outcome, first.count, first.address) == (AUDIT_OUTCOME_ALLOWED, 1, "ipv4:127.0.0.1")
    coordinator.restart()
    again = coordinator.connect(make_hello(workloads=[of_host(4, RUNNING, 2)]))
    again.welcome()
    report(again, of_host(5))
    until(lambda: ("host/exec", "w-host-5") in audited(coordinator))
    assert audited(coordinator) == [*expected, ("host/exec", "w-host-5")], "a known workload begins once"
    assert not verify(coordinator).HasField("broken")


def test_presumed_ends_have_no_rows(tmp_path: Path) -> None:
    """A worker could otherwise fill the disk by hellos."""

    async def scenario(bench: Bench) -> None:
        for generation in (1, 10, 20):
            alive = [of_host(1, RUNNING, generation)]
            await bench.fleet.apply_workloads(alive, bench.session, is_complete=True)
            await bench.fleet.apply_workloads([], bench.session, is_complete=True)
        assert "w-host-1" not in bench.fleet.workloads
        await bench.fleet.apply_workload(of_host(1, EXITED, 30), bench.session)
        await bench.fleet.apply_workload(of_host(1, EXITED, 31), bench.session)
        assert [entry.method for entry in await listed(bench.store)] == ["host/exec", "host/end"]

    on_bench(tmp_path, scenario)


def test_the_row_is_written_with_the_report(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch, 1)
            with pytest.raises(FleetError, match=FULL.message):
                await bench.fleet.apply_workload(of_host(1), bench.session)
        assert await listed(bench.store) == []
        written: list[Sequence[Change]] = []
        write_now = bench.store.write

        async def write(*rows: Change) -> None:
            written.append(rows)
            await write_now(*rows)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(bench.store, "write", write)
            await bench.fleet.apply_workload(of_host(1), bench.session)
        (rows,) = written
        assert {schema.audit, schema.workloads} <= {row.table for row in rows}
        assert sum(isinstance(row, AuditRow) for row in rows) == 1
        assert [entry.method for entry in await listed(bench.store)] == ["host/exec"]

    on_bench(tmp_path, scenario)


def test_a_worker_causes_no_more_rows_than_its_reports_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_bounds, "NEW_BURST", 2)
    monkeypatch.setattr(report_bounds, "NEW_PER_S", 1e-9)

    async def scenario(bench: Bench) -> None:
        await bench.fleet.apply_workloads([of_host(number, EXITED) for number in range(9)], bench.session)
        assert len(await listed(bench.store)) == 4
        with pytest.raises(FleetError, match="live workloads"):
            await bench.fleet.apply_workload(of_host(10), bench.session)
        assert len(await listed(bench.store)) == 4

    on_bench(tmp_path, scenario)
