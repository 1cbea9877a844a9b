"""Messages of the API as JSON: names as in the protos, enums without prefix, times in ms, durations in s."""

from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import gpu_pb2, lease_pb2
from leasehold.v1.worker_pb2 import FleetGpu

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | int | bool | None"

Document: TypeAlias = dict[str, Json]


def document(message: Message) -> Document:
    """A message as JSON. An absent field is absent, and so is a field with its default value."""
    found: Document = {}
    for field, value in message.ListFields():
        found[field.name] = _field(field, value)
    return found


def milliseconds(moment: Timestamp) -> float:
    """A time in milliseconds of the Unix epoch, as JavaScript counts."""
    return moment.seconds * 1e3 + moment.nanos / 1e6


def gpu_row(found: FleetGpu) -> Document:
    """A GPU of the live view. A fleet has thousands, so each has only what the view shows."""
    gpu, lease = found.gpu, found.lease
    row: Document = {
        "uuid": gpu.uuid,
        "worker_id": found.worker_id,
        "slot": gpu.slot,
        "name": gpu.name,
        "state": enum_name(lease_pb2.SlotState.DESCRIPTOR, lease.state),
    }
    if gpu.HasField("memory_total_bytes"):
        row["memory_total_bytes"] = gpu.memory_total_bytes
    if lease.workload_id:
        row["workload_id"] = lease.workload_id
    if found.workload_name:
        row["workload_name"] = found.workload_name
    if lease.HasField("since"):
        row["since"] = milliseconds(lease.since)
    if lease.health not in (gpu_pb2.GPU_HEALTH_UNSPECIFIED, gpu_pb2.GPU_HEALTH_OK):
        row["health"] = enum_name(gpu_pb2.GpuHealth.DESCRIPTOR, lease.health)
        row["health_reason"] = lease.health_reason
    if lease.HasField("cordon"):
        row["cordon"] = document(lease.cordon)
    if lease.foreign_processes:
        row["foreign_processes"] = [document(one) for one in lease.foreign_processes]
    if lease.asleep_bytes:
        row["asleep_bytes"] = lease.asleep_bytes
    if lease.HasField("hold"):
        row["hold"] = document(lease.hold)
    if lease.HasField("sample"):
        row["sample"] = sample_row(lease)
    return row


def sample_row(lease: lease_pb2.GpuLease) -> Document:
    """The measurements of a GPU, which no watch publishes by themselves. An unknown one is absent."""
    sample = lease.sample
    row: Document = {}
    if sample.HasField("utilization_percent"):
        row["utilization_percent"] = sample.utilization_percent
    if sample.HasField("memory_used_bytes"):
        row["memory_used_bytes"] = sample.memory_used_bytes
    if sample.HasField("temperature_celsius"):
        row["temperature_celsius"] = sample.temperature_celsius
    foreign: Document = {
        str(one.pid): one.device_memory_bytes
        for one in lease.foreign_processes
        if one.HasField("device_memory_bytes")
    }
    if foreign:
        row["foreign_bytes"] = foreign
    return row


def _field(field: FieldDescriptor, value: Any) -> Json:
    convert = _converter(field)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        of_value = _converter(kind.fields_by_name["value"])
        return {str(key): of_value(part) for key, part in value.items()}
    return [convert(part) for part in value] if field.is_repeated else convert(value)


@cache
def _converter(field: FieldDescriptor) -> Callable[[Any], Json]:
    if field.message_type is Timestamp.DESCRIPTOR:
        return milliseconds
    if field.message_type is Duration.DESCRIPTOR:
        return lambda value: value.seconds + value.nanos / 1e9
    if field.message_type is not None:
        return document
    if (enum := field.enum_type) is not None:
        return lambda value: enum_name(enum, value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda value: bytes(value).hex()
    return lambda value: value


_NAMES: Final[dict[str, dict[int, str]]] = {}


def enum_name(kind: EnumDescriptor, number: int) -> str:
    """The name of an enum's value without the prefix that all values share."""
    names = _NAMES.get(kind.full_name)
    if names is None:
        prefix = kind.values[0].name.removesuffix("UNSPECIFIED")
        names = _NAMES[kind.full_name] = {
            value.number: value.name.removeprefix(prefix) for value in kind.values
        }
    return names.get(number, f"UNKNOWN_{number}")
