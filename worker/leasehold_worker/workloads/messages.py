"""Workloads as messages of the protos."""

from collections.abc import Iterable

from leasehold.v1 import workload_pb2
from leasehold.worker.v1 import session_pb2

from leasehold_worker.driver.messages import member_message
from leasehold_worker.leasing.messages import lease_message
from leasehold_worker.secret_values import blank_secrets
from leasehold_worker.timestamps import timestamp
from leasehold_worker.workloads import workload as records
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.workload import Parked, Workload


def workload_message(
    record: Workload, worker_id: str, spec: workload_pb2.WorkloadSpec | None = None
) -> workload_pb2.Workload:
    """A workload with its status.

    Args:
        record: The workload.
        worker_id: Id of the worker.
        spec: A part of its spec. None: the whole spec.
    """
    message = workload_pb2.Workload(
        workload_id=record.workload_id,
        name=record.name,
        worker_id=worker_id,
        spec=record.spec if spec is None else spec,
        status=_status(record),
        origin=record.origin,
        user=record.user,
    )
    blank_secrets(message.spec)
    return message


def workload_messages(
    workloads: Workloads, worker_id: str, workload_ids: Iterable[str]
) -> list[workload_pb2.Workload]:
    """The workloads with these ids. Ids that the worker does not have are left out."""
    known = (workload_id for workload_id in workload_ids if workload_id in workloads)
    return [workload_message(workloads.get(workload_id), worker_id) for workload_id in known]


def _status(record: Workload) -> workload_pb2.WorkloadStatus:
    parked = record.parked
    return workload_pb2.WorkloadStatus(
        state=record.state,
        generation=record.generation,
        lease=lease_message(record.lease) if record.lease else None,
        members=[member_message(member) for member in record.members],
        root_pid=None if record.absent else record.root.pid,
        parked_gpu_uuids=parked.gpu_uuids if parked else (),
        parked_bytes=told_parked_bytes(record),
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
        disk_bytes=told_disk_bytes(parked) if parked else None,
    )


def told_parked_bytes(record: Workload) -> int | None:
    """Device memory of the workload on the host. None: it is not suspended, or NVML reported none."""
    parked = record.parked
    if parked is None or parked.checkpoint_id or not parked.device_memory_bytes:
        return None
    return records.parked_bytes(record)


def told_disk_bytes(parked: Parked) -> int | None:
    """Bytes of the workload on disk. 0: its checkpoint was deleted. None: it has none."""
    return parked.disk_bytes if parked.checkpoint_id else None


def _exit(returncode: int) -> workload_pb2.Exit:
    """An exit status in Python's form, where a signal is negative."""
    if returncode < 0:
        return workload_pb2.Exit(signal_number=-returncode)
    return workload_pb2.Exit(code=returncode)


def parked_workload_messages(records: Iterable[Workload]) -> list[session_pb2.ParkedWorkload]:
    """The suspended workloads, as messages of a load."""
    return [
        session_pb2.ParkedWorkload(
            workload_id=record.workload_id,
            parked_bytes=told_parked_bytes(record),
            disk_bytes=told_disk_bytes(record.parked),
        )
        for record in records
        if record.parked is not None
    ]
