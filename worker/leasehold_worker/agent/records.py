"""The journal's records of workloads and GPUs, and the events of workloads for the coordinator."""

from functools import partial
from typing import final

from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent

from leasehold_worker.commands import journal_file
from leasehold_worker.commands.journal import Journal
from leasehold_worker.commands.journal_records import workload_record
from leasehold_worker.host.processes import boot_id
from leasehold_worker.leasing.leases import Hold, Standing
from leasehold_worker.session.frame_sink import FrameSink
from leasehold_worker.workloads.messages import workload_message
from leasehold_worker.workloads.states import ENDED, FAILED, RELEASED, RUNNING
from leasehold_worker.workloads.workload import Workload


@final
class Records:
    """Stores each change of a workload or a GPU, and then reports that of a workload to the coordinator."""

    def __init__(self, journal: Journal, frames: FrameSink, worker_id: str) -> None:
        self._journal = journal
        self._frames = frames
        self._worker_id = worker_id
        self._boot_id = boot_id()

    def keep_workload(self, workload: Workload) -> None:
        """Stores the current state of a workload, and reports the state once it is on disk."""
        message = workload_message(workload, self._worker_id)
        event = WorkloadEvent(kind=_event_kind(workload), workload=message)
        statements = journal_file.keep_workload(workload_record(workload, self._boot_id))
        tell = partial(self._frames.send, ConnectRequest(workload_event=event))
        self._journal.put(("workloads", workload.workload_id), statements, tell)

    def forget_workload(self, workload_id: str) -> None:
        """Deletes the record of a workload."""
        self._journal.put(("workloads", workload_id), journal_file.forget_workload(workload_id))

    def keep_standing(self, gpu_uuid: str, standing: Standing) -> None:
        """Stores the standing of a GPU, and under "" that of the worker."""
        self._journal.put(("standings", gpu_uuid), journal_file.keep_standing(gpu_uuid, standing))

    def keep_hold(self, hold_id: str, hold: Hold | None) -> None:
        """Stores a hold, or deletes the record of an ended one."""
        self._journal.put(("holds", hold_id), journal_file.keep_hold(hold_id, hold))


def _event_kind(workload: Workload) -> session_pb2.WorkloadEventKind.ValueType:
    if workload.state == FAILED:
        return session_pb2.WORKLOAD_EVENT_KIND_FAILED
    if workload.state == RELEASED:
        return session_pb2.WORKLOAD_EVENT_KIND_RELEASED
    if workload.state in ENDED:
        return session_pb2.WORKLOAD_EVENT_KIND_EXITED
    if workload.state == RUNNING and workload.generation == 1:
        return session_pb2.WORKLOAD_EVENT_KIND_STARTED
    return session_pb2.WORKLOAD_EVENT_KIND_STATE_CHANGED
