"""Plans as messages of the protos."""

from leasehold.v1 import plan_pb2

from leasehold_worker.driver.messages import member_message, pair_messages
from leasehold_worker.planning.plan import Plan
from leasehold_worker.timestamps import duration


def plan_message(record: Plan) -> plan_pb2.Plan:
    """A plan as the message of a dry run."""
    released = [
        gpu_uuid
        for target in record.targets
        if target.workload.lease is not None and not record.already_there
        for gpu_uuid in target.workload.lease.gpu_uuids
        if not any(gpu_uuid in other.destination for other in record.targets)
    ]
    need, estimate = record.host_memory, record.estimate
    return plan_pb2.Plan(
        already_there=record.already_there,
        members=[
            plan_pb2.MemberPlan(workload_id=target.workload.workload_id, member=member_message(member))
            for target in record.targets
            for member in target.members
        ],
        pairs=pair_messages(record.pairs),
        released_gpu_uuids=released,
        destinations=[
            plan_pb2.DestinationPlan(
                gpu_uuid=destination.gpu_uuid,
                gpu_name=destination.chip,
                free_bytes=destination.free_bytes,
                needed_bytes=destination.needed_bytes,
            )
            for destination in record.destinations
        ],
        host_memory=plan_pb2.HostMemoryPlan(
            needed_bytes=None if any(record.unsized_gpus()) else need.needed_bytes,
            available_bytes=need.available_bytes,
            cgroup_available_bytes=need.cgroup.available_bytes if need.cgroup else None,
        )
        if need
        else None,
        checks=[
            plan_pb2.Check(
                name=check.name, result=check.result, detail=check.detail, workload_id=check.workload_id
            )
            for check in record.findings.checks
        ],
        estimate=plan_pb2.Estimate(duration=duration(estimate.duration_s), basis=estimate.basis)
        if estimate
        else None,
        refusals=[error.to_proto() for error in record.findings.refusals],
        warnings=[*record.findings.warnings, *record.move_warnings],
        policy=record.policy,
        steps=record.steps,
        tiers=[
            plan_pb2.TierPlan(
                tier=need.tier, needed_bytes=need.needed_bytes, available_bytes=need.available_bytes
            )
            for need in record.tiers
        ],
    )
