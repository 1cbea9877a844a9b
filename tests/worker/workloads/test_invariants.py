"""Each invariant of a workload is seen once it is broken."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.leases import Lease, LeaseId
from leasehold_worker.workloads.eviction import CUDA_SUSPEND, RETAIN
from leasehold_worker.workloads.eviction import STOP as STOP_STRATEGY
from leasehold_worker.workloads.invariants import violations
from leasehold_worker.workloads.states import (
    CHECKPOINTED,
    EXITED,
    SUSPENDED,
    SUSPENDING,
    UNKNOWN,
)
from leasehold_worker.workloads.workload import Parked, Workload

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = Lease(LeaseId("lease"), "w", ("GPU-a",), NOW, 1)


def parked(strategy: object = CUDA_SUSPEND, checkpoint_id: str = "") -> Parked:
    policy = EvictionPolicy(weight_strategy=RETAIN, process_strategy=strategy)  # type: ignore[arg-type]
    return Parked(("GPU-a",), {}, policy, NOW, checkpoint_id=checkpoint_id)


def workload(**fields: object) -> Workload:
    root = ProcessIdentity(Pid(1), 1)
    made = Workload("w", "job", WorkloadSpec(), root, Path("output"), NOW, LEASE)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_what_runs_and_what_is_suspended_is_valid() -> None:
    assert not list(violations(workload()))
    assert not list(violations(workload(state=SUSPENDED, lease=None, parked=parked())))
    ended = workload(state=EXITED, lease=None)
    ended.ended.set()
    assert not list(violations(ended))
    failed = OperationError(errors_pb2.ERROR_REASON_DRIVER_ERROR, "why")
    assert not list(violations(workload(state=UNKNOWN, error=failed)))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda: workload(state=SUSPENDING), "in the middle"),
        (lambda: workload(parked=parked()), "has a record"),
        (lambda: workload(state=SUSPENDED, lease=None), "has no record"),
        (lambda: workload(state=SUSPENDED, parked=parked()), "is suspended and holds"),
        (lambda: workload(state=SUSPENDED, lease=None, parked=parked(STOP_STRATEGY)), "by strategy"),
        (lambda: workload(state=CHECKPOINTED, lease=None, parked=parked(), absent=True), "no checkpoint"),
        (lambda: workload(absent=True), "recorded as gone"),
        (lambda: workload(state=UNKNOWN), "without an error"),
        (lambda: workload(home=("GPU-b",)), "GPUs of a later restore"),
        (lambda: workload(state=EXITED), "still holds"),
        (lambda: workload(state=EXITED, lease=None), "waiters are not notified"),
    ],
)
def test_each_violation_is_seen(broken: Callable[[], Workload], why: str) -> None:
    assert [text for text in violations(broken()) if why in text]
