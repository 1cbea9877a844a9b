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
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.leases import Hold, Lease, Standing
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
    owner: str = ""
    account: Account | None = None
    mark: str = ""
    yielded: bool = False
    absent: bool = False
    hooked: Hooked | None = None
    home: tuple[str, ...] = ()
    ready_time: datetime | None = None
    lost_gpu_uuids: tuple[str, ...] = ()


_SHARED: Final = tuple(set(WorkloadRecord.__struct_fields__) - {"boot_id", "error"})
"""Fields that a workload and its record have alike."""


def workload_record(workload: Workload, boot_id: str) -> WorkloadRecord:
    """The current record of a workload."""
    error = workload.error.to_proto() if workload.error else None
    return WorkloadRecord(boot_id=boot_id, error=error, **_shared(workload))


def workload_of(record: WorkloadRecord, output_path: Path) -> Workload:
    """The workload of a record."""
    told = record.error
    error = OperationError(told.reason, told.message, dict(told.metadata)) if told else None
    return Workload(output_path=output_path, error=error, **_shared(record))


def _shared(holder: Workload | WorkloadRecord) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in _SHARED}


def encode(record: WorkloadRecord | Intent | Standing | Hold) -> bytes:
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


def decode_hold(data: bytes) -> Hold:
    """A hold.

    Raises:
        msgspec.DecodeError: The data is not a hold.
    """
    return msgspec.json.decode(data, type=Hold)


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
