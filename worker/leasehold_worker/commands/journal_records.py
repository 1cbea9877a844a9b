"""The journal's records of workloads and operations, and their form on disk."""

from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf.message import Message
from leasehold.v1 import errors_pb2, eviction_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadOrigin, WorkloadState

from leasehold_worker.commands.intents import Intent
from leasehold_worker.driver.members import Member
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.leases import Lease, Standing
from leasehold_worker.workloads.workload import Hooked, Parked, Workload

_MESSAGES: Final = (workload_pb2.WorkloadSpec, eviction_pb2.EvictionPolicy, errors_pb2.Error)


class WorkloadRecord(msgspec.Struct, frozen=True):
    """A workload as last reported, with the fields of :class:`~leasehold_worker.workloads.workload.Workload`.

    ``boot_id`` is the kernel's at its start: its process ids are valid only for that boot.
    """

    workload_id: str
    name: str
    spec: workload_pb2.WorkloadSpec
    root: ProcessIdentity
    boot_id: str
    start_time: datetime
    lease: Lease | None
    state: WorkloadState.ValueType
    generation: int
    members: tuple[Member, ...]
    parked: Parked | None
    end_time: datetime | None
    returncode: int | None
    error: errors_pb2.Error | None
    restored: bool
    origin: WorkloadOrigin.ValueType = workload_pb2.WORKLOAD_ORIGIN_RUN
    user: str = ""
    uid: int | None = None
    mark: str = ""
    yielded: bool = False
    absent: bool = False
    hooked: Hooked | None = None
    home: tuple[str, ...] = ()
    ready_time: datetime | None = None


def workload_record(workload: Workload, boot_id: str) -> WorkloadRecord:
    """The current record of a workload."""
    return WorkloadRecord(
        workload_id=workload.workload_id,
        name=workload.name,
        spec=workload.spec,
        root=workload.root,
        boot_id=boot_id,
        start_time=workload.start_time,
        lease=workload.lease,
        state=workload.state,
        generation=workload.generation,
        members=workload.members,
        parked=workload.parked,
        end_time=workload.end_time,
        returncode=workload.returncode,
        error=workload.error.to_proto() if workload.error else None,
        restored=workload.restored,
        origin=workload.origin,
        user=workload.user,
        uid=workload.uid,
        mark=workload.mark,
        yielded=workload.yielded,
        absent=workload.absent,
        hooked=workload.hooked,
        home=workload.home,
        ready_time=workload.ready_time,
    )


def workload_of(record: WorkloadRecord, output_path: Path) -> Workload:
    """The workload of a record."""
    error = record.error
    return Workload(
        workload_id=record.workload_id,
        name=record.name,
        spec=record.spec,
        root=record.root,
        output_path=output_path,
        start_time=record.start_time,
        lease=record.lease,
        state=record.state,
        generation=record.generation,
        members=record.members,
        parked=record.parked,
        end_time=record.end_time,
        returncode=record.returncode,
        error=OperationError(error.reason, error.message, dict(error.metadata)) if error else None,
        restored=record.restored,
        origin=record.origin,
        user=record.user,
        uid=record.uid,
        mark=record.mark,
        yielded=record.yielded,
        absent=record.absent,
        hooked=record.hooked,
        home=record.home,
        ready_time=record.ready_time,
    )


def encode(record: WorkloadRecord | Intent | Standing) -> bytes:
    """A record in its form on disk."""
    return msgspec.json.encode(record, enc_hook=_encode_message)


def decode_workload(data: bytes) -> WorkloadRecord:
    """A workload's record.

    Raises:
        msgspec.DecodeError: The data is not a workload's record.
    """
    return msgspec.json.decode(data, type=WorkloadRecord, dec_hook=_decode_message)


def decode_standing(data: bytes) -> Standing:
    """The cordon and the health verdict of a GPU.

    Raises:
        msgspec.DecodeError: The data is not a standing.
    """
    return msgspec.json.decode(data, type=Standing)


def decode_intent(data: bytes) -> Intent:
    """An intent.

    Raises:
        msgspec.DecodeError: The data is not an intent.
    """
    return msgspec.json.decode(data, type=Intent, dec_hook=_decode_message)


def _encode_message(value: object) -> str:
    if isinstance(value, Message):
        return value.SerializeToString().hex()
    raise NotImplementedError(f"{type(value)} has no form on disk")


def _decode_message(wanted: type, value: Any) -> Message:
    for message in _MESSAGES:
        if wanted is message:
            return message.FromString(bytes.fromhex(value))
    raise NotImplementedError(f"{wanted} has no form on disk")
