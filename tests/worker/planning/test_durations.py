"""How long parking and waking take: assumed, then as seen, by workload or by host."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.hook_pb2 import Hook
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_worker.commands.progress import OperationPhase, Progress
from leasehold_worker.driver.transfer_rates import Estimate
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.planning.durations import REMEMBERED_LIMIT, Durations, Way
from leasehold_worker.planning.plan import Plan, TierNeed, WorkloadPlan
from leasehold_worker.workloads.eviction import (
    CHECKPOINT,
    CUDA_SUSPEND,
    DISCARD,
    DISK,
    KEEP_RUNNING,
    OFFLOAD,
    RETAIN,
    STOP,
)
from leasehold_worker.workloads.workload import Workload

GB = 10**9


def plan_of(
    policy: EvictionPolicy, name: str = "w", *, disk_bytes: int | None = None, driver_s: float = 0.0
) -> Plan:
    workload = Workload(
        workload_id=name,
        name=name,
        spec=WorkloadSpec(hooks=[Hook(name="engine")]),
        root=ProcessIdentity(Pid(1), 1),
        output_path=Path("output"),
        start_time=datetime.now(UTC),
        lease=None,
    )
    return Plan(
        [WorkloadPlan(workload, full_bytes={"GPU-a": 8 * GB})],
        policy=policy,
        tiers=[] if disk_bytes is None else [TierNeed(DISK, disk_bytes, None)],
        estimate=Estimate(driver_s, "H100: checkpoint of 4 GiB at 1 GiB/s (assumed)") if driver_s else None,
        saves=policy.process_strategy == STOP,
        checkpoint_id="k-1" if policy.process_strategy == STOP else "",
    )


def report_of(disk_bytes: int = 0, **phases: float) -> Progress:
    told = Progress(lambda _: None, disk_bytes=disk_bytes)
    told.phases = [OperationPhase(name, seconds) for name, seconds in phases.items()]
    return told


def estimate(durations: Durations, plan: Plan, way: Way = Way.DOWN) -> Estimate:
    durations.complete(plan, way)
    assert plan.estimate is not None
    return plan.estimate


SLEEP = EvictionPolicy(weight_strategy=OFFLOAD, process_strategy=KEEP_RUNNING)
DROP = EvictionPolicy(weight_strategy=DISCARD, process_strategy=KEEP_RUNNING)
IMAGE = EvictionPolicy(weight_strategy=RETAIN, process_strategy=CHECKPOINT)
SUSPEND = EvictionPolicy(weight_strategy=RETAIN, process_strategy=CUDA_SUSPEND)
ENDED = EvictionPolicy(weight_strategy=RETAIN, process_strategy=STOP)


def test_nothing_seen_is_assumed_and_says_so() -> None:
    told = estimate(Durations(), plan_of(SLEEP))
    assert told.duration_s == pytest.approx(4.5)
    assert told.basis == "hooks 0.5 s and 1.863 GiB/s (assumed)"
    assert estimate(Durations(), plan_of(DROP), Way.UP).duration_s == pytest.approx(9.0)


def test_an_image_takes_the_time_of_the_driver_and_of_the_disk() -> None:
    durations = Durations()
    told = estimate(durations, plan_of(IMAGE, disk_bytes=10 * GB, driver_s=4.0))
    assert told.duration_s == pytest.approx(4.0 + 0.1 + 20.5)
    assert told.basis.startswith("H100: checkpoint of 4 GiB at 1 GiB/s (assumed); hooks")
    durations.learn("other", IMAGE, Way.DOWN, report_of(8 * GB, checkpoint=4.0, verify=0.1, image=32.0))
    told = estimate(durations, plan_of(IMAGE, disk_bytes=10 * GB, driver_s=4.0))
    assert told.duration_s == pytest.approx(4.0 + 0.1 + 40.0)
    assert "image at 238.4 MiB/s (as seen here)" in told.basis
    # The way back is another rate, of the verification and of CRIU's work together.
    durations.learn("other", IMAGE, Way.UP, report_of(8 * GB, verify=6.0, resume=10.0, restore=2.0))
    told = estimate(durations, plan_of(IMAGE, disk_bytes=10 * GB), Way.UP)
    assert told.duration_s == pytest.approx(20.0 + 0.1)


def test_hooks_and_programs_are_as_the_last_time_of_the_same_workload() -> None:
    durations = Durations()
    durations.learn("w", DROP, Way.UP, report_of(hooks=42.0))
    assert estimate(durations, plan_of(DROP), Way.UP).duration_s == 42.0
    assert estimate(durations, plan_of(DROP, "other"), Way.UP).duration_s != 42.0
    assert estimate(durations, plan_of(DROP), Way.DOWN).duration_s != 42.0
    assert estimate(durations, plan_of(SLEEP), Way.UP).duration_s != 42.0
    told = estimate(durations, plan_of(ENDED, disk_bytes=GB), Way.UP)
    assert told.duration_s == pytest.approx(1.0 + 11.0)
    durations.learn("w", ENDED, Way.DOWN, report_of(save=3.0, terminate=2.0))
    durations.learn("w", ENDED, Way.UP, report_of(start=0.5, load=60.0))
    assert estimate(durations, plan_of(ENDED, disk_bytes=GB), Way.DOWN).duration_s == 5.0
    assert estimate(durations, plan_of(ENDED, disk_bytes=GB), Way.UP).duration_s == 60.5


def test_saving_is_as_the_last_time_too() -> None:
    durations = Durations()
    durations.learn("w", ENDED, Way.DOWN, report_of(save=3.0))
    plan = plan_of(ENDED)
    durations.complete_save(plan)
    assert plan.estimate == Estimate(3.0, "save 3.0 s (last time)")


def test_what_failed_tells_nothing() -> None:
    durations = Durations()
    told = report_of(hooks=42.0)
    told.phases.append(OperationPhase("rollback", 1.0, rollback=True))
    durations.learn("w", DROP, Way.UP, told)
    assert "assumed" in estimate(durations, plan_of(DROP), Way.UP).basis


def test_a_refused_plan_and_one_with_nothing_to_do_have_no_estimate() -> None:
    for plan in (plan_of(SLEEP), plan_of(SLEEP)):
        plan.already_there = True
        Durations().complete(plan, Way.DOWN)
        assert plan.estimate is None
    refused = plan_of(SLEEP)
    refused.findings.refuse("state", OperationError(errors_pb2.ERROR_REASON_WRONG_STATE, "it is parked"))
    Durations().complete(refused, Way.DOWN)
    assert refused.estimate is None


def test_a_plain_suspend_without_hooks_is_the_drivers() -> None:
    plan = plan_of(SUSPEND, driver_s=4.0)
    plan.target.workload.spec.ClearField("hooks")
    assert estimate(Durations(), plan) == Estimate(4.0, "H100: checkpoint of 4 GiB at 1 GiB/s (assumed)")


def test_so_many_workloads_are_remembered() -> None:
    durations = Durations()
    for number in range(REMEMBERED_LIMIT + 1):
        durations.learn(str(number), DROP, Way.UP, report_of(hooks=42.0))
    assert "assumed" in estimate(durations, plan_of(DROP, "0"), Way.UP).basis
    assert "last time" in estimate(durations, plan_of(DROP, "1"), Way.UP).basis
