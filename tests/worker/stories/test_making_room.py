"""A full tier: who was parked longest ago moves down first, on a real worker with a budget of its own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import checkpoint_pb2, command_pb2, errors_pb2, eviction_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import (
    CheckpointOperation,
    DeleteCheckpointsOperation,
    RestoreOperation,
    RunOperation,
    SuspendOperation,
)
from leasehold.worker.v1.session_pb2 import CheckpointAnswer, CheckpointQuery, ConnectResponse
from leasehold_simgpu import SimulatedHost, Timing

from tests.environment import CRIU
from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, counts, read_output, wait_counting
from tests.worker.criu_cases import real_criu
from tests.worker.operations.test_handler import plan_of
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session

SUCCEEDED, REJECTED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_REJECTED
CUDA_SUSPEND = eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND
CHECKPOINT = eviction_pb2.PROCESS_STRATEGY_CHECKPOINT
STOP = eviction_pb2.PROCESS_STRATEGY_STOP

HOLDER = """
import itertools, os, time
memory = os.urandom(30 << 20)
for count in itertools.count():
    print(f"count={count} of {len(memory)}", flush=True)
    time.sleep(0.02)
"""
"""Counts, and needs an image of about 34 MiB."""


def require_criu() -> None:
    if isinstance(criu := real_criu(), str):
        pytest.skip(criu)


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


@pytest.fixture
def begin(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    tmp_path: Path,
) -> Callable[..., Session]:
    """Starts a worker with a budget, and with the CRIU of this host or another."""

    def start(budget: str, criu: str = "") -> Session:
        program = criu or str(CRIU)
        settings = tmp_path / "worker.toml"
        settings.write_text(f'{budget}\ncriu = "{program}"\n')
        start_worker(host, config=str(settings))
        return coordinator.next_session()

    return start


@pytest.fixture
def session(begin: Callable[..., Session]) -> Session:
    """A worker in whose host memory one counter has room, and not two."""
    return begin('parked_memory_limit = "800MiB"')


def start(session: Session, name: str, escalate_to: eviction_pb2.ProcessStrategy.ValueType) -> None:
    run = counter_run(name)
    policy = EvictionPolicy(process_strategy=CUDA_SUSPEND, escalate_to=escalate_to)
    run.spec.eviction.CopyFrom(policy)
    assert session.run(f"run-{name}", name, run=run).state == SUCCEEDED
    wait_counting(session, name)


def state(session: Session, name: str) -> str:
    """The workload's state, as it was told last."""
    found = ""
    for frame in list(session.frames):
        told = [*frame.command_update.workloads, frame.workload_event.workload]
        for workload in told:
            if workload.workload_id == name:
                found = workload_pb2.WorkloadState.Name(workload.status.state).removeprefix("WORKLOAD_STATE_")
    return found


@pytest.mark.long
def test_the_longest_parked_is_stopped_where_it_allows_that_and_nobody_else(session: Session) -> None:
    start(session, "a", STOP)
    start(session, "b", eviction_pb2.PROCESS_STRATEGY_UNSPECIFIED)
    start(session, "c", eviction_pb2.PROCESS_STRATEGY_UNSPECIFIED)
    assert session.run("s-a", "a", suspend=SuspendOperation()).state == SUCCEEDED
    plan = plan_of(session, "b", suspend=SuspendOperation())
    assert not plan.refusals
    moved = "workload a is suspended by "
    assert any(check.detail.startswith(moved) for check in plan.checks if check.name == "host_memory")
    assert state(session, "a") == "SUSPENDED", "a plan changes nothing"

    parked = session.run("s-b", "b", suspend=SuspendOperation())
    assert parked.state == SUCCEEDED, parked.error
    assert any(warning.startswith(moved) for warning in parked.result.warnings)
    # Where images work, they come before the end of its processes.
    moved_to = "STOPPED" if isinstance(real_criu(), str) else "CHECKPOINTED"
    session.wait(lambda _: state(session, "a") == moved_to)

    refused = session.run("s-c", "c", suspend=SuspendOperation())
    assert refused.state == REJECTED, "b allows nothing of the kind"
    assert refused.error.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY
    assert state(session, "c") == "RUNNING"
    assert state(session, "b") == "SUSPENDED"
    for name in ("a", "b"):
        woken = session.run(f"r-{name}", name, restore=RestoreOperation())
        assert woken.state == SUCCEEDED, woken.error
        wait_counting(session, name)


@pytest.mark.long
def test_who_was_moved_to_disk_goes_on_where_it_was(session: Session, tmp_path: Path) -> None:
    require_criu()
    start(session, "a", CHECKPOINT)
    start(session, "b", CHECKPOINT)
    for name in ("a", "b"):
        assert session.run(f"s-{name}", name, suspend=SuspendOperation()).state == SUCCEEDED
    assert state(session, "a") == "CHECKPOINTED"
    before = counts(read_output(session, "a"))

    listed = checkpoints(session)
    assert [(each.workload_id, each.in_use) for each in listed.checkpoints] == [("a", True)]
    assert listed.checkpoints[0].kind == checkpoint_pb2.CHECKPOINT_KIND_IMAGE
    image_id = listed.checkpoints[0].checkpoint_id
    kept = session.run("d", "", delete_checkpoints=DeleteCheckpointsOperation(checkpoint_ids=[image_id]))
    assert kept.error.reason == errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE

    assert session.run("r-a", "a", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "a")
    after = counts(read_output(session, "a"))
    assert after[: len(before)] == before
    assert after == list(range(after[0], after[0] + len(after))), "no count is lost, and none comes twice"
    assert not checkpoints(session).checkpoints, "nobody needs the image any more"
    assert not list((tmp_path / "state/images").rglob("*.partial"))


@pytest.mark.long
def test_who_is_parked_longest_on_a_full_disk_is_stopped_where_it_allows_that(
    begin: Callable[..., Session], tmp_path: Path
) -> None:
    require_criu()
    session = begin('checkpoint_limit = "60MiB"')  # room for one image, and not for two
    nothing_more = eviction_pb2.PROCESS_STRATEGY_UNSPECIFIED
    for name, escalate_to in (("a", STOP), ("b", nothing_more), ("c", STOP)):
        policy = EvictionPolicy(process_strategy=CHECKPOINT, escalate_to=escalate_to)
        spec = workload_pb2.WorkloadSpec(arguments=[sys.executable, "-c", HOLDER], eviction=policy)
        assert session.run(f"run-{name}", name, run=RunOperation(name=name, spec=spec)).state == SUCCEEDED
        wait_counting(session, name)
    assert session.run("s-a", "a", suspend=SuspendOperation()).state == SUCCEEDED
    (image,) = checkpoints(session).checkpoints
    plan = plan_of(session, "b", suspend=SuspendOperation())
    moved = "workload a is suspended by stop first, which frees "
    assert [check.detail.startswith(moved) for check in plan.checks if check.name == "disk"] == [True]
    assert (tmp_path / f"state/images/a/{image.checkpoint_id}").is_dir(), "a plan changes nothing"

    parked = session.run("s-b", "b", suspend=SuspendOperation())
    assert parked.state == SUCCEEDED, parked.error
    assert [warning for warning in parked.result.warnings if warning.startswith(moved)]
    session.wait(lambda _: state(session, "a") == "STOPPED")
    assert [each.workload_id for each in checkpoints(session).checkpoints] == ["b"]
    assert not list((tmp_path / "state/images").glob("a/*"))

    assert session.run("s-c", "c", suspend=SuspendOperation()).state == SUCCEEDED
    assert state(session, "c") == "STOPPED", "its own ladder leads on"
    assert state(session, "b") == "CHECKPOINTED", "b allows nothing of the kind"
    before = counts(read_output(session, "b"))
    for name in ("a", "b"):
        woken = session.run(f"r-{name}", name, restore=RestoreOperation())
        assert woken.state == SUCCEEDED, woken.error
        wait_counting(session, name)
    assert counts(read_output(session, "b"))[: len(before) + 1] == list(range(len(before) + 1))
    assert counts(read_output(session, "a")).count(0) == 2, "it began afresh"


@pytest.mark.long
def test_where_host_memory_is_short_and_nobody_makes_room_the_ladder_is_climbed(
    begin: Callable[..., Session],
) -> None:
    session = begin('parked_memory_limit = "100MiB"', criu="/nonexistent/criu")
    start(session, "a", CHECKPOINT)
    start(session, "b", STOP)
    refused = session.run("s-a", "a", suspend=SuspendOperation())
    assert (refused.state, refused.error.reason) == (
        REJECTED,
        errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
    )
    assert state(session, "a") == "RUNNING"
    wait_counting(session, "a")

    plan = plan_of(session, "b", suspend=SuspendOperation())
    assert (plan.policy.process_strategy, len(plan.refusals)) == (STOP, 0)
    parked = session.run("s-b", "b", suspend=SuspendOperation())
    assert parked.state == SUCCEEDED, parked.error
    for told in (plan.warnings, parked.result.warnings):
        skipped = [each for each in told if " was not possible: " in each]
        assert [each.split()[0] for each in skipped] == ["retain+cuda_suspend", "retain+checkpoint"]
        assert "513 MiB of device memory exceed the 100 MiB of available host memory" in skipped[0]
    assert parked.result.policy.process_strategy == STOP
    assert state(session, "b") == "STOPPED"
    assert len(parked.result.released_gpu_uuids) == 1
    assert session.run("r-b", "b", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "b")


@pytest.mark.long
def test_host_memory_that_is_only_passed_through_on_the_way_to_disk_is_not_counted(
    begin: Callable[..., Session],
) -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    session = begin('parked_memory_limit = "100MiB"')
    start(session, "a", CHECKPOINT)
    parked = session.run("s-a", "a", suspend=SuspendOperation())
    assert parked.state == SUCCEEDED, parked.error
    assert state(session, "a") == "CHECKPOINTED"
    assert [each.split(":")[0] for each in parked.result.warnings] == ["retain+cuda_suspend was not possible"]
    assert session.run("r-a", "a", restore=RestoreOperation()).state == SUCCEEDED
    wait_counting(session, "a")


@pytest.mark.long
def test_what_is_not_there_is_not_deleted_and_what_saves_nothing_is_not_saved(session: Session) -> None:
    gone = session.run("d", "", delete_checkpoints=DeleteCheckpointsOperation(checkpoint_ids=["k-1-0"]))
    assert gone.error.reason == errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT
    start(session, "a", CHECKPOINT)
    refused = session.run("c", "a", checkpoint=CheckpointOperation())
    assert (refused.state, refused.error.reason) == (REJECTED, errors_pb2.ERROR_REASON_KERNEL_NOT_READY)
    assert "is not checkpointable" in refused.error.message


def checkpoints(session: Session) -> CheckpointAnswer:
    """What the worker says that it has on disk."""
    session.down.put(ConnectResponse(checkpoint_query=CheckpointQuery(query_id=f"q{len(session.frames)}")))
    number = sum(frame.HasField("checkpoint_answer") for frame in session.frames)
    session.wait(lambda _: sum(f.HasField("checkpoint_answer") for f in session.frames) > number)
    return [frame for frame in session.frames if frame.HasField("checkpoint_answer")][-1].checkpoint_answer
