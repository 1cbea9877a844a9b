"""What a worker's reports of ended workloads cost the coordinator."""

import tracemalloc
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold_coordinator.fleet import workload_news
from leasehold_coordinator.fleet.workload_news import GONE, find_ended
from leasehold_coordinator.storage.rows import workload_row

from tests.coordinator.bench import Bench, on_bench

COUNT, RECORD_BYTES = 200, 200_000


def workload(
    number: int,
    state: workload_pb2.WorkloadState.ValueType,
    generation: int = 1,
    error: errors_pb2.Error | None = None,
) -> Workload:
    found = Workload(workload_id=f"w-{number}", name=f"name-{number}", worker_id="worker-alpha")
    found.status.state, found.status.generation = state, generation
    found.status.error.CopyFrom(error or errors_pb2.Error())
    return found


async def store(bench: Bench, count: int, error: errors_pb2.Error | None = None) -> None:
    for number in range(count):
        ended = workload(number, workload_pb2.WORKLOAD_STATE_FAILED, error=error)
        ended.spec.arguments.append("x" * RECORD_BYTES)
        await bench.store.write(workload_row(ended))


def test_a_report_of_many_large_ended_workloads_takes_little_memory(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await store(bench, COUNT)
        reports = [workload(number, workload_pb2.WORKLOAD_STATE_FAILED) for number in range(COUNT)]
        tracemalloc.start()
        try:
            over = await find_ended(bench.fleet.reader, reports)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(over) == COUNT
        assert all(one is not None and one.worker_id == "worker-alpha" for one in over.values())
        assert sum(one.ByteSize() for one in over.values() if one is not None) < 100 * COUNT
        assert peak_bytes < COUNT * RECORD_BYTES / 10

    on_bench(tmp_path, scenario)


def test_the_records_that_a_frame_makes_live_again_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workload_news, "REVIVED_LIMIT_BYTES", 2.5 * RECORD_BYTES)

    async def scenario(bench: Bench) -> None:
        await store(bench, 3, GONE.to_proto())
        running = [workload(number, workload_pb2.WORKLOAD_STATE_RUNNING, 2) for number in range(3)]
        await bench.fleet.apply_workloads(running, bench.session)
        assert sorted(bench.fleet.workloads) == ["w-0", "w-1"]
        assert all(len(one.spec.arguments) == 1 for one in bench.fleet.workloads.values())
        assert "workload name-2 stays ended until its next report" in caplog.text
        await bench.fleet.apply_workloads(running, bench.session)
        assert sorted(bench.fleet.workloads) == ["w-0", "w-1", "w-2"]

    on_bench(tmp_path, scenario)
