"""What specs, policies and operations must obey by themselves, and which states allow which operation."""

from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2, eviction_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.hook_pb2 import Hook
from leasehold.v1.operation_pb2 import (
    CheckpointOperation,
    DeleteCheckpointsOperation,
    Operation,
    ReleaseOperation,
    RestoreOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec, WorkloadState, WorkloadStatus
from leasehold_coordinator.core.operation_rules import check_operation, check_state, cordoned_gpus
from leasehold_coordinator.core.spec_rules import LADDER, check_policy, check_resources, check_spec
from leasehold_coordinator.errors import FleetError

KEEP, CUDA, IMAGE, STOP = LADDER
RUNNING, SUSPENDED, CHECKPOINTED, SLEEPING, STOPPED, UNKNOWN, WEDGED, RESTORING = (
    workload_pb2.WORKLOAD_STATE_RUNNING,
    workload_pb2.WORKLOAD_STATE_SUSPENDED,
    workload_pb2.WORKLOAD_STATE_CHECKPOINTED,
    workload_pb2.WORKLOAD_STATE_SLEEPING,
    workload_pb2.WORKLOAD_STATE_STOPPED,
    workload_pb2.WORKLOAD_STATE_UNKNOWN,
    workload_pb2.WORKLOAD_STATE_WEDGED,
    workload_pb2.WORKLOAD_STATE_RESTORING,
)
PARKED = {SLEEPING, SUSPENDED, CHECKPOINTED, STOPPED}


def refused(call: Callable[[], None]) -> tuple[str, str]:
    """The field and the message of an argument that is refused."""
    with pytest.raises(FleetError) as error:
        call()
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    return error.value.metadata["field"], error.value.message


@pytest.mark.parametrize("begin", [0, *LADDER])
@pytest.mark.parametrize("end", [0, *LADDER])
def test_a_ladder_leads_upwards(
    begin: eviction_pb2.ProcessStrategy.ValueType, end: eviction_pb2.ProcessStrategy.ValueType
) -> None:
    policy = EvictionPolicy(process_strategy=begin, escalate_to=end)
    if not end or end >= (begin or CUDA):
        check_policy("operation.policy", policy)
        return
    field, message = refused(lambda: check_policy("operation.policy", policy))
    assert field == "operation.policy.escalate_to"
    assert "is weaker than" in message
    assert message.endswith("STOP, or leave it out")


@pytest.mark.parametrize("axis", ["weight_strategy", "process_strategy", "escalate_to"])
def test_a_strategy_that_nobody_knows_is_named(axis: str) -> None:
    policy = EvictionPolicy(**{axis: 9})  # type: ignore[arg-type]  # what a newer release may add
    operation = Operation(suspend=SuspendOperation(policy=policy))
    field, message = refused(lambda: check_operation(operation))
    assert field == f"operation.policy.{axis}"
    wanted = "RETAIN, OFFLOAD, DISCARD" if axis == "weight_strategy" else "KEEP_RUNNING, CUDA_SUSPEND"
    assert f"unknown strategy 9: give {wanted}" in message
    spec = WorkloadSpec(arguments=["program"], eviction=policy)
    assert refused(lambda: check_spec(spec))[0] == f"spec.eviction.{axis}"


def test_specs_have_bounds() -> None:
    for good in (
        WorkloadSpec(keep_checkpoints=1),
        WorkloadSpec(keep_checkpoints=1000, hooks=[Hook()] * 32),
        WorkloadSpec(eviction=EvictionPolicy(process_strategy=KEEP, escalate_to=STOP)),
    ):
        good.arguments.append("program")
        check_spec(good)
    for field, bad in (
        ("spec.member_order", WorkloadSpec(member_order=99)),  # type: ignore[arg-type]
        (
            "spec.resources.gpu_preference",
            WorkloadSpec(resources=Resources(gpu_preference=99)),  # type: ignore[arg-type]
        ),
        ("spec.keep_checkpoints", WorkloadSpec(keep_checkpoints=0)),
        ("spec.keep_checkpoints", WorkloadSpec(keep_checkpoints=1001)),
        ("spec.hooks", WorkloadSpec(hooks=[Hook()] * 33)),
    ):
        bad.arguments.append("program")
        assert refused(lambda bad=bad: check_spec(bad))[0] == field  # type: ignore[misc]  # bound now


@pytest.mark.parametrize("ids", [[], [""], ["k-1", ""]])
def test_checkpoints_to_delete_are_named(ids: list[str]) -> None:
    operation = Operation(delete_checkpoints=DeleteCheckpointsOperation(checkpoint_ids=ids))
    assert refused(lambda: check_operation(operation))[0] == "operation.checkpoint_ids"
    assert list(cordoned_gpus(operation)) == []


@pytest.mark.parametrize(
    ("operation", "allowed"),
    [
        (Operation(suspend=SuspendOperation()), PARKED | {RUNNING}),
        (Operation(restore=RestoreOperation()), PARKED | {UNKNOWN, RUNNING}),
        (Operation(restore=RestoreOperation(gpu_uuids=["x"])), PARKED | {UNKNOWN}),
        (Operation(restore=RestoreOperation(pairs=[GpuPair()])), PARKED | {UNKNOWN}),
        (Operation(restore=RestoreOperation(checkpoint_id="k-1")), {STOPPED}),
        (Operation(checkpoint=CheckpointOperation()), {RUNNING}),
        (Operation(stop=StopOperation()), PARKED | {RUNNING, UNKNOWN, WEDGED}),
        (Operation(release=ReleaseOperation()), {RUNNING}),
    ],
)
def test_states_allow_operations(operation: Operation, allowed: set[WorkloadState.ValueType]) -> None:
    for state in (*sorted(PARKED), RUNNING, UNKNOWN, WEDGED, RESTORING):
        workload = Workload(
            name="one", status=WorkloadStatus(state=state), origin=workload_pb2.WORKLOAD_ORIGIN_ADOPT
        )
        if state in allowed:
            check_state(workload, operation)
            continue
        with pytest.raises(FleetError) as error:
            check_state(workload, operation)
        assert error.value.reason == errors_pb2.ERROR_REASON_WRONG_STATE
        name = WorkloadState.Name(state).removeprefix("WORKLOAD_STATE_")
        assert f"workload one is {name}" in error.value.message
        if operation.HasField("release") and state in PARKED:
            assert "restore it first" in error.value.message
        if operation.HasField("restore") and state == RUNNING and not operation.restore.checkpoint_id:
            assert error.value.message.endswith("can be restored; move it with `leasehold remap`")


@pytest.mark.parametrize(
    "operation", [Operation(stop=StopOperation()), Operation(release=ReleaseOperation())]
)
def test_what_was_never_started_is_not_stopped(operation: Operation) -> None:
    """A worker knows only what it has started, and would answer UNKNOWN_WORKLOAD."""
    workload = Workload(
        name="one",
        origin=workload_pb2.WORKLOAD_ORIGIN_RUN,
        status=WorkloadStatus(state=WorkloadState.WORKLOAD_STATE_FAILED),
    )
    with pytest.raises(FleetError, match="one is FAILED, and its worker did not start its program") as error:
        check_state(workload, operation)
    assert error.value.reason == errors_pb2.ERROR_REASON_WRONG_STATE
    adopted, concluded, started = Workload(), Workload(), Workload()
    for other in (adopted, concluded, started):
        other.CopyFrom(workload)
    adopted.origin = workload_pb2.WORKLOAD_ORIGIN_ADOPT  # a failed adoption leaves its program running
    with pytest.raises(
        FleetError, match="its worker did not adopt its process, which is not Leasehold's: del"
    ):
        check_state(adopted, operation)
    adopted.origin = workload_pb2.WORKLOAD_ORIGIN_CLAIM
    concluded.status.error.metadata["concluded_by"] = "coordinator"  # nobody knows what the worker did
    started.status.start_time.GetCurrentTime()
    for other in (adopted, concluded, started):
        check_state(other, operation)


@pytest.mark.parametrize("seconds", [0, -1, 10**14, 8 * 86_400])
def test_the_timeout_of_a_hook_is_bounded(seconds: int) -> None:
    hook = Hook(name="one", timeout=Duration(seconds=seconds))
    field, _ = refused(lambda: check_spec(WorkloadSpec(arguments=["program"], hooks=[hook])))
    assert field == "spec.hooks[0].timeout"


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (WorkloadSpec(arguments=["a", "b\0"]), "spec.arguments[1]"),
        (WorkloadSpec(arguments=["a"], working_directory="/\0"), "spec.working_directory"),
        (WorkloadSpec(arguments=["a"], environment={"A": "\0"}), "spec.environment"),
        (WorkloadSpec(arguments=["a"], environment={"A=B": "c"}), "spec.environment"),
        (WorkloadSpec(arguments=["a"], environment={"": "c"}), "spec.environment"),
        (WorkloadSpec(arguments=["a"], environment={"CUDA_VISIBLE_DEVICES": "0"}), "spec.environment"),
        (WorkloadSpec(arguments=["a"], environment={"NVIDIA_VISIBLE_DEVICES": "0"}), "spec.environment"),
        (
            WorkloadSpec(arguments=["a"], secret_environment={"LEASEHOLD_SOCKET": "/s"}),
            "spec.secret_environment",
        ),
    ],
)
def test_what_no_program_can_receive_is_refused(spec: WorkloadSpec, wanted: str) -> None:
    field, _ = refused(lambda: check_spec(spec))
    assert field == wanted


@pytest.mark.parametrize(
    ("resources", "wanted"),
    [
        (Resources(gpu_units=2), "gpu_count"),
        (Resources(gpu_memory_bytes=1), "gpu_count"),
        (Resources(gpu_name="H100"), "gpu_count"),
        (Resources(gpu_uuids=["GPU-a"]), "gpu_count"),
        (Resources(gpu_count=1, acceptable_gpu_units=[0]), "acceptable_gpu_units"),
        (Resources(gpu_count=2, gpu_units=9, acceptable_gpu_units=[2, 4]), "gpu_units"),
        (Resources(gpu_count=2, gpu_uuids=["GPU-a", "GPU-a"]), "gpu_uuids"),
    ],
)
def test_resources_that_contradict_each_other_are_refused(resources: Resources, wanted: str) -> None:
    field, _ = refused(lambda: check_resources(resources))
    assert field == f"spec.resources.{wanted}"


def test_resources_may_ask_for_nothing_or_for_some() -> None:
    check_resources(Resources())
    check_resources(Resources(cpu_millicores=1))
    check_resources(Resources(gpu_count=2, gpu_units=8, acceptable_gpu_units=[2, 4], gpu_uuids=["a", "b"]))
