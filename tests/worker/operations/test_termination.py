"""Stops that fail, or that an earlier start of the worker left unfinished, in the test's own process."""

import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RunOperation, StopOperation
from leasehold.v1.workload_pb2 import WorkloadSpec, WorkloadState
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.operations.kill import Killer
from leasehold_worker.workloads.eviction import KEEP_RUNNING
from leasehold_worker.workloads.states import EXITED, RUNNING, SLEEPING, SUSPENDING, UNKNOWN
from leasehold_worker.workloads.workload import Parked

from tests.worker.agent.test_disk_recovery import end

LOST = OperationError(errors_pb2.ERROR_REASON_DRIVER_ERROR, "lost")
NOW = StopOperation(grace=Duration())


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with open_parts(WorkerConfig(state_dir=tmp_path), tmp_path / "workloads", lambda _: None) as opened:
        yield opened


@pytest.mark.parametrize("before", [RUNNING, SLEEPING, UNKNOWN], ids=["running", "sleeping", "unknown"])
async def test_a_stop_that_is_resumed_and_refused_leaves_the_workload_as_before_the_stop(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, before: WorkloadState.ValueType
) -> None:
    async def unsafe(*_: object, **__: object) -> None:
        raise OperationError(errors_pb2.ERROR_REASON_UNSAFE_KILL, "it runs and can't be suspended")

    spec = WorkloadSpec(arguments=["sleep", "1000"])
    await parts.operations.run("w", RunOperation(name="w", spec=spec), Progress.unheard())
    workload = parts.workloads.get("w")
    parked = Parked(("GPU-0",), {}, EvictionPolicy(process_strategy=KEEP_RUNNING), datetime.now(UTC))
    if before == SLEEPING:
        parts.workloads.set_state(workload, SUSPENDING)
        parts.workloads.settle(workload, SLEEPING, (), parked)
    elif before == UNKNOWN:
        parts.workloads.settle(workload, UNKNOWN, (), home=("GPU-0",), error=LOST)
    found = (workload.state, workload.parked, workload.home, workload.error)
    with monkeypatch.context() as patch:
        patch.setattr(Killer, "kill", unsafe)
        with pytest.raises(OperationError, match="can't be suspended"):
            await parts.termination.resume(workload, NOW, Progress.unheard(), parked=False)
    assert (workload.state, workload.parked, workload.home, workload.error) == found
    await end(parts)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file, and so no process, can be opened meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("restored", [False, True], ids=["new", "restored"])
async def test_a_workload_that_can_not_be_signalled_is_in_its_former_state(
    parts: Parts, *, restored: bool
) -> None:
    """A restored workload is looked at before it is signalled, and the look fails, too."""
    spec = WorkloadSpec(arguments=["sleep", "1000"])
    await parts.operations.run("w", RunOperation(name="w", spec=spec), Progress.unheard())
    workload = parts.workloads.get("w")
    if restored:
        workload.mark_restored()
    with no_descriptors(), pytest.raises((OperationError, OSError), match=r"descriptors|Too many open files"):
        await parts.termination.stop("w", NOW, Progress.unheard())
    assert workload.state == RUNNING
    workload.restored = False
    await end(parts)
    assert workload.state == EXITED
