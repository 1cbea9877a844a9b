"""Counters that a worker process parks and wakes, for tests."""

from collections.abc import Callable, Sequence

from leasehold.v1 import command_pb2, eviction_pb2, hook_pb2, lease_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.hook_pb2 import CommandHook, Hook
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import WorkerLoad

from .conftest import WorkerProcess
from .counters import counter_run, wait_counting
from .scripted_coordinator import Session

SUCCEEDED, FAILED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED
BEFORE, AFTER = hook_pb2.HOOK_PHASE_BEFORE_SUSPEND, hook_pb2.HOOK_PHASE_AFTER_RESTORE
KEEP_RUNNING = eviction_pb2.PROCESS_STRATEGY_KEEP_RUNNING
CUDA_SUSPEND = eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND
CHECKPOINT = eviction_pb2.PROCESS_STRATEGY_CHECKPOINT
STOP = eviction_pb2.PROCESS_STRATEGY_STOP
FREE = lease_pb2.SLOT_STATE_FREE

Start = Callable[..., WorkerProcess]


def hook(name: str, phase: hook_pb2.HookPhase.ValueType, script: str) -> Hook:
    return Hook(name=name, phase=phase, command=CommandHook(arguments=["sh", "-c", script]))


def start(session: Session, hooks: Sequence[Hook] = ()) -> list[int]:
    """Starts a counter, and says the pids of its processes."""
    run = counter_run("w")
    run.spec.hooks.extend(hooks)
    outcome = session.run("run", "w", run=run)
    assert outcome.state == SUCCEEDED, outcome.error
    wait_counting(session, "w")
    return [workload.status.root_pid for workload in outcome.workloads]


def is_well(workload: Workload) -> bool:
    status = workload.status
    return status.state == workload_pb2.WORKLOAD_STATE_RUNNING and not status.HasField("error")


def suspend(
    session: Session, command_id: str, process: eviction_pb2.ProcessStrategy.ValueType, escalate_to: int = 0
) -> command_pb2.CommandState.ValueType:
    policy = EvictionPolicy(process_strategy=process)
    policy.escalate_to = escalate_to  # type: ignore[assignment]
    return session.run(command_id, "w", suspend=SuspendOperation(policy=policy, force=True)).state


def found(session: Session) -> Workload:
    """The workload as hello tells it."""
    (workload,) = session.hello.workloads
    return workload


def slots(session: Session) -> list[int]:
    session.wait(lambda frame: frame.HasField("worker_load"))
    loads = [frame.worker_load for frame in session.frames if frame.HasField("worker_load")]
    newest: WorkerLoad = loads[-1]
    return [slot.state for slot in newest.gpu_leases]
