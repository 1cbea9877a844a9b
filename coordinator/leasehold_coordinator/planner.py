"""On which worker a new workload runs. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.workload_pb2 import Resources

from leasehold_coordinator.candidates import Candidate, CandidateGpu, suits
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.shortages import (
    Shortage,
    cordon_text,
    foreign_text,
    listed,
    shortage_of,
    size,
    wanted_text,
)

_REMEDIES: Final[dict[ErrorReason.ValueType, str]] = {
    errors_pb2.ERROR_REASON_NO_FREE_GPU: "suspend or stop a workload, or ask for less",
    errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES: "stop a workload, or ask for less",
    errors_pb2.ERROR_REASON_CORDONED: "`leasehold uncordon` one, or connect another",
}
"""What to do about each reason. Where workers lack different things, the first that one lacks counts."""

HEALTH_TEXT_LIMIT: Final = 256
"""Characters of what is known against a GPU that a refusal repeats."""

_NOT_FREE: Final[dict[SlotState.ValueType, ErrorReason.ValueType]] = {
    lease_pb2.SLOT_STATE_CORDONED: errors_pb2.ERROR_REASON_CORDONED,
    lease_pb2.SLOT_STATE_UNHEALTHY: errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
    lease_pb2.SLOT_STATE_FOREIGN: errors_pb2.ERROR_REASON_FOREIGN_PROCESS,
}
"""Reasons of GPUs that nobody leases and that are not free all the same."""


def choose_worker(candidates: Iterable[Candidate], resources: Resources) -> Candidate:
    """The candidate that has what is wanted, and most free GPUs of it; among equals the first by name.

    Args:
        candidates: In any order. Those with a :attr:`Candidate.most` are ordered by it, most first, and then
            by name. No more of these are taken than the choice needs.
        resources: What is wanted.

    Raises:
        FleetError: WORKER_UNAVAILABLE without any candidate; CORDONED where all are; INSUFFICIENT_RESOURCES
            where only CPU, memory or disk lack; else NO_FREE_GPU. It says of each worker why.
    """
    if resources.gpu_uuids:
        candidates = list(candidates)
        if candidates and not any(uuid in one.gpus for one in candidates for uuid in resources.gpu_uuids):
            raise FleetError(
                errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                f"no connected worker has {resources.gpu_uuids[0]}: `leasehold get gpus` lists them",
                field="spec.resources.gpu_uuids",
            )
    shortages: list[Shortage] = []
    best: Candidate | None = None
    best_rank = (0, "")
    for candidate in candidates:
        if best is not None and candidate.most is not None and (-candidate.most, candidate.name) > best_rank:
            break  # neither this one nor any after it goes first
        shortage = shortage_of(candidate, resources)
        if shortage is not None:
            shortages.append(shortage)
            continue
        rank = (-candidate.spare(resources), candidate.name)
        if best is None or rank < best_rank:
            best, best_rank = candidate, rank
    if best is not None:
        return best
    if not shortages:
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            "no worker is connected: start one with `leasehold worker`",
        )
    raise _refusal(sorted(shortages, key=lambda shortage: shortage.worker), resources)


def _refusal(shortages: Sequence[Shortage], resources: Resources) -> FleetError:
    reasons = {shortage.reason for shortage in shortages}
    reason = next(reason for reason in _REMEDIES if reason in reasons)
    whys = listed([f"{shortage.worker}: {shortage.why}" for shortage in shortages])
    remedy = _REMEDIES[reason]
    if all(shortage.for_good for shortage in shortages):
        is_about_gpus = reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
        remedy = "ask for less, or for GPUs of another kind" if is_about_gpus else "ask for less"
    field = "gpu_count" if reason == errors_pb2.ERROR_REASON_NO_FREE_GPU else "resources"
    return FleetError(reason, f"{wanted_text(resources)}; {whys}: {remedy}", field=field)


def check_named_gpus(
    candidates: Sequence[Candidate], gpu_uuids: Sequence[str], resources: Resources
) -> Candidate:
    """The candidate that has these very GPUs, all of them free and of the kind that is wanted.

    Raises:
        FleetError: UNKNOWN_GPU, DUPLICATE_GPU, NO_FREE_GPU, CORDONED, GPU_UNHEALTHY, FOREIGN_PROCESS,
            INSUFFICIENT_RESOURCES, or INVALID_ARGUMENT where the count differs.
    """
    if len(set(gpu_uuids)) != len(gpu_uuids):
        raise FleetError(
            errors_pb2.ERROR_REASON_DUPLICATE_GPU, "a GPU is named twice: name it once", field="gpu_uuids"
        )
    if resources.gpu_count not in (0, len(gpu_uuids)):
        raise FleetError(
            errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"{len(gpu_uuids)} GPUs are named and gpu_count is {resources.gpu_count}: make them agree",
            field="gpu_count",
        )
    for candidate in candidates:
        if set(gpu_uuids) <= candidate.gpus.keys():
            for uuid in gpu_uuids:
                _check_named(candidate.gpus[uuid], resources)
            _check_rest(candidate, len(gpu_uuids), resources)
            return candidate
    known = {uuid for candidate in candidates for uuid in candidate.gpus}
    unknown = [uuid for uuid in gpu_uuids if uuid not in known]
    message = (
        f"no connected worker has {unknown[0]}: `leasehold get gpus` lists them"
        if unknown
        else "the named GPUs are on several workers: name those of one"
    )
    raise FleetError(errors_pb2.ERROR_REASON_UNKNOWN_GPU, message, field="gpu_uuids")


def _check_named(one: CandidateGpu, resources: Resources) -> None:
    uuid = one.gpu.uuid
    if not suits(one.gpu, resources):
        raise FleetError(
            errors_pb2.ERROR_REASON_NO_FREE_GPU,
            f"{uuid} ({one.gpu.name}) is not of the kind that is wanted: name another, or ask for less",
            gpu_uuid=uuid,
        )
    if one.is_open_to(resources):
        return
    match one.state:
        case lease_pb2.SLOT_STATE_CORDONED:
            why = f"is cordoned{cordon_text(one.lease.cordon)}: choose another, or `leasehold uncordon` it"
        case lease_pb2.SLOT_STATE_UNHEALTHY:
            health = f" ({one.lease.health_reason[:HEALTH_TEXT_LIMIT]})" if one.lease.health_reason else ""
            why = f"is unhealthy{health}: choose another, or mend it and `leasehold gpu reset-health` it"
        case lease_pb2.SLOT_STATE_FOREIGN:
            remedy = "choose another, end or adopt that, or ask with `--allow-foreign`"
            why = f"is held by {foreign_text(one.lease)}: {remedy}"
        case _ if one.is_crowded_for(resources):
            kept = size(one.lease.asleep_bytes)
            why = f"has {kept} in use by sleeping workloads: choose another, ask for less, or suspend them"
        case _:
            why = "is not free: choose another, or suspend its holder"
    reason = _NOT_FREE.get(one.state, errors_pb2.ERROR_REASON_NO_FREE_GPU)
    raise FleetError(reason, f"{uuid} {why}", gpu_uuid=uuid)


def _check_rest(candidate: Candidate, gpu_count: int, resources: Resources) -> None:
    wanted = Resources()
    wanted.CopyFrom(resources)
    wanted.gpu_count = gpu_count
    shortage = shortage_of(candidate, wanted)
    if shortage is None:
        return
    if shortage.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU and candidate.room(wanted) < gpu_count:
        raise FleetError(
            errors_pb2.ERROR_REASON_NO_FREE_GPU,
            f"commands under way may take the free GPUs of {candidate.name}: try again later",
        )
    raise _refusal([shortage], wanted)
