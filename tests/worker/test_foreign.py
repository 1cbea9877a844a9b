"""Who else is on the GPUs: real processes on a simulated host."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from leasehold.v1 import workload_pb2
from leasehold_worker.config import WorkerConfig
from leasehold_worker.foreign import owner
from leasehold_worker.parts import open_parts
from leasehold_worker.processes import Pid, ProcessIdentity, identify
from leasehold_worker.workloads import CLAIM, WORKLOAD_ID_VARIABLE, Workload

SLEEP = "import time; print(flush=True); time.sleep(1000)"


def workload_of(identity: ProcessIdentity, workload_id: str = "w-1") -> Workload:
    return Workload(
        workload_id,
        workload_id,
        workload_pb2.WorkloadSpec(),
        identity,
        Path("/nowhere"),
        datetime.now(UTC),
        None,
        origin=CLAIM,
    )


def test_a_process_belongs_to_a_workload_by_descent_by_session_or_by_its_mark() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    orphaned = f"import os, sys\nif not os.fork():\n    os.execv(sys.executable, ['python', '-c', {SLEEP!r}])"
    marked = {WORKLOAD_ID_VARIABLE: "w-1"}
    cases = [(nested, {}, True), (orphaned, {}, True), (SLEEP, marked, False), (SLEEP, {}, False)]
    for code, environment, descends in cases:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            root = identify(process.pid)
            process.stdout.readline()
            (pid, *_) = _group(process.pid)
            mine = workload_of(root if descends and root else ProcessIdentity(Pid(1), 0))
            found = owner(pid, [workload_of(ProcessIdentity(Pid(1), 1), "w-0"), mine])
            assert found is (mine if descends or environment else None), code
        finally:
            os.killpg(process.pid, 9)
            process.wait()
            process.stdout.close()


def _group(session_id: int) -> list[int]:
    """The processes of a session, the last started first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session_id and fields[0] not in "ZX":
                found.append((int(fields[19]), int(entry.name)))
    return [pid for _, pid in sorted(found, reverse=True)]


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(state_dir=tmp_path / "state")


async def test_looks_at_the_same_time_are_one(
    config: WorkerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_parts(config, tmp_path / "workloads", lambda _: None) as parts:
        looks = []
        usage = parts.inventory.usage

        def count() -> object:
            looks.append(1)
            return usage()

        monkeypatch.setattr(parts.inventory, "usage", count)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(parts.foreign.look, parts.workloads)
        assert len(looks) == 2  # the one under way may have begun too early for the others
