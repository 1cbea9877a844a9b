"""Chooses the worker of a new workload. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.workload_pb2 import Resources

from leasehold_coordinator.core.gpu_texts import cordon_text, foreign_text, gpus, listed, size
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.scheduling.candidates import Candidate, CandidateGpu, suits
from leasehold_coordinator.scheduling.shortages import Shortage, shortage_of, wanted_text

_REMEDIES: Final[dict[ErrorReason.ValueType, str]] = {
    errors_pb2.ERROR_REASON_NO_FREE_GPU: "{ways}, or ask for less",
    errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES: "stop a workload, or ask for less",
    errors_pb2.ERROR_REASON_CORDONED: "`leasehold uncordon` a worker, or connect another",
}
"""The remedy by reason. If workers have different shortages, the first of these reasons is reported."""

_WAYS: Final[dict[SlotState.ValueType, str]] = {
    lease_pb2.SLOT_STATE_LEASED: "suspend or stop a workload",
    lease_pb2.SLOT_STATE_RESERVED: "wait for a reserved GPU or name its hold",
    lease_pb2.SLOT_STATE_CORDONED: "uncordon a GPU",
    lease_pb2.SLOT_STATE_UNHEALTHY: "repair a GPU and reset its health",
    lease_pb2.SLOT_STATE_FOREIGN: "end or adopt a foreign process",
}
"""The ways to free a GPU, by its state."""

DESCRIBED_PER_REQUEST: Final = 30
GLANCED_PER_REQUEST: Final = 100
"""Workers that a refusal may look at, in full or by a glance, for the cost of one request to its caller."""

HEALTH_TEXT_LIMIT: Final = 256
"""Most characters of a GPU's health reason in a refusal."""

_NOT_FREE: Final[dict[SlotState.ValueType, ErrorReason.ValueType]] = {
    lease_pb2.SLOT_STATE_CORDONED: errors_pb2.ERROR_REASON_CORDONED,
    lease_pb2.SLOT_STATE_UNHEALTHY: errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
    lease_pb2.SLOT_STATE_FOREIGN: errors_pb2.ERROR_REASON_FOREIGN_PROCESS,
}
"""The reasons for GPUs that are neither leased nor free, by state."""


def choose_worker(
    candidates: Iterable[Candidate], resources: Resources, others: Sequence[Shortage] = ()
) -> Candidate:
    """The candidate with the most free matching GPUs among those that satisfy the request, then by name.

    Args:
        candidates: Either in any order, or by :attr:`Candidate.most`, most first, and then by name. Ordered
            candidates are read only as far as the choice needs.
        resources: The requested resources.
        others: Workers with too little room that are no candidates. Reading the candidates may add some.

    Raises:
        FleetError: UNKNOWN_GPU. WORKER_UNAVAILABLE, there is no candidate. CORDONED, all candidates are
            cordoned. INSUFFICIENT_RESOURCES, only CPU, memory or disk are short. NO_FREE_GPU otherwise. The
            message names the shortage of each worker.
    """
    if resources.gpu_uuids:
        candidates = list(candidates)
        if not any(uuid in one.gpus for one in candidates for uuid in resources.gpu_uuids):
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
            break  # no remaining candidate ranks higher
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
            "no worker is connected: start one with `leasehold worker`, or see `leasehold get workers`",
        )
    explained = sorted(shortages, key=lambda shortage: shortage.worker)
    refusal = _refusal([*explained, *others], resources)
    refusal.cost_requests = len(explained) / DESCRIBED_PER_REQUEST + len(others) / GLANCED_PER_REQUEST
    raise refusal


def _refusal(shortages: Sequence[Shortage], resources: Resources) -> FleetError:
    reasons = {shortage.reason for shortage in shortages}
    reason = next(reason for reason in _REMEDIES if reason in reasons)
    whys = listed([f"{shortage.worker}: {shortage.why}" for shortage in shortages])
    states = {state for shortage in shortages for state in shortage.states}
    ways = [way for state, way in _WAYS.items() if state in states] or [_WAYS[lease_pb2.SLOT_STATE_LEASED]]
    remedy = _REMEDIES[reason].format(ways=", ".join(ways))
    if all(shortage.for_good for shortage in shortages):
        is_about_gpus = reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
        another_kind = "ask for less, or for GPUs of another kind: `leasehold get gpus` lists them"
        remedy = another_kind if is_about_gpus else "ask for less"
    field = "spec.resources"
    if reason == errors_pb2.ERROR_REASON_NO_FREE_GPU:
        field = "spec.resources.gpu_count"
    return FleetError(reason, f"{wanted_text(resources)}; {whys}: {remedy}", field=field)


def check_named_gpus(
    candidates: Sequence[Candidate], gpu_uuids: Sequence[str], resources: Resources
) -> Candidate:
    """The candidate with these GPUs, if all are free and match the request.

    Raises:
        FleetError: UNKNOWN_GPU, DUPLICATE_GPU, NO_FREE_GPU, CORDONED, GPU_UNHEALTHY, FOREIGN_PROCESS or
            INSUFFICIENT_RESOURCES. INVALID_ARGUMENT, the number of GPUs differs from ``gpu_count``.
    """
    if len(set(gpu_uuids)) != len(gpu_uuids):
        raise FleetError(
            errors_pb2.ERROR_REASON_DUPLICATE_GPU, "a GPU is named twice: name it once", field="gpu_uuids"
        )
    if resources.gpu_count not in (0, len(gpu_uuids)):
        raise FleetError(
            errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"the request names {gpus(len(gpu_uuids))} and asks for {resources.gpu_count}: "
            "leave out the number",
            field="spec.resources.gpu_count",
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
        f"no connected worker has {unknown[0]}: `leasehold get gpus` lists the GPUs of each"
        if unknown
        else "the named GPUs are on several workers: name GPUs of one worker"
    )
    refusal = FleetError(errors_pb2.ERROR_REASON_UNKNOWN_GPU, message, field="gpu_uuids")
    refusal.cost_requests = len(candidates) / DESCRIBED_PER_REQUEST
    raise refusal


def _check_named(one: CandidateGpu, resources: Resources) -> None:
    uuid = one.gpu.uuid
    if not suits(one.gpu, resources):
        raise FleetError(
            errors_pb2.ERROR_REASON_NO_FREE_GPU,
            f"{uuid} ({one.gpu.name}) does not match the request: choose another GPU, or ask for less",
            gpu_uuid=uuid,
        )
    if one.is_open_to(resources):
        return
    match one.state:
        case lease_pb2.SLOT_STATE_CORDONED:
            why = f"is cordoned{cordon_text(one.lease.cordon)}: choose another, or `leasehold uncordon` it"
        case lease_pb2.SLOT_STATE_UNHEALTHY:
            health = f" ({one.lease.health_reason[:HEALTH_TEXT_LIMIT]})" if one.lease.health_reason else ""
            why = f"is unhealthy{health}: choose another, or repair it and run `leasehold gpu reset-health`"
        case lease_pb2.SLOT_STATE_FOREIGN:
            remedy = "choose another, end or adopt the process, or ask with `--allow-foreign`"
            why = f"is held by {foreign_text(one.lease, with_commands=False)}: {remedy}"
        case lease_pb2.SLOT_STATE_LEASED if one.lease.workload_id:
            why = f"is leased for workload {one.lease.workload_id}: choose another, or suspend its holder"
        case _ if one.is_crowded_for(resources):
            kept = size(one.lease.asleep_bytes)
            why = f"has {kept} in use by sleeping workloads: choose another, ask for less, or suspend them"
        case lease_pb2.SLOT_STATE_RESERVED:
            why = "is reserved by a hold or an operation: choose another, name the hold, or wait"
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
