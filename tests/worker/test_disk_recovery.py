"""Applications that were being stopped when the worker was killed, as its next start finds them."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.command_pb2 import RunOperation
from leasehold.v1.workload_pb2 import EvictionPolicy, WorkloadSpec
from leasehold_simgpu import SimulatedHost
from leasehold_worker import disk_recovery
from leasehold_worker.config import WorkerConfig
from leasehold_worker.disk_recovery import DiskRecovery
from leasehold_worker.intents import Intent, PartyIntent
from leasehold_worker.interrupted import Interrupted
from leasehold_worker.launching import launched
from leasehold_worker.parts import Parts, open_parts
from leasehold_worker.report import Report
from leasehold_worker.workload import RUNNING, STOPPED

POLICY = EvictionPolicy(process_strategy=workload_pb2.PROCESS_STRATEGY_STOP)
SLOW = "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done"
"""Is told to end, and takes its time."""


@pytest.fixture
async def parts(host: SimulatedHost, tmp_path: Path) -> AsyncIterator[Parts]:
    async with open_parts(WorkerConfig(state_dir=tmp_path), tmp_path / "workloads", lambda _: None) as opened:
        yield opened


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_recovery, "DEFAULT_GRACE_S", 0.3)


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def settled(parts: Parts, phase: str) -> tuple[str, int]:
    """What is said of a stop of a slow program, and the state of its workload."""
    spec = WorkloadSpec(arguments=["sh", "-c", SLOW])
    await parts.operations.run("w", RunOperation(name="w", spec=spec), Report(lambda _: None))
    workload = parts.workloads.get("w")
    with trio.fail_after(20):
        while "up" not in workload.output_path.read_text():  # noqa: ASYNC110 - a file tells nobody
            await trio.sleep(0.01)
    parts.workloads.stop_watching(workload)  # as for workloads of which there is such an intent
    if phase == "ending":
        os.kill(workload.root.pid, signal.SIGTERM)
    party = PartyIntent("w", (), (), (), parked=False)
    intent = Intent(phase, (party,), policy=POLICY, checkpoint_id="c-1")
    error, _ = await DiskRecovery(parts, Interrupted(parts)).settle(intent, parts.workloads)
    state = workload.state
    launcher = launched(parts.workloads.folder("w"))
    assert launcher is not None
    at_once = command_pb2.StopOperation(grace=Duration(seconds=0))
    await parts.stopping.stop("w", at_once, Report(lambda _: None))
    with trio.fail_after(20):
        while is_there(launcher.launcher_pid):  # noqa: ASYNC110 - it is reaped a little later
            await trio.sleep(0.01)
    return error.message if error else "", state


async def test_who_was_certainly_told_to_end_is_stopped_however_long_it_takes(parts: Parts) -> None:
    assert await settled(parts, "ending") == ("", STOPPED)
    assert not parts.workloads.get("w").processes()


async def test_who_was_perhaps_not_told_and_does_not_end_goes_on(parts: Parts) -> None:
    said, state = await settled(parts, "end")
    assert "goes on" in said
    assert state == RUNNING
