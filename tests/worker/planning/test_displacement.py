"""Children of a workload that was moved, which begin on its old GPU."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, gpu_pb2, hook_pb2, lease_pb2
from leasehold.v1.operation_pb2 import Move, RemapOperation, RestoreOperation, SuspendOperation
from leasehold_simgpu import ProcessState, SimulatedHost, Timing

from tests.grids import grid
from tests.worker.counters import counter_run, counters
from tests.worker.operations.test_handler import plan_of
from tests.worker.scripted_coordinator import Session

TRUE = hook_pb2.CommandHook(arguments=["true"])
SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def remap(host: SimulatedHost, old: int, new: int) -> RemapOperation:
    pair = gpu_pb2.GpuPair(old_uuid=host.gpus[old].uuid, new_uuid=host.gpus[new].uuid)
    return RemapOperation(moves=[Move(workload_id="w1", pairs=[pair])])


def places(host: SimulatedHost) -> set[str]:
    """GPUs on which programs have memory."""
    running = [process for process in counters(host) if process.state is ProcessState.RUNNING]
    return {uuid for process in running for uuid in process.gpu_bytes}


@pytest.fixture
def moved(session: Session, host: SimulatedHost, tmp_path: Path, request: pytest.FixtureRequest) -> Session:
    """A workload that was moved from GPU 0 to 2, whose second process then began on GPU 0 of another's."""
    run = counter_run("w1")
    script = '"$@" & while [ ! -e "$GO" ]; do sleep 0.02; done; exec "$@"'
    run.spec.arguments[:] = ["/bin/sh", "-c", script, "sh", *run.spec.arguments]
    run.spec.environment["GO"] = str(tmp_path / "go")
    run.spec.hooks.extend(getattr(request, "param", ()))
    assert session.run("c1", "w1", run=run).state == SUCCEEDED
    wait_until(lambda: len(counters(host)) == 1, "the first counter uses its GPU")
    outcome = session.run("c2", "w1", remap=remap(host, 0, 2))
    assert outcome.state == SUCCEEDED
    assert any("its first CUDA_VISIBLE_DEVICES" in warning for warning in outcome.result.warnings)
    other = counter_run("other")
    other.gpu_uuids.append(host.gpus[0].uuid)
    assert session.run("c3", "w2", run=other).state == SUCCEEDED
    (tmp_path / "go").touch()
    wait_until(lambda: len(counters(host)) == 3, "the second counter uses the old GPU")
    return session


def told(warnings: Iterable[str]) -> list[str]:
    """Workloads of the warnings about processes that start after a move, in order."""
    texts = "|".join(warnings)
    return re.findall(r"new processes of workload (\w+) still inherit its first CUDA_VISIBLE_DEVICES", texts)


def check_remap(session: Session, operation: RemapOperation, *names: str) -> None:
    """The plan and the result of a remap warn about these workloads, and no others."""
    assert told(plan_of(session, "", remap=operation).warnings) == [*names]
    outcome = session.run(f"remap-{time.monotonic_ns()}", operation.moves[0].workload_id, remap=operation)
    assert outcome.state == SUCCEEDED, outcome.error
    assert told(outcome.result.warnings) == [*names]


@pytest.mark.long
def test_a_plan_and_its_result_warn_of_later_processes_on_other_gpus_than_those_of_the_start(
    session: Session, host: SimulatedHost
) -> None:
    def move(workload_id: str, *pairs: tuple[int, int]) -> Move:
        named = [
            gpu_pb2.GpuPair(old_uuid=host.gpus[old].uuid, new_uuid=host.gpus[new].uuid) for old, new in pairs
        ]
        return Move(workload_id=workload_id, pairs=named)

    assert session.run("c1", "w1", run=counter_run("one", 2)).state == SUCCEEDED
    assert session.run("c2", "w2", run=counter_run("two")).state == SUCCEEDED
    wait_until(lambda: len(counters(host)) == 2, "both use their GPUs")
    check_remap(session, RemapOperation(moves=[move("w1", (0, 1), (1, 0))]))  # all are its own
    check_remap(session, RemapOperation(moves=[move("w1", (0, 3))]), "one")
    swap = [move("w1", (3, 2)), move("w2", (2, 3))]
    check_remap(session, RemapOperation(moves=swap), "one", "two")
    check_remap(session, RemapOperation(moves=[move("w2", (3, 0))]), "two")
    check_remap(session, RemapOperation(moves=[move("w1", (2, 0)), move("w2", (0, 2))]))  # back
    assert session.run("c3", "w2", suspend=SuspendOperation()).state == SUCCEEDED
    there = RestoreOperation(gpu_uuids=[host.gpus[3].uuid])
    assert told(plan_of(session, "w2", restore=RestoreOperation()).warnings) == []
    assert told(plan_of(session, "w2", restore=there).warnings) == ["two"]
    restored = session.run("c4", "w2", restore=there)
    assert (restored.state, told(restored.result.warnings)) == (SUCCEEDED, ["two"])


def joined(host: SimulatedHost, *gpus: int) -> bool:
    return places(host) == {host.gpus[gpu].uuid for gpu in gpus}


@pytest.mark.long
@pytest.mark.parametrize(
    "moved",
    [
        [],
        pytest.param(
            [hook_pb2.Hook(name="down", phase=hook_pb2.HOOK_PHASE_BEFORE_SUSPEND, command=TRUE)],
            marks=pytest.mark.long,
        ),
    ],
    ids=["plain", "hooked"],
    indirect=True,
)
def test_a_suspend_and_a_restore_bring_a_child_of_a_moved_process_home(
    moved: Session, host: SimulatedHost
) -> None:
    planned = plan_of(moved, "w1", suspend=SuspendOperation())
    assert any("does not lease" in check.detail for check in planned.checks)
    suspended = moved.run("c4", "w1", suspend=SuspendOperation())
    assert suspended.state == SUCCEEDED, suspended.error
    assert any("does not lease" in warning for warning in suspended.result.warnings)
    assert joined(host, 0)
    assert moved.run("c5", "w1", restore=RestoreOperation()).state == SUCCEEDED
    assert joined(host, 0, 2)
    on_two = [process for process in counters(host) if host.gpus[2].uuid in process.gpu_bytes]
    assert len(on_two) == 2


@pytest.mark.long
@pytest.mark.parametrize("new", grid((2, 3), 2))
def test_a_remap_brings_a_child_of_a_moved_process_along(
    moved: Session, host: SimulatedHost, new: int
) -> None:
    outcome = moved.run("c4", "w1", remap=remap(host, 2, new))
    assert outcome.state == SUCCEEDED, outcome.error
    assert joined(host, 0, new)
    assert len([process for process in counters(host) if host.gpus[new].uuid in process.gpu_bytes]) == 2


@pytest.mark.long
def test_a_process_on_a_gpu_that_its_workload_does_not_lease_is_told(
    moved: Session, host: SimulatedHost
) -> None:
    load = moved.wait(
        lambda f: bool(f.worker_load.gpu_leases and f.worker_load.gpu_leases[0].foreign_processes)
    )
    (told,) = load.worker_load.gpu_leases[0].foreign_processes
    assert told.workload_id == "w1"
    assert load.worker_load.gpu_leases[0].state == lease_pb2.SLOT_STATE_LEASED
    assert moved.run("c4", "w1", suspend=SuspendOperation()).state == SUCCEEDED
    moved.wait(lambda f: bool(f.worker_load.gpu_leases) and not f.worker_load.gpu_leases[0].foreign_processes)
