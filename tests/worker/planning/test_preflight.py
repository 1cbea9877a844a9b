"""Plans that look at the GPUs afresh, in a worker that nothing else makes look: no agent runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from leasehold.v1 import command_pb2, errors_pb2, hook_pb2, plan_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RemapOperation, RestoreOperation, StopOperation, SuspendOperation
from leasehold_simgpu import SimulatedHost
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.planning.plan import Plan
from leasehold_worker.workloads.eviction import CHECKPOINT, CUDA_SUSPEND, KEEP_RUNNING, RETAIN, STOP

from tests.grids import grid
from tests.prefork import run
from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, counters, wait_counting
from tests.worker.operations.test_acquisition import SUCCEEDED, helper_run
from tests.worker.operations.test_handler import calls_of, leases, move, plan_of, start, uuids
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session
from tests.worker.workloads.test_foreign_processes import counting

MEMORY_INFO, NOT_SUPPORTED = "nvmlDeviceGetMemoryInfo", 3


@asynccontextmanager
async def opened(host: SimulatedHost, folder: Path, *names: str) -> AsyncIterator[Parts]:
    """The parts of a worker, with counters that count: the first on the first GPU, and so on."""
    async with open_parts(WorkerConfig(state_dir=folder), folder, lambda _: None) as parts:
        try:
            for name in names:
                await parts.operations.run(name, counter_run(name), progress())
            with trio.fail_after(30):
                while len(counters(host)) < len(names):  # noqa: ASYNC110 - simgpu tells by a file
                    await trio.sleep(0.02)
            yield parts
        finally:
            for workload in parts.workloads.all():
                await parts.termination.stop(workload.workload_id, StopOperation(force=True), progress())


def progress() -> Progress:
    return Progress.unheard()


def reasons(plan: Plan) -> list[int]:
    return [refusal.reason for refusal in plan.findings.refusals]


def calls(host: SimulatedHost, name: str) -> int:
    return sum(process.calls[name] for process in counters(host))


async def a_move_to_a_stranger(host: SimulatedHost, folder: Path) -> None:
    first, second = uuids(host)[:2]
    async with opened(host, folder, "w1") as parts:
        with counting(second) as (stranger, _):
            remap = RemapOperation(moves=[move("w1", first, second)])
            plan = await parts.operations.preflight.remap(remap)
            assert reasons(plan) == [errors_pb2.ERROR_REASON_FOREIGN_PROCESS]
            with pytest.raises(OperationError, match=f"process {stranger.pid}") as refused:
                await parts.operations.remap(remap, progress())
            assert refused.value.reason == errors_pb2.ERROR_REASON_FOREIGN_PROCESS
            assert calls(host, "lock") == 0


async def a_restore_to_a_stranger(host: SimulatedHost, folder: Path) -> None:
    first, second = uuids(host)[:2]
    async with opened(host, folder, "w1") as parts:
        await parts.operations.suspend("w1", SuspendOperation(), progress())
        with counting(first):
            named = await parts.operations.preflight.restore("w1", RestoreOperation(gpu_uuids=[first]))
            assert reasons(named) == [errors_pb2.ERROR_REASON_FOREIGN_PROCESS]
            await parts.operations.restore("w1", RestoreOperation(), progress())
            lease = parts.workloads.get("w1").lease
            assert lease is not None
            assert lease.gpu_uuids == (second,)


async def a_swap(host: SimulatedHost, folder: Path) -> None:
    first, second = uuids(host)[:2]
    async with opened(host, folder, "w1", "w2") as parts:
        swap = RemapOperation(moves=[move("w1", first, second), move("w2", second, first)])
        await parts.operations.remap(swap, progress())
        held = [lease.gpu_uuids for workload in parts.workloads.all() if (lease := workload.lease)]
        assert held == [(second,), (first,)]


def message(plan: Plan) -> str:
    """The message of the only refusal."""
    (refusal,) = plan.findings.refusals
    return refusal.message


async def a_restore_behind_claims(host: SimulatedHost, folder: Path) -> None:
    first = uuids(host)[0]
    async with opened(host, folder, "w1", "w2") as parts, trio.open_nursery() as nursery:
        await parts.operations.suspend("w1", SuspendOperation(), progress())
        nursery.start_soon(parts.pool.claim, "large", GpuRequest(len(uuids(host))))
        await trio.testing.wait_all_tasks_blocked()
        refused = await parts.operations.preflight.restore("w1", RestoreOperation())
        assert "reserved for earlier claims; 1 claim waits: wait " in message(refused)
        named = await parts.operations.preflight.restore("w1", RestoreOperation(gpu_uuids=[first]))
        assert not named.findings.refusals
        nursery.cancel_scope.cancel()


async def a_suspend_that_frees_nothing(host: SimulatedHost, folder: Path) -> None:
    """The command that its refusal names keeps the policy of the request."""
    awake = EvictionPolicy(process_strategy=KEEP_RUNNING)
    async with opened(host, folder, "w1") as parts:
        asked = await parts.operations.preflight.suspend("w1", SuspendOperation(policy=awake))
        parts.workloads.get("w1").spec.eviction.CopyFrom(awake)
        own = await parts.operations.preflight.suspend("w1", SuspendOperation())
        assert message(asked).endswith("`leasehold suspend w1 --process keep_running --force`")
        assert message(own).endswith("`leasehold suspend w1 --force`")


async def a_suspend_of_an_unready_workload(host: SimulatedHost, folder: Path) -> None:
    stronger_later = EvictionPolicy(
        weight_strategy=RETAIN, process_strategy=CUDA_SUSPEND, escalate_to=CHECKPOINT
    )
    async with opened(host, folder, "w1") as parts:
        workload = parts.workloads.get("w1")
        workload.spec.hooks.add(name="up", phase=hook_pb2.HOOK_PHASE_READINESS)
        asked = await parts.operations.preflight.suspend("w1", SuspendOperation(policy=stronger_later))
        own = await parts.operations.preflight.suspend("w1", SuspendOperation())
        assert reasons(asked) == reasons(own) == [errors_pb2.ERROR_REASON_NOT_READY]
        options = "--process cuda_suspend --escalate-to checkpoint --force"
        assert message(asked).endswith(f"`leasehold suspend w1 {options}`")
        assert message(own).endswith("`leasehold suspend w1 --force`")


async def a_restore_of_a_sleeper(host: SimulatedHost, folder: Path) -> None:
    """Both remedies of its refusal work."""
    first, second = uuids(host)[:2]
    async with opened(host, folder, "w1") as parts:
        sleep = SuspendOperation(policy=EvictionPolicy(process_strategy=KEEP_RUNNING), force=True)
        await parts.operations.suspend("w1", sleep, progress())
        lease = parts.pool.claim_gpus("w2", [first])
        refused = await parts.operations.preflight.restore("w1", RestoreOperation())
        assert message(refused) == (
            f"{first} is leased for workload w2: suspend its holder, or suspend the sleeping workload by "
            "cuda_suspend and restore it on another GPU"
        )
        stronger = SuspendOperation(policy=EvictionPolicy(process_strategy=CUDA_SUSPEND))
        await parts.operations.suspend("w1", stronger, progress())
        await parts.operations.restore("w1", RestoreOperation(), progress())
        restored = parts.workloads.get("w1").lease
        assert restored is not None
        assert restored.gpu_uuids == (second,)
        parts.pool.release(lease)


SCENARIOS = [
    a_move_to_a_stranger,
    a_restore_to_a_stranger,
    a_swap,
    a_restore_behind_claims,
    a_suspend_that_frees_nothing,
    a_suspend_of_an_unready_workload,
    a_restore_of_a_sleeper,
]


def play(name: str, directory: str, folder: str) -> None:
    """Plays a scenario in a process of its own: that of the tests has no libnvidia-ml."""
    trio.run(globals()[name], SimulatedHost.open(directory), Path(folder))


@pytest.mark.long
@pytest.mark.parametrize("scenario", grid(SCENARIOS, a_restore_to_a_stranger))
def test_a_plan_sees_who_is_on_its_gpus_now(
    scenario: Callable[[SimulatedHost, Path], Awaitable[None]], host: SimulatedHost, tmp_path: Path
) -> None:
    arguments: tuple[Any, ...] = (scenario.__name__, str(host.directory), str(tmp_path / "state"))
    done = run(
        f"from {__name__} import play; play{arguments!r}",
        [],
        env={**os.environ, **host.environment()},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def is_known(plan: plan_pb2.Plan) -> bool:
    """Whether a plan is sure that the workload fits where it goes."""
    (check,) = (check for check in plan.checks if check.name == "device_memory")
    assert (check.result == plan_pb2.CHECK_RESULT_WARNING) == (check.detail in plan.warnings)
    return check.result == plan_pb2.CHECK_RESULT_PASSED


@pytest.mark.long
def test_a_plan_says_that_it_does_not_know_the_memory_of_its_gpus(
    session: Session, host: SimulatedHost
) -> None:
    start(session, "w1")
    remap = RemapOperation(moves=[move("w1", *uuids(host)[:2])])
    assert is_known(plan_of(session, "", remap=remap))
    host.set_fault(MEMORY_INFO, error=NOT_SUPPORTED)
    plan = plan_of(session, "", remap=remap)
    assert not plan.refusals
    assert not is_known(plan)
    assert not plan.destinations[0].HasField("free_bytes")
    moved = session.run("c1", "w1", remap=remap)
    assert moved.state == SUCCEEDED, moved.error
    assert any("is unknown" in warning for warning in moved.result.warnings)
    assert session.run("c2", "w1", suspend=SuspendOperation()).state == SUCCEEDED
    assert not is_known(plan_of(session, "w1", restore=RestoreOperation()))
    assert session.run("c3", "w1", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "w1")


@pytest.mark.long
def test_a_gpu_with_a_stranger_and_unknown_memory_is_refused(session: Session, host: SimulatedHost) -> None:
    run = counter_run("w1")
    run.spec.resources.allow_foreign = True
    assert session.run("c1", "w1", run=run).state == SUCCEEDED
    wait_counting(session, "w1")
    first, second = uuids(host)[:2]
    remap = RemapOperation(moves=[move("w1", first, second)])
    with counting(second, host):
        assert is_known(plan_of(session, "", remap=remap))
        host.set_fault(MEMORY_INFO, error=NOT_SUPPORTED)
        refused = session.run("c2", "w1", remap=remap)
        assert refused.state == command_pb2.COMMAND_STATE_REJECTED
        assert refused.error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY
        assert refused.error.metadata["gpu_uuid"] == second
        assert calls(host, "lock") == 0


@pytest.mark.long
def test_memory_that_nvml_does_not_tell_by_process_is_known_from_the_gpu(
    session: Session, host: SimulatedHost
) -> None:
    pid = start(session, "w1")
    first, second = uuids(host)[:2]
    for gpu in range(len(host.gpus)):
        host.set_readings(gpu, hides_process_memory=True)
    remap = RemapOperation(moves=[move("w1", first, second)])
    assert plan_of(session, "", remap=remap).destinations[0].needed_bytes >= 2**20
    assert plan_of(session, "w1", suspend=SuspendOperation()).host_memory.needed_bytes >= 2**20
    suspended = session.run("c2", "w1", suspend=SuspendOperation())
    assert suspended.workloads[0].status.parked_bytes >= 2**20
    to_second = RestoreOperation(gpu_uuids=[second])
    plan = plan_of(session, "w1", restore=to_second)
    assert plan.destinations[0].needed_bytes >= 2**20
    (warning,) = plan.warnings
    assert "its first CUDA_VISIBLE_DEVICES" in warning
    host.hog(second, plan.destinations[0].free_bytes - plan.destinations[0].needed_bytes + 1)
    refused = session.run("c3", "w1", restore=to_second)
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED, refused
    assert refused.error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY
    assert calls_of(host, pid)["restore"] == 0
    host.hog(second, 0)
    restored = session.run("c4", "w1", restore=to_second)
    assert restored.state == SUCCEEDED, restored.error
    assert not any("not verified" in warning for warning in restored.result.warnings)
    wait_counting(session, "w1", second)


@pytest.mark.long
def test_members_of_unknown_size_are_not_parked(session: Session, host: SimulatedHost) -> None:
    pid = start(session, "w1")
    host.set_readings(0, hides_process_memory=True)
    host.set_fault(MEMORY_INFO, error=NOT_SUPPORTED)
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert refused.error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY
    assert "is unknown" in refused.error.message
    assert calls_of(host, pid)["lock"] == 0


@pytest.mark.long
def test_helpers_make_room_where_a_stranger_is_on_the_gpu_of_a_parked_workload(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    host = SimulatedHost.create(tmp_path / "two", gpus=2, chip="H100")
    start_worker(host)
    session = coordinator.next_session()
    assert session.run("c1", "one", run=counter_run("one")).state == SUCCEEDED
    wait_counting(session, "one")
    assert session.run("c2", "helper", run=helper_run("helper", 1)).state == SUCCEEDED
    wait_counting(session, "helper")
    assert session.run("c3", "one", suspend=SuspendOperation()).state == SUCCEEDED
    first, second = uuids(host)
    with counting(first, host):
        restored = session.run("c4", "one", restore=RestoreOperation())
        assert restored.state == SUCCEEDED, restored.error
        wait_counting(session, "one", second)
        leases(session, ["", "one"])


@pytest.mark.long
def test_a_stopped_workload_gets_the_gpus_of_helpers_as_a_run_does(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    host = SimulatedHost.create(tmp_path / "one", gpus=1, chip="H100")
    start_worker(host)
    session = coordinator.next_session()
    start(session, "one")
    stop = SuspendOperation(policy=EvictionPolicy(process_strategy=STOP), force=True)
    assert session.run("c1", "one", suspend=stop).state == SUCCEEDED
    assert session.run("c2", "helper", run=helper_run("helper", 1)).state == SUCCEEDED
    wait_counting(session, "helper")
    plan = plan_of(session, "one", restore=RestoreOperation())
    assert not plan.refusals
    (resources,) = (check for check in plan.checks if check.name == "resources")
    assert resources.result == plan_pb2.CHECK_RESULT_WARNING
    restored = session.run("c3", "one", restore=RestoreOperation())
    assert restored.state == SUCCEEDED, restored.error
    wait_counting(session, "one")
    leases(session, ["one"])


@pytest.mark.long
def test_a_stopped_workload_starts_on_as_many_named_gpus_as_its_spec_has(
    session: Session, host: SimulatedHost
) -> None:
    first, second, third = uuids(host)[:3]
    run = counter_run("two")
    run.spec.resources.gpu_count = 2
    assert session.run("c1", "two", run=run).state == SUCCEEDED
    stop = SuspendOperation(policy=EvictionPolicy(process_strategy=STOP), force=True)
    assert session.run("c2", "two", suspend=stop).state == SUCCEEDED
    too_few, busy = RestoreOperation(gpu_uuids=[third]), RestoreOperation(gpu_uuids=[first, third])
    assert session.run("c3", "one", run=counter_run("one")).state == SUCCEEDED
    for index, (named, reason) in enumerate(
        [
            (too_few, errors_pb2.ERROR_REASON_INVALID_ARGUMENT),
            (busy, errors_pb2.ERROR_REASON_NO_FREE_GPU),
        ]
    ):
        assert [each.reason for each in plan_of(session, "two", restore=named).refusals] == [reason]
        refused = session.run(f"c4{index}", "two", restore=named)
        assert refused.state == command_pb2.COMMAND_STATE_REJECTED
        assert refused.error.reason == reason
    named = RestoreOperation(gpu_uuids=[third, second])
    assert not plan_of(session, "two", restore=named).refusals
    restored = session.run("c5", "two", restore=named)
    assert restored.state == SUCCEEDED, restored.error
    assert list(restored.result.claimed_gpu_uuids) == [third, second]
