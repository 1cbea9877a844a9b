"""Merges a worker's report of a workload with the coordinator's record. Pure."""

from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.core.workload_states import is_ended

_HOST: Final = "host"
"""The kind of the owners of workloads that began on a host."""


def registered(reported: Workload, worker: Hello, now: Timestamp) -> Workload:
    """The record of a workload that began on its worker's host, without a request to the coordinator."""
    workload = Workload()
    workload.CopyFrom(reported)
    workload.worker_id = worker.worker_id
    workload.owner = "/".join(filter(None, (_HOST, worker.name, reported.user)))
    for field in ("out_of_contact", "report_time", "labels", "annotations", "etag"):
        workload.ClearField(field)
    workload.name = reported.name or reported.workload_id
    if not reported.HasField("create_time"):
        began = reported.status.HasField("start_time")
        workload.create_time.CopyFrom(reported.status.start_time if began else now)
    return workload


def is_of_host(workload: Workload) -> bool:
    """Whether a workload began on its worker's host, so that the worker chose its id and name."""
    return workload.owner.startswith(f"{_HOST}/")


def is_presumed(workload: Workload) -> bool:
    """Whether the end of a workload is only a conclusion, so that the workload may still run.

    The coordinator drew the conclusion, or a worker after a restart of its host. A connected copy of the
    worker's state directory makes both conclusions wrong. The real worker then reports the workload again.
    """
    error = workload.status.error
    return is_ended(workload.status.state) and (
        is_concluded(error) or error.reason == errors_pb2.ERROR_REASON_HOST_REBOOTED
    )


def is_revived(ended: Workload, reported: Workload) -> bool:
    """Whether a report shows that an end was wrongly presumed."""
    return is_presumed(ended) and not is_presumed(reported)


def is_concluded(error: errors_pb2.Error) -> bool:
    """Whether the coordinator concluded an end that no worker has reported."""
    return error.metadata.get("concluded_by") == "coordinator"


def reported_again(known: Workload, reported: Workload) -> Workload:
    """A known workload with its new status.

    Known fields are kept, since a long hello leaves specs out. Missing fields are added.
    """
    workload = Workload()
    workload.CopyFrom(known)
    workload.status.CopyFrom(reported.status)
    if not known.HasField("spec") and reported.HasField("spec"):
        workload.spec.CopyFrom(reported.spec)
    if known.origin == workload_pb2.WORKLOAD_ORIGIN_UNSPECIFIED:
        workload.origin = reported.origin
    workload.user = known.user or reported.user
    return workload


_OF_PROCESSES: Final = (
    *("lease", "members", "root_pid", "kernel", "ready_time", "yielded"),
    *("parked_gpu_uuids", "parked_bytes", "park_time", "parked_by", "checkpoint_id", "disk_bytes"),
)
"""The fields of a status that end with the workload."""


def failed(workload: Workload, error: errors_pb2.Error, now: Timestamp) -> Workload:
    """A copy of a workload that fails now."""
    over = Workload()
    over.CopyFrom(workload)
    over.status.state = workload_pb2.WORKLOAD_STATE_FAILED
    over.status.generation += 1
    over.status.error.CopyFrom(error)
    over.status.end_time.CopyFrom(now)
    for field in _OF_PROCESSES:
        over.status.ClearField(field)
    return over
