"""Plans as text: effects, processes, resources, checks and estimates."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from leasehold.v1 import plan_pb2
from leasehold.v1.plan_pb2 import (
    Check,
    CheckResult,
    DestinationPlan,
    HostMemoryPlan,
    MemberPlan,
    Plan,
    Tier,
    TierPlan,
)
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import MemberState

from leasehold_client.arguments.gpu_names import gpu_places, with_places
from leasehold_client.arguments.policies import policy_text
from leasehold_client.byte_sizes import size_text
from leasehold_client.display.outcome import pair_lines, seconds_text
from leasehold_client.display.standard_output import echo
from leasehold_client.display.tables import field_size, table_lines
from leasehold_client.display.terminal_text import one_line
from leasehold_client.messages import duration_s, enum_name

_RESULTS: Final[dict[CheckResult.ValueType, str]] = {
    plan_pb2.CHECK_RESULT_PASSED: "ok",
    plan_pb2.CHECK_RESULT_WARNING: "warning",
    plan_pb2.CHECK_RESULT_REFUSED: "REFUSED",
    plan_pb2.CHECK_RESULT_NOT_CHECKED: "not checked",
}


_TIERS: Final[dict[Tier.ValueType, str]] = {
    plan_pb2.TIER_DEVICE: "in device memory",
    plan_pb2.TIER_HOST: "in host memory",
    plan_pb2.TIER_DISK: "on disk",
}
"""Places of a suspended workload's bytes."""

_RESTORES: Final = ("restore", "wake")
"""The verbs that restore. They have the same plan."""


def echo_plan(
    plan: Plan, what: str, verb: str, gpus: Iterable[FleetGpu], names: Mapping[str, str] | None = None
) -> None:
    """Prints a plan without its refusals, which go to standard error. Arguments as of :func:`plan_lines`."""
    for line in plan_lines(plan, what, verb, gpus, names):
        echo(line)


def plan_lines(
    plan: Plan, what: str, verb: str, gpus: Iterable[FleetGpu], names: Mapping[str, str] | None = None
) -> list[str]:
    """Formats a plan without its refusals: a summary, and then indented lines.

    Args:
        plan: The plan.
        what: Names of the workloads.
        verb: The planned verb, such as ``restore`` or its other name ``wake``.
        gpus: The GPUs of the fleet, for short names.
        names: Names of workloads by id, for a plan of several workloads.
    """
    places = gpu_places(gpus)
    summary = f"{what}: {verb} {_summary(plan, places)}"
    members = [_member_row(member, places, names or {}) for member in plan.members]
    lines = [f"policy {policy_text(plan.policy)}"] if plan.HasField("policy") else []
    lines += [f"{number}. {one_line(step)}" for number, step in enumerate(plan.steps, 1)]
    lines += table_lines(members)
    tiers = [
        tier for tier in plan.tiers if tier.tier != plan_pb2.TIER_HOST or not plan.HasField("host_memory")
    ]
    # A restore needs no room in its tiers: they hold the bytes already.
    lines += table_lines(_tier_row(tier, "held" if verb in _RESTORES else "needed") for tier in tiers)
    if plan.HasField("host_memory"):  # with the limit of the control group, so instead of the tier
        lines.append(_host_memory(plan.host_memory))
    lines += table_lines(_destination_row(destination, places) for destination in plan.destinations)
    lines += pair_lines(plan.pairs, [destination.gpu_uuid for destination in plan.destinations], places)
    # Checks of an older worker have no workload, so several may be equal.
    lines += table_lines(dict.fromkeys(_check_row(check, names or {}) for check in plan.checks))
    if plan.HasField("estimate"):
        seconds = duration_s(plan.estimate.duration)
        basis = f" ({one_line(plan.estimate.basis)})" if plan.estimate.basis else ""
        lines.append(f"takes about {seconds_text(seconds)}{basis}")
    lines += [f"warning: {one_line(warning)}" for warning in plan.warnings]
    return [summary, *(f"  {with_places(line, places)}" for line in lines)]


def _summary(plan: Plan, places: Mapping[str, str]) -> str:
    if plan.refusals:
        return "would be REFUSED"
    if plan.already_there:
        return "would have nothing to do"
    moved = _moved_bytes(plan)
    text = "would start" if moved is None else f"would move {size_text(moved)}"
    taken = [destination.gpu_uuid for destination in plan.destinations]
    changes = [
        f"{label} {', '.join(places.get(uuid, uuid) for uuid in uuids)}"
        for label, uuids in (("releases", plan.released_gpu_uuids), ("takes", taken))
        if uuids
    ]
    return f"{text}; it {' and '.join(changes)}" if changes else text


def _moved_bytes(plan: Plan) -> int | None:
    """Bytes that move to or from host memory or disk. None: unknown."""
    if plan.HasField("host_memory"):
        return plan.host_memory.needed_bytes if plan.host_memory.HasField("needed_bytes") else None
    if (known := _sum_if_known(plan.destinations)) is not None:
        return known
    return _sum_if_known([tier for tier in plan.tiers if tier.tier != plan_pb2.TIER_DEVICE])


def _sum_if_known(parts: Sequence[DestinationPlan | TierPlan]) -> int | None:
    needed = [part.needed_bytes for part in parts if part.HasField("needed_bytes")]
    return sum(needed) if needed and len(needed) == len(parts) else None


def _member_row(planned: MemberPlan, places: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    member = planned.member
    used = ", ".join(
        f"{places.get(uuid, uuid)} {size_text(used_bytes)}"
        for uuid, used_bytes in sorted(
            member.device_memory_bytes.items(), key=lambda item: places.get(item[0], item[0])
        )
    )
    state = enum_name(MemberState.Name, member.state, "MEMBER_STATE_")
    workload = [names.get(planned.workload_id, planned.workload_id)] if names else []
    return [*workload, f"pid {member.pid}", state, used or "no device memory known"]


def _check_row(check: Check, names: Mapping[str, str]) -> tuple[str, ...]:
    """A row of a check, with its workload in a plan of several. "-": the check is about all."""
    workload = [names.get(check.workload_id, check.workload_id) or "-"] if names else []
    return (*workload, check.name, _RESULTS.get(check.result, str(check.result)), one_line(check.detail))


def _host_memory(host_memory: HostMemoryPlan) -> str:
    parts = [f"{field_size(host_memory, 'needed_bytes')} needed"]
    if host_memory.HasField("available_bytes"):
        parts.append(f"{size_text(host_memory.available_bytes)} available")
    if host_memory.HasField("cgroup_available_bytes"):
        parts.append(f"{size_text(host_memory.cgroup_available_bytes)} available in its cgroup")
    return f"host memory: {', '.join(parts)}"


def _tier_row(tier: TierPlan, what: str) -> list[str]:
    available = f"{size_text(tier.available_bytes)} available" if tier.HasField("available_bytes") else ""
    return [
        _TIERS.get(tier.tier, f"tier {tier.tier}"),
        f"{field_size(tier, 'needed_bytes')} {what}",
        available,
    ]


def _destination_row(destination: DestinationPlan, places: Mapping[str, str]) -> list[str]:
    needed, free = field_size(destination, "needed_bytes"), field_size(destination, "free_bytes")
    place = places.get(destination.gpu_uuid, destination.gpu_uuid)
    return [f"on {place}", f"{needed} needed", f"{free} free", destination.gpu_name]
