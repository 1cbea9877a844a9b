"""What becomes of a workload that its worker reports: what is taken from the report, and what stays. Pure."""

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import Workload


def registered(reported: Workload, worker_id: str, now: Timestamp) -> Workload:
    """A workload that was not created here: somebody on its worker's host began it."""
    workload = Workload()
    workload.CopyFrom(reported)
    workload.worker_id = worker_id
    workload.name = reported.name or reported.workload_id
    if not reported.HasField("create_time"):
        began = reported.status.HasField("start_time")
        workload.create_time.CopyFrom(reported.status.start_time if began else now)
    return workload


def reported_again(known: Workload, reported: Workload) -> Workload:
    """A known workload with its new status.

    What was known of it stays, since a long hello leaves specs out. Only what was missing is added.
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
