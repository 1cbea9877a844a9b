"""Applications that were being stopped when the worker was killed, as its next start finds them."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import trio
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2, eviction_pb2, operation_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RunOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_simgpu import SimulatedHost
from leasehold_worker.agent import disk_recovery
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.agent.disk_recovery import DiskRecovery
from leasehold_worker.agent.member_recovery import MemberRecovery
from leasehold_worker.commands.intents import Intent, WorkloadIntent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import why_blocked
from leasehold_worker.leasing.gpu_selection import PoolGpu
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.operations import kill, termination
from leasehold_worker.operations.kill import Killer
from leasehold_worker.programs.programs import launched
from leasehold_worker.workloads.states import RUNNING, STOPPED, UNKNOWN
from leasehold_worker.workloads.workload import Workload

POLICY = EvictionPolicy(process_strategy=eviction_pb2.PROCESS_STRATEGY_STOP)
SLOW = "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done"
"""Is told to end, and takes its time."""

FORKING: Final = (
    "trap '' TERM; echo up; (for i in $(seq 400); do sleep 1000 & sleep 0.004; done) & sleep 1000"
)
"""Starts one process after the other, for some seconds."""


@pytest.fixture
async def parts(host: SimulatedHost, tmp_path: Path) -> AsyncIterator[Parts]:
    async with open_parts(WorkerConfig(state_dir=tmp_path), tmp_path / "workloads", lambda _: None) as opened:
        yield opened


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_recovery, "DEFAULT_GRACE_S", 0.3)


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def settled(
    parts: Parts, phase: str, checkpoint_id: str = "c-1", script: str = SLOW
) -> tuple[str, int]:
    """What is said of a stop of a slow program, and the state of its workload."""
    spec = WorkloadSpec(arguments=["sh", "-c", script])
    await parts.operations.run("w", RunOperation(name="w", spec=spec), Progress.unheard())
    workload = parts.workloads.get("w")
    with trio.fail_after(20):
        while "up" not in workload.output_path.read_text():  # noqa: ASYNC110 - a file tells nobody
            await trio.sleep(0.01)
    parts.exit_monitor.stop(workload)  # as for workloads of which there is such an intent
    if phase == "ending":
        os.kill(workload.root.pid, signal.SIGTERM)
    target = WorkloadIntent("w", (), (), (), parked=False)
    intent = Intent(phase, (target,), policy=POLICY, checkpoint_id=checkpoint_id)
    error, _ = await DiskRecovery(parts, MemberRecovery(parts)).settle(intent, parts.workloads)
    state = workload.state
    await end(parts)
    return error.message if error else "", state


async def end(parts: Parts) -> None:
    launcher = launched(parts.workloads.folder("w"))
    assert launcher is not None
    at_once = operation_pb2.StopOperation(grace=Duration(seconds=0))
    await parts.termination.stop("w", at_once, Progress.unheard())
    with trio.fail_after(20):
        while is_there(launcher.launcher_pid):  # noqa: ASYNC110 - it is reaped a little later
            await trio.sleep(0.01)


async def test_who_was_certainly_told_to_end_is_stopped_however_long_it_takes(parts: Parts) -> None:
    assert await settled(parts, "ending") == ("", STOPPED)
    assert not await parts.workloads.get("w").find_processes()


@pytest.mark.parametrize("checkpoint_id", ["c-1", ""], ids=["saved", "not saved"])
async def test_who_was_perhaps_not_told_and_does_not_end_goes_on(parts: Parts, checkpoint_id: str) -> None:
    said, state = await settled(parts, "end", checkpoint_id)
    assert "keeps running" in said
    assert state == RUNNING


async def test_what_is_started_while_the_rest_is_killed_is_killed_too(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill, "KILL_AGAIN_S", 0.1)
    assert await settled(parts, "ending", script=FORKING) == ("", STOPPED)
    assert not await parts.workloads.get("w").find_processes()


@pytest.mark.long
async def test_who_takes_long_to_be_suspended_before_the_kill_is_killed_all_the_same(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = Killer.kill

    async def slow(killer: Killer, workload: Workload, progress: Progress) -> None:
        await trio.sleep(0.5)
        await kill(killer, workload, progress)

    monkeypatch.setattr(termination, "KILL_WAIT_S", 0.2)
    monkeypatch.setattr(Killer, "kill", slow)
    assert await settled(parts, "ending") == ("", STOPPED)


async def test_gpus_of_what_can_not_be_ended_stay_leased(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = WorkloadSpec(arguments=["sleep", "1000"])
    await parts.operations.run("w", RunOperation(name="w", spec=spec), Progress.unheard())
    workload = parts.workloads.get("w")
    parts.exit_monitor.stop(workload)
    pool = GpuPool([PoolGpu("GPU-0", "H100")])
    lease = pool.reserve_gpus("w", ["GPU-0"])

    async def stuck(*_: object, **__: object) -> None:
        raise OperationError(errors_pb2.ERROR_REASON_DRIVER_ERROR, "stuck in the kernel")

    with monkeypatch.context() as patch:
        patch.setattr(parts.termination, "end_processes", stuck)
        intent = Intent("start", (WorkloadIntent("w", (), (), (), parked=True),), reserved=(lease,))
        with_gpu = replace(parts, pool=pool)
        error, _ = await DiskRecovery(with_gpu, MemberRecovery(with_gpu)).settle(intent, parts.workloads)
    assert error is not None
    assert workload.state == UNKNOWN
    assert workload.lease is not None
    assert pool.slots.get("GPU-0").lease == workload.lease
    await end(parts)


async def test_what_criu_does_not_let_go_of_is_not_asked_of_the_driver(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_recovery, "FREED_TIMEOUT_S", 0.2)
    spec = WorkloadSpec(arguments=["sleep", "1000"])
    await parts.operations.run("w", RunOperation(name="w", spec=spec), Progress.unheard())
    workload = parts.workloads.get("w")
    parts.exit_monitor.stop(workload)
    os.kill(workload.root.pid, signal.SIGSTOP)
    with trio.fail_after(20):
        while why_blocked(workload.root) is None:  # noqa: ASYNC110 - it stops a moment later
            await trio.sleep(0.01)
    intent = Intent("image", (WorkloadIntent("w", (), (), (), parked=False),), policy=POLICY)
    error, _ = await DiskRecovery(parts, MemberRecovery(parts)).settle(intent, parts.workloads)
    assert error is not None
    assert "CRIU still holds the processes" in error.message
    assert workload.state == UNKNOWN
    await end(parts)
