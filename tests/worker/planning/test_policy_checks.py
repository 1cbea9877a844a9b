"""The needs of restores that start processes, while claims wait for the same resources of the host."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.testing
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RestoreOperation
from leasehold.v1.workload_pb2 import Resources as Requested
from leasehold.v1.workload_pb2 import WorkloadSpec, WorkloadState
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.applications.checkpointing import no_kernel
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.commands.progress import Progress
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.criu.support import CriuSupport
from leasehold_worker.errors import OperationError
from leasehold_worker.host.accounts import numbered_account
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.allocation import AllocRequest, Resources
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.holds import HoldTerms
from leasehold_worker.leasing.host_reservations import HostRequest
from leasehold_worker.leasing.leases import Cordon
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.planning.policy_checks import PolicyChecks
from leasehold_worker.workloads.eviction import CHECKPOINT, OFFLOAD, RETAIN, STOP
from leasehold_worker.workloads.states import CHECKPOINTED, STOPPED
from leasehold_worker.workloads.workload import Parked, Workload

from tests.worker.leasing.test_allocation import GIB, Host

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LACKS = errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with open_parts(WorkerConfig(state_dir=tmp_path), tmp_path / "workloads", lambda _: None) as opened:
        yield opened


def nobody_yields(*_: object) -> bool:
    return False


def suspended(process_strategy: int) -> Workload:
    """A workload without processes that needs 40 GiB of host memory again."""
    policy = EvictionPolicy(process_strategy=process_strategy, weight_strategy=RETAIN)  # type: ignore[arg-type]
    return Workload(
        "w",
        "w",
        WorkloadSpec(resources=Requested(gpu_count=1, memory_bytes=40 * GIB)),
        ProcessIdentity(Pid(2**22 + 1), 1),
        Path("output"),
        NOW,
        None,
        STOPPED if process_strategy == STOP else CHECKPOINTED,
        parked=Parked(("GPU-0",), {}, policy, NOW, host_bytes=0),
    )


async def test_a_workload_of_another_user_gets_no_image(tmp_path: Path, parts: Parts) -> None:
    """Its user could put a link where CRIU opens a file as root."""
    workload = suspended(CHECKPOINT)
    workload.account = numbered_account(2001, 2001)
    found = parts.criu
    criu = CriuSupport(CriuFacts(Path("criu"), "4.2"), found._store, found._host_memory, found._host)
    store = ApplicationStore(tmp_path)
    checks = PolicyChecks(parts.resources, parts.applications, store, parts.disk, criu, nobody_yields)
    plan = Plan([WorkloadPlan(workload)], hold_id="")
    for look in (checks.look_at_image, checks.look_at_kept_image):
        await look(plan)
        assert plan.findings.refusals[0].reason == errors_pb2.ERROR_REASON_UNSUPPORTED_STATE
        assert "CRIU would open files as root" in plan.findings.refusals[0].message
        plan.findings.refusals.clear()


async def test_a_refusal_names_a_complete_command(tmp_path: Path, parts: Parts) -> None:
    store = ApplicationStore(tmp_path)
    checks = PolicyChecks(parts.resources, parts.applications, store, parts.disk, parts.criu, nobody_yields)
    workload = suspended(STOP)
    policy = EvictionPolicy(process_strategy=STOP, weight_strategy=RETAIN)
    plan = Plan([WorkloadPlan(workload)], policy=policy)
    checks.check(plan, allowed=False)
    plan.asked_policy = policy
    checks.check(plan, allowed=False)
    plan.asked_policy = EvictionPolicy(weight_strategy=OFFLOAD, process_strategy=STOP, escalate_to=STOP)
    checks.check(plan, allowed=False)
    own, asked, complete = (refused.message for refused in plan.findings.refusals)
    assert own.endswith(": choose another policy, or use `leasehold suspend w --force`")
    assert asked.endswith(" or use `leasehold suspend w --process stop --force`")
    options = "--weights offload --process stop --escalate-to stop --force"
    assert complete.endswith(f" or use `leasehold suspend w {options}`")
    assert "`leasehold suspend w --process checkpoint`" in no_kernel(workload).message


@pytest.mark.parametrize("process_strategy", [STOP, CHECKPOINT], ids=["stopped", "checkpointed"])
@pytest.mark.parametrize("hold_id", ["", "h"], ids=["no hold", "hold"])
async def test_who_takes_a_hold_gets_host_memory_that_claims_wait_for(
    tmp_path: Path, parts: Parts, process_strategy: int, hold_id: str
) -> None:
    host = Host(units=(1, 1))
    held = host.pool.claim_gpus("w", ["GPU-0"])
    host.pool.holds.expect("w", HoldTerms("h", 60.0))
    host.pool.release(held)
    host.pool.claim_gpus("other", ["GPU-1"])
    store = ApplicationStore(tmp_path / "images")
    checks = PolicyChecks(host.resources, parts.applications, store, parts.disk, parts.criu, nobody_yields)
    async with trio.open_nursery() as nursery:
        request = AllocRequest(GpuRequest(1), HostRequest(memory_bytes=40 * GIB))
        nursery.start_soon(host.resources.claim, "waiting", request)
        await trio.testing.wait_all_tasks_blocked()
        plan = Plan([WorkloadPlan(suspended(process_strategy), home=("GPU-0",))], hold_id=hold_id)
        if process_strategy == STOP:
            operation = RestoreOperation(gpu_uuids=["GPU-0"], hold_id=hold_id)
            await checks.look_at_start(plan, operation)
        else:
            await checks.look_at_kept_image(plan)
        reasons = [refusal.reason for refusal in plan.findings.refusals]
        assert (LACKS in reasons) == (not hold_id)
        nursery.cancel_scope.cancel()


UUIDS = [f"GPU-00000000-0000-0000-0000-{number:012x}" for number in range(5)]
H100, A100 = "H100", "A100"
NAMED = [
    ("fits", UUIDS[:2], None, ""),
    ("too few", UUIDS[:1], errors_pb2.ERROR_REASON_INVALID_ARGUMENT, "1 GPUs, and the workload needs 2"),
    ("too many", UUIDS[:3], errors_pb2.ERROR_REASON_INVALID_ARGUMENT, "3 GPUs, and the workload needs 2"),
    ("twice", UUIDS[:1] * 2, errors_pb2.ERROR_REASON_DUPLICATE_GPU, "named twice"),
    ("unknown", [UUIDS[0], UUIDS[4]], errors_pb2.ERROR_REASON_UNKNOWN_GPU, "not a GPU of this worker"),
    ("model", [UUIDS[0], UUIDS[2]], errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU, f"is a {A100}"),
    ("memory", [UUIDS[0], UUIDS[3]], errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU, "has 40 GiB"),
]


class NamedHost(Host):
    """GPUs whose UUIDs have NVML's form: two that fit, one of another model, and one with less memory."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [(H100, 80), (H100, 80), (A100, 80), (H100, 40)]
        self.pool = GpuPool(
            [PoolGpu(uuid, name, size * GIB) for uuid, (name, size) in zip(UUIDS, kinds, strict=False)]
        )
        self.resources = Resources(self.pool, self.ledger)


async def refusal_of_start(host: Host, parts: Parts, gpu_uuids: list[str]) -> OperationError | None:
    """The refusal of a restore that starts a program with two H100 of 80 GiB on named GPUs."""
    store = parts.disk._application_store
    checks = PolicyChecks(host.resources, parts.applications, store, parts.disk, parts.criu, somebody_yields)
    workload = suspended(STOP)
    workload.spec.resources.MergeFrom(Requested(gpu_count=2, gpu_name=H100, gpu_memory_bytes=80 * GIB))
    plan = Plan([WorkloadPlan(workload, home=tuple(UUIDS[:2]))])
    await checks.look_at_start(plan, RestoreOperation(gpu_uuids=gpu_uuids))
    return plan.findings.refusals[0] if plan.findings.refusals else None


def somebody_yields(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("gpu_uuids", "reason", "text"), [case[1:] for case in NAMED], ids=[case[0] for case in NAMED]
)
async def test_the_named_gpus_of_a_start_have_the_number_and_kind_of_the_spec(
    parts: Parts, gpu_uuids: list[str], reason: int | None, text: str
) -> None:
    refusal = await refusal_of_start(NamedHost(), parts, gpu_uuids)
    assert (refusal.reason if refusal else None) == reason
    assert refusal is None or text in refusal.message


async def test_the_named_gpus_of_a_start_are_free(parts: Parts) -> None:
    """Preemptible workloads yield no GPU that somebody names."""
    host = NamedHost()
    lease = host.pool.claim_gpus("other", [UUIDS[1]])
    refusal = await refusal_of_start(host, parts, UUIDS[:2])
    assert refusal is not None
    assert refusal.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
    host.pool.release(lease)
    host.pool.slots.cordon(UUIDS[0], Cordon("repair", "ada", NOW))
    refusal = await refusal_of_start(host, parts, UUIDS[:2])
    assert refusal is not None
    assert refusal.reason == errors_pb2.ERROR_REASON_CORDONED


@pytest.mark.parametrize("state", ["CHECKPOINTED", "RUNNING"])
async def test_a_checkpoint_is_named_for_a_stopped_workload_alone(parts: Parts, state: str) -> None:
    """Others continue where they were, so a checkpoint would be ignored without a word."""
    workload = suspended(CHECKPOINT)
    workload.state = WorkloadState.Value(f"WORKLOAD_STATE_{state}")
    parts.workloads.add(workload)
    plan = await parts.operations.preflight.restore("w", RestoreOperation(checkpoint_id="k-1"))
    (refusal,) = plan.findings.refusals
    assert refusal.reason == errors_pb2.ERROR_REASON_WRONG_STATE
    assert f"w is {state}, and only a STOPPED workload starts from a checkpoint" in refusal.message
    assert not plan.already_there
    with pytest.raises(OperationError, match="only a STOPPED workload"):
        await parts.operations.restore("w", RestoreOperation(checkpoint_id="k-1"), Progress.unheard())
