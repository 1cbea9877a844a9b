"""The bytes of parked workloads and the places of these bytes, with the cases of the web page. Pure."""

from typing import Final, NamedTuple

from leasehold.v1 import eviction_pb2, workload_pb2
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus

from leasehold_client.byte_sizes import size_text

DISCARDED: Final = "weights discarded"
"""The place of weights that a restore loads again."""


class ParkedSize(NamedTuple):
    """The bytes of a parked workload.

    Attributes:
        size: Their number. None: unknown, as for workloads of others.
        place: Their place, such as ``on disk``.
    """

    size: int | None
    place: str


def parked_size(workload: Workload) -> ParkedSize:
    """The bytes of a parked workload."""
    status = workload.status
    host = status.parked_bytes if status.HasField("parked_bytes") else None
    disk = status.disk_bytes if status.HasField("disk_bytes") else None
    match status.state:
        case workload_pb2.WORKLOAD_STATE_CHECKPOINTED:
            return ParkedSize(disk, "on disk")
        case workload_pb2.WORKLOAD_STATE_STOPPED:
            has_no_checkpoint = status.HasField("park_time") and not status.checkpoint_id
            return ParkedSize(0 if disk is None and has_no_checkpoint else disk, "on disk")
        case workload_pb2.WORKLOAD_STATE_SLEEPING:
            return _sleeping_size(status, host)
        case _:
            return ParkedSize(host, "in host memory")


def _sleeping_size(status: WorkloadStatus, host: int | None) -> ParkedSize:
    """The bytes of a workload whose processes continue, by the treatment of its weights."""
    match status.parked_by.weight_strategy:
        case eviction_pb2.WEIGHT_STRATEGY_OFFLOAD:
            return ParkedSize(host, "in host memory")
        case eviction_pb2.WEIGHT_STRATEGY_DISCARD:
            return ParkedSize(0, DISCARDED)
        case _:
            return ParkedSize(None, "in device memory")


def parked_size_text(workload: Workload) -> str:
    """The bytes of a parked workload with their place, such as ``1.0 GiB on disk``."""
    size, place = parked_size(workload)
    if size is None:
        return "size unknown"
    return place if place == DISCARDED else f"{size_text(size)} {place}"
