"""On which worker a new workload runs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker in contact.

    Attributes:
        worker_id: Its id.
        name: What people call it.
        gpus: Whether each of its GPUs is free, by UUID, in slot order.
        promised: GPUs, of those that are free, that commands which have not ended may still take.
    """

    worker_id: str
    name: str
    gpus: Mapping[str, bool]
    promised: int

    @property
    def room(self) -> int:
        """GPUs that a new workload can get."""
        return max(0, sum(self.gpus.values()) - self.promised)


def choose_worker(candidates: Sequence[Candidate], gpu_count: int) -> Candidate:
    """The candidate with the most free GPUs; among equals the first by name.

    Raises:
        FleetError: WORKER_UNAVAILABLE without any candidate, NO_FREE_GPU where none has room.
    """
    if not candidates:
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            "no worker is connected: start one with `leasehold worker`",
        )
    best = min(candidates, key=lambda candidate: (-candidate.room, candidate.name))
    if best.room < gpu_count:
        free = ", ".join(f"{candidate.name} {candidate.room}" for candidate in candidates)
        raise FleetError(
            errors_pb2.ERROR_REASON_NO_FREE_GPU,
            f"{gpu_count} GPUs are wanted on one worker, and free are: {free}; suspend or stop another first",
            field="gpu_count",
        )
    return best


def check_named_gpus(candidates: Sequence[Candidate], gpu_uuids: Sequence[str], gpu_count: int) -> Candidate:
    """The candidate that has these very GPUs, all of them free.

    Raises:
        FleetError: UNKNOWN_GPU, DUPLICATE_GPU, NO_FREE_GPU, or INVALID_ARGUMENT where the count differs.
    """
    if len(set(gpu_uuids)) != len(gpu_uuids):
        raise FleetError(
            errors_pb2.ERROR_REASON_DUPLICATE_GPU, "a GPU is named twice: name it once", field="gpu_uuids"
        )
    if gpu_count not in (0, len(gpu_uuids)):
        raise FleetError(
            errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"{len(gpu_uuids)} GPUs are named and gpu_count is {gpu_count}: make them agree",
            field="gpu_count",
        )
    for candidate in candidates:
        if set(gpu_uuids) <= candidate.gpus.keys():
            taken = [uuid for uuid in gpu_uuids if not candidate.gpus[uuid]]
            if taken:
                raise FleetError(
                    errors_pb2.ERROR_REASON_NO_FREE_GPU,
                    f"{taken[0]} is not free: choose another, or suspend its holder",
                    gpu_uuid=taken[0],
                )
            if candidate.room < len(gpu_uuids):
                raise FleetError(
                    errors_pb2.ERROR_REASON_NO_FREE_GPU,
                    f"commands under way may take the free GPUs of {candidate.name}: try again later",
                )
            return candidate
    known = {uuid for candidate in candidates for uuid in candidate.gpus}
    unknown = [uuid for uuid in gpu_uuids if uuid not in known]
    message = (
        f"no connected worker has {unknown[0]}: `leasehold get gpus` lists them"
        if unknown
        else "the named GPUs are on several workers: name those of one"
    )
    raise FleetError(errors_pb2.ERROR_REASON_UNKNOWN_GPU, message, field="gpu_uuids")
