"""The worker's counters advance when something ends, in whatever way."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from leasehold.v1.operation_pb2 import Operation
from leasehold_simgpu import SimulatedHost
from leasehold_worker import metrics
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.driver.helper_pool import Driver, DriverCallUnansweredError
from leasehold_worker.driver.process import CheckpointProcess
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.pool import GpuPool
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.worker.conftest import Counter


def value(name: str, **labels: str) -> float:
    """The value of a sample. 0: there is none yet."""
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_the_wait_of_a_claim_ends_with_its_grant_or_its_claimer() -> None:
    waits = "leasehold_worker_claim_wait_seconds_count"
    before = {outcome: value(waits, outcome=outcome) for outcome in ("granted", "given_up")}
    pool = GpuPool([PoolGpu("GPU-1", "H100", 80 * 2**30, 1, 0)])
    first = await pool.claim("w-1", GpuRequest(1))
    assert first is not None
    with trio.move_on_after(0.01):
        await pool.claim("w-2", GpuRequest(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.claim, "w-3", GpuRequest(1))
        await trio.testing.wait_all_tasks_blocked()
        assert [waiter.workload_id for waiter in pool.waiting] == ["w-3"]
        pool.release(first)
    assert value(waits, outcome="granted") - before["granted"] == 2
    assert value(waits, outcome="given_up") - before["given_up"] == 1


async def test_a_call_past_its_deadline_loses_its_helper(
    host: SimulatedHost, driver: Driver, start_counter: Callable[..., Counter]
) -> None:
    losses = "leasehold_worker_driver_helper_losses_total"
    before = {reason: value(losses, reason=reason) for reason in ("expired", "died")}
    counter = start_counter()
    await counter.wait_count()
    assert driver.helpers == (1, 0)
    host.set_fault("lock", counter.process.pid, hang=True, times=1)
    driver.call_floor_s = 0.5
    with pytest.raises(DriverCallUnansweredError):
        await CheckpointProcess(driver, counter.process.pid).lock(0.1)
    assert value(losses, reason="expired") == before["expired"] + 1
    assert value(losses, reason="died") == before["died"]


def test_series_of_alerts_and_switches_exist_before_their_first_event() -> None:
    code = (
        "import leasehold_worker.commands.operation_metrics\n"
        "from leasehold_worker.metrics import REGISTRY\n"
        "from prometheus_client import generate_latest\n"
        "print(generate_latest(REGISTRY).decode())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    samples = [sample for family in parse_text(run.stdout) for sample in family.samples]
    losses = {
        sample.labels["reason"]: sample.value
        for sample in samples
        if sample.name == "leasehold_worker_driver_helper_losses_total"
    }
    assert losses == {"expired": 0, "died": 0}
    failures = {
        sample.labels["verb"]: sample.value
        for sample in samples
        if sample.name == "leasehold_worker_operation_duration_seconds_count"
    }
    assert failures == dict.fromkeys(Operation.DESCRIPTOR.fields_by_name, 0)
    for name in ("leasehold_worker_switches_total", "leasehold_worker_switch_gpu_seconds_total"):
        switches = {sample.labels["verb"]: sample.value for sample in samples if sample.name == name}
        assert switches == {"suspend": 0, "restore": 0, "remap": 0}


async def test_commits_are_timed_and_refused_ones_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = value("leasehold_worker_journal_commit_duration_seconds_count")
    errors = value("leasehold_worker_journal_errors_total")
    async with open_journal(tmp_path / "journal") as journal:
        await journal.wait_written()
        assert value("leasehold_worker_journal_commit_duration_seconds_count") > commits
        commit = journal._file.commit

        def refuse(*_: object) -> None:
            monkeypatch.setattr(journal._file, "commit", commit)
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(journal._file, "commit", refuse)
        journal.put(("probes", "x"), [])
        await journal.wait_settled()
    assert value("leasehold_worker_journal_errors_total") == errors + 1
