"""Rules for specs and eviction policies, independent of the fleet's state. Pure."""

from typing import Final

from google.protobuf.descriptor import EnumDescriptor
from leasehold.v1 import eviction_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy, ProcessStrategy, WeightStrategy
from leasehold.v1.operation_pb2 import AdoptOperation
from leasehold.v1.workload_pb2 import GpuPreference, HelperTerms, MemberOrder, Resources, WorkloadSpec

from leasehold_coordinator.core.field_rules import check_duration, check_gpu_list
from leasehold_coordinator.errors import invalid

SPEC_LIMIT_BYTES: Final = 131_072
"""Half of the largest frame."""

HOOK_LIMIT: Final = 32
"""Most hooks of one workload."""

CHECKPOINT_LIMIT: Final = 1000
"""Most application checkpoints that a workload may keep."""

SIGNAL_LIMIT: Final = 64
"""The highest real-time signal of Linux."""

HELPER_STRATEGIES: Final = frozenset(
    {
        eviction_pb2.PROCESS_STRATEGY_UNSPECIFIED,
        eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
        eviction_pb2.PROCESS_STRATEGY_STOP,
    }
)

LADDER: Final = (
    eviction_pb2.PROCESS_STRATEGY_KEEP_RUNNING,
    eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND,
    eviction_pb2.PROCESS_STRATEGY_CHECKPOINT,
    eviction_pb2.PROCESS_STRATEGY_STOP,
)
"""The process strategies from weak to strong. A stronger one leaves less of the processes on the host."""


SET_BY_WORKER: Final = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}) | {
    f"LEASEHOLD_{name}" for name in ("LEASE_ID", "WORKLOAD", "WORKLOAD_ID", "SOCKET", "RESTORE")
}
"""Variables that the worker sets for every program, so other values would be ignored."""


def check_spec(spec: WorkloadSpec) -> None:
    """Refuses a spec that is invalid on every worker. The worker checks the contents of hooks.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if not spec.arguments or not spec.arguments[0]:
        raise invalid("spec.arguments", "a workload needs a program: give its arguments")
    for index, argument in enumerate(spec.arguments):
        _check_no_nul(f"spec.arguments[{index}]", argument)
    _check_no_nul("spec.working_directory", spec.working_directory)
    for field, variables in (
        ("spec.environment", spec.environment),
        ("spec.secret_environment", spec.secret_environment),
    ):
        for name, value in variables.items():
            if not name or "=" in name:
                raise invalid(field, f"invalid environment variable {name!r}: give a name without '='")
            if name in SET_BY_WORKER:
                raise invalid(field, f"the worker sets {name} for the lease: leave it out")
            _check_no_nul(field, name + value)
    for name in spec.secret_environment:
        if name in spec.environment:
            raise invalid(
                "spec.secret_environment",
                f"the variable {name} is in environment and in secret_environment: give it once",
            )
    if spec.HasField("helper"):
        check_helper(spec.helper)
    check_parking("spec", spec)
    check_gpu_list("spec.resources.gpu_uuids", spec.resources.gpu_uuids)
    check_gpu_list("spec.resources.acceptable_gpu_units", spec.resources.acceptable_gpu_units)
    _check_known("spec.member_order", MemberOrder.DESCRIPTOR, spec.member_order, "order")
    preference = spec.resources.gpu_preference
    _check_known("spec.resources.gpu_preference", GpuPreference.DESCRIPTOR, preference, "preference")
    if spec.HasField("keep_checkpoints") and not 0 < spec.keep_checkpoints <= CHECKPOINT_LIMIT:
        raise invalid(
            "spec.keep_checkpoints",
            f"{spec.keep_checkpoints} checkpoints can't be kept: give 1 to {CHECKPOINT_LIMIT}",
        )


def check_resources(resources: Resources) -> None:
    """Refuses resources that contradict each other on every host.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    path, count, units = "spec.resources", resources.gpu_count, list(resources.acceptable_gpu_units)
    is_described = resources.gpu_memory_bytes or resources.gpu_units or resources.gpu_name
    if not count and (is_described or resources.gpu_uuids or units):
        raise invalid(
            f"{path}.gpu_count", "the request describes GPUs, but needs none: request 1 or more (--gpus)"
        )
    if any(one < 1 for one in units):
        raise invalid(
            f"{path}.acceptable_gpu_units", "every GPU has 1 unit or more: leave smaller numbers out"
        )
    if units and resources.gpu_units > count * max(units):
        raise invalid(
            f"{path}.gpu_units",
            f"{count} GPUs with at most {max(units)} units each do not have {resources.gpu_units} units: "
            "ask for more GPUs, or accept larger ones",
        )
    if resources.gpu_uuids and len(set(resources.gpu_uuids)) < count:
        raise invalid(
            f"{path}.gpu_uuids",
            f"the request needs {count} GPUs and names {len(set(resources.gpu_uuids))}: name more",
        )


def _check_no_nul(field: str, text: str) -> None:
    if "\0" in text:
        raise invalid(field, f"{field} has a NUL byte, which no program can receive: remove it")


def check_parking(field: str, wanted: WorkloadSpec | AdoptOperation) -> None:
    """Refuses an invalid eviction policy, too many hooks, and invalid timeouts of hooks.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if wanted.ByteSize() > SPEC_LIMIT_BYTES:
        raise invalid(
            field,
            f"{field} has {wanted.ByteSize()} of at most {SPEC_LIMIT_BYTES} bytes: move data into a file",
        )
    if wanted.HasField("eviction"):
        check_policy(f"{field}.eviction", wanted.eviction)
    if len(wanted.hooks) > HOOK_LIMIT:
        raise invalid(f"{field}.hooks", f"{len(wanted.hooks)} hooks are too many: give {HOOK_LIMIT} at most")
    for index, hook in enumerate(wanted.hooks):
        if hook.HasField("timeout"):
            check_duration(f"{field}.hooks[{index}].timeout", hook.timeout)


def check_helper(helper: HelperTerms) -> None:
    """Refuses invalid terms of a preemptible workload.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if helper.HasField("grace"):
        check_duration("spec.helper.grace", helper.grace, may_be_zero=True)
    if helper.process_strategy not in HELPER_STRATEGIES:
        raise invalid(
            "spec.helper.process_strategy",
            "a helper is suspended or stopped when it gives its GPUs back: give CUDA_SUSPEND or STOP",
        )
    if helper.HasField("signal_number") and not 0 < helper.signal_number <= SIGNAL_LIMIT:
        raise invalid(
            "spec.helper.signal_number",
            f"invalid signal {helper.signal_number}: give a signal number of Linux, 1 to {SIGNAL_LIMIT}",
        )


def check_policy(field: str, policy: EvictionPolicy) -> None:
    """Refuses a policy with an unknown strategy, or with an escalation to a weaker strategy.

    Args:
        field: The path of the policy in the request.
        policy: The policy.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    _check_known(f"{field}.weight_strategy", WeightStrategy.DESCRIPTOR, policy.weight_strategy)
    _check_known(f"{field}.process_strategy", ProcessStrategy.DESCRIPTOR, policy.process_strategy)
    _check_known(f"{field}.escalate_to", ProcessStrategy.DESCRIPTOR, policy.escalate_to)
    begin = policy.process_strategy or eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND
    if policy.escalate_to and LADDER.index(policy.escalate_to) < LADDER.index(begin):
        raise invalid(
            f"{field}.escalate_to",
            f"{_word(policy.escalate_to)} is weaker than {_word(begin)}, and escalation never weakens a "
            f"strategy: give {', '.join(map(_word, LADDER[LADDER.index(begin) :]))}, or leave it out",
        )


def _check_known(field: str, values: EnumDescriptor, number: int, what: str = "strategy") -> None:
    if number not in values.values_by_number:
        prefix = values.values[0].name.removesuffix("UNSPECIFIED")
        names = ", ".join(one.name.removeprefix(prefix) for one in values.values[1:])
        raise invalid(field, f"unknown {what} {number}: give {names}")


def _word(strategy: ProcessStrategy.ValueType) -> str:
    return ProcessStrategy.Name(strategy).removeprefix("PROCESS_STRATEGY_")
