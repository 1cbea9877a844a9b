"""The worker's own records as messages of the protos, in one place."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2
from leasehold.v1 import command_pb2, gpu_pb2, lease_pb2, plan_pb2, worker_session_pb2, workload_pb2

from leasehold_worker.commands.progress import Report
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import Member, MemberOutcome
from leasehold_worker.gpus.inventory import GpuFacts, GpuReading
from leasehold_worker.leasing.leases import Cordon, Lease, SlotLease
from leasehold_worker.planning.plan import Plan
from leasehold_worker.workloads import workload as records
from leasehold_worker.workloads.workload import Workload

UPDATE_LIMIT_BYTES: Final = 131_072
"""Half a frame, as for hello."""

REASON_LIMIT: Final = 256
"""Characters of what is known against a GPU that are told."""

MESSAGE_LIMIT: Final = 1024
"""Characters that are left of an error's sentence where nothing else fits."""


def timestamp(moment: datetime | None) -> timestamp_pb2.Timestamp | None:
    """A moment with its time zone, or None."""
    if moment is None:
        return None
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(moment)
    return message


def duration(seconds: float) -> duration_pb2.Duration:
    """A span of time, to the nanosecond."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def gpu(facts: GpuFacts, slot: int, units: int) -> gpu_pb2.Gpu:
    """A GPU of ``hello``."""
    return gpu_pb2.Gpu(
        uuid=facts.uuid,
        slot=slot,
        name=facts.name,
        memory_total_bytes=facts.memory_total_bytes,
        compute_capability=facts.compute_capability,
        pci_bus_id=facts.pci_bus_id,
        pci_device_id=facts.pci_device_id,
        serial=facts.serial,
        mig_enabled=facts.mig_enabled,
        persistence_mode=facts.persistence_mode,
        numa_node=facts.numa_node,
        units=units,
    )


def gpu_lease(slot: SlotLease, reading: GpuReading | None) -> lease_pb2.GpuLease:
    """An entry of ``worker_load``."""
    standing = slot.standing
    return lease_pb2.GpuLease(
        gpu_uuid=slot.gpu_uuid,
        slot=slot.slot,
        state=slot.state,
        lease_id=slot.lease.lease_id if slot.lease else None,
        workload_id=slot.lease.workload_id if slot.lease else None,
        since=timestamp(slot.since),
        health=standing.health,
        sample=None if reading is None or reading.lost else _sample(reading),
        health_reason=standing.health_reason[:REASON_LIMIT],
        cordon=cordon(standing.cordon),
        foreign_processes=[
            lease_pb2.ForeignProcess(
                pid=process.pid,
                user=process.user,
                command=process.command,
                device_memory_bytes=process.device_memory_bytes,
                workload_id=process.workload_id,
                workload_name=process.workload_name,
            )
            for process in slot.foreign
        ],
        asleep_bytes=slot.asleep_bytes or None,
    )


def cordon(record: Cordon | None) -> lease_pb2.Cordon | None:
    """A cordon, or None."""
    if record is None:
        return None
    return lease_pb2.Cordon(
        reason=record.reason,
        cordoned_by=record.cordoned_by,
        cordon_time=timestamp(record.cordon_time),
    )


def _sample(reading: GpuReading) -> gpu_pb2.GpuSample:
    return gpu_pb2.GpuSample(
        sample_time=timestamp(datetime.now(UTC)),
        utilization_percent=reading.utilization_percent,
        encoder_utilization_percent=reading.encoder_utilization_percent,
        decoder_utilization_percent=reading.decoder_utilization_percent,
        memory_used_bytes=reading.memory_used_bytes,
        memory_total_bytes=reading.memory_total_bytes,
        temperature_celsius=reading.temperature_celsius,
        ecc_uncorrected_errors=reading.ecc_uncorrected_errors,
    )


def workload(record: Workload, worker_id: str) -> workload_pb2.Workload:
    """A workload with its status."""
    return workload_pb2.Workload(
        workload_id=record.workload_id,
        name=record.name,
        worker_id=worker_id,
        spec=record.spec,
        status=_status(record),
        origin=record.origin,
        user=record.user,
    )


def _status(record: Workload) -> workload_pb2.WorkloadStatus:
    parked = record.parked
    return workload_pb2.WorkloadStatus(
        state=record.state,
        generation=record.generation,
        lease=lease(record.lease) if record.lease else None,
        members=[_member(member) for member in record.members],
        root_pid=record.root.pid if record.state not in records.AWAY else None,
        parked_gpu_uuids=parked.gpu_uuids if parked else (),
        parked_bytes=parked_bytes(record),
        park_time=timestamp(parked.since) if parked else None,
        parked_by=parked.policy if parked else None,
        start_time=timestamp(record.start_time),
        end_time=timestamp(record.end_time),
        exit=_exit(record.returncode) if record.returncode is not None else None,
        error=record.trouble.to_proto() if record.trouble else None,
        yielded=record.yielded,
        kernel=record.kernel,
        ready_time=timestamp(record.ready_time),
        checkpoint_id=(parked.checkpoint_id or None) if parked else None,
        disk_bytes=(parked.disk_bytes or None) if parked else None,
    )


def parked_bytes(record: Workload) -> int | None:
    """Device memory that the workload has on the host. None: it is not parked, or NVML couldn't say."""
    parked = record.parked
    if parked is None or parked.disk_bytes or not parked.device_memory_bytes:
        return None
    return records.parked_bytes(record)


def lease(record: Lease) -> lease_pb2.Lease:
    """A lease."""
    return lease_pb2.Lease(
        lease_id=record.lease_id,
        workload_id=record.workload_id,
        gpu_uuids=record.gpu_uuids,
        grant_time=timestamp(record.grant_time),
        fencing_token=record.fencing_token,
    )


def _member(member: Member) -> workload_pb2.Member:
    return workload_pb2.Member(
        pid=member.identity.pid,
        start_time_ticks=member.identity.start_time_ticks,
        state=member.state,
        device_memory_bytes=member.device_memory_bytes,
    )


def _exit(returncode: int) -> workload_pb2.Exit:
    """An exit in Python's form, where a signal is negative."""
    if returncode < 0:
        return workload_pb2.Exit(signal_number=-returncode)
    return workload_pb2.Exit(code=returncode)


def command_result(
    report: Report, duration_s: float, driver_version: str | None
) -> command_pb2.CommandResult:
    """What a command did."""
    return command_pb2.CommandResult(
        already_there=report.already_there,
        members=[_outcome(workload_id, outcome) for workload_id, outcome in report.outcomes],
        applied_pairs=_pairs(report.applied_pairs),
        released_gpu_uuids=report.released_gpu_uuids,
        claimed_gpu_uuids=report.claimed_gpu_uuids,
        driver_version=driver_version,
        duration=duration(duration_s),
        warnings=report.warnings,
        phases=[
            command_pb2.PhaseTiming(
                phase=phase.name,
                duration=duration(phase.duration_s),
                failed=phase.failed,
                rollback=phase.rollback,
            )
            for phase in report.phases
        ],
        policy=report.policy,
        checkpoint_id=report.checkpoint_id or None,
        disk_bytes=report.disk_bytes or None,
    )


def _pairs(pairs: Iterable[GpuPair]) -> list[gpu_pb2.GpuPair]:
    return [gpu_pb2.GpuPair(old_uuid=pair.old_uuid, new_uuid=pair.new_uuid) for pair in pairs]


def _outcome(workload_id: str, outcome: MemberOutcome) -> command_pb2.MemberOutcome:
    return command_pb2.MemberOutcome(
        workload_id=workload_id,
        pid=outcome.member.identity.pid,
        start_time_ticks=outcome.member.identity.start_time_ticks,
        state_before=outcome.state_before,
        state_after=outcome.state_after,
        phases=[
            command_pb2.PhaseTiming(
                phase=str(phase.call),
                duration=duration(phase.duration_s),
                moved_bytes=phase.moved_bytes,
                failed=phase.failed,
                rollback=phase.rollback,
            )
            for phase in outcome.phases
        ],
        error=outcome.error.to_proto() if outcome.error else None,
        rolled_back=outcome.rolled_back,
    )


def plan(record: Plan) -> plan_pb2.Plan:
    """What an operation would do."""
    released = [
        gpu_uuid
        for party in record.parties
        if party.workload.lease is not None and not record.already_there
        for gpu_uuid in party.workload.lease.gpu_uuids
        if not any(gpu_uuid in other.destination for other in record.parties)
    ]
    need, estimate = record.host_memory, record.estimate
    return plan_pb2.Plan(
        already_there=record.already_there,
        members=[
            plan_pb2.MemberPlan(workload_id=party.workload.workload_id, member=_member(member))
            for party in record.parties
            for member in party.members
        ],
        pairs=_pairs(record.pairs),
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
            needed_bytes=need.needed_bytes,
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
        warnings=record.findings.warnings,
        policy=record.policy,
        steps=record.steps,
        tiers=[
            plan_pb2.TierPlan(
                tier=need.tier, needed_bytes=need.needed_bytes, available_bytes=need.available_bytes
            )
            for need in record.tiers
        ],
    )


def gpu_leases(slots: Iterable[SlotLease], readings: Mapping[str, GpuReading]) -> list[lease_pb2.GpuLease]:
    """The pool, in slot order."""
    return [gpu_lease(slot, readings.get(slot.gpu_uuid)) for slot in slots]


def parked_workloads(records: Iterable[Workload]) -> list[worker_session_pb2.ParkedWorkload]:
    """Those of the workloads that are parked."""
    return [
        worker_session_pb2.ParkedWorkload(
            workload_id=record.workload_id,
            parked_bytes=parked_bytes(record),
            disk_bytes=record.parked.disk_bytes or None,
        )
        for record in records
        if record.parked is not None
    ]


def fitting(update: worker_session_pb2.CommandUpdate) -> worker_session_pb2.CommandUpdate:
    """The update, or what of it goes into a frame.

    A larger frame ends the stream, and the next one, on which it is told again. Specs go first, which the
    coordinator has; then workloads' members, which hello tells; then what was done with each member.
    """
    fitted = worker_session_pb2.CommandUpdate()
    fitted.CopyFrom(update)
    for trim in _TRIMS:
        if fitted.ByteSize() <= UPDATE_LIMIT_BYTES:
            break
        trim(fitted)
    return fitted


def _leave_out_specs(update: worker_session_pb2.CommandUpdate) -> None:
    for told in update.workloads:
        told.ClearField("spec")


def _leave_out_members(update: worker_session_pb2.CommandUpdate) -> None:
    for told in update.workloads:
        told.status.ClearField("members")


def _leave_out_member_outcomes(update: worker_session_pb2.CommandUpdate) -> None:
    update.result.ClearField("members")
    update.result.warnings.append("what was done with each member is more than can be told")


def _leave_out_all_but_the_outcome(update: worker_session_pb2.CommandUpdate) -> None:
    update.ClearField("workloads")
    update.ClearField("result")
    if update.HasField("error"):
        update.error.ClearField("metadata")
        update.error.message = update.error.message[:MESSAGE_LIMIT]


_TRIMS: Final[tuple[Callable[[worker_session_pb2.CommandUpdate], None], ...]] = (
    _leave_out_specs,
    _leave_out_members,
    _leave_out_member_outcomes,
    _leave_out_all_but_the_outcome,
)
