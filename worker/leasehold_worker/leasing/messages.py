"""GPUs and leases as messages of the protos."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from leasehold.v1 import gpu_pb2, lease_pb2

from leasehold_worker.gpus.inventory import GpuFacts, GpuReading
from leasehold_worker.leasing.leases import Cordon, Hold, Lease, SlotLease
from leasehold_worker.timestamps import timestamp

REASON_LIMIT: Final = 256
"""Characters of a reported health reason."""


def gpu_message(facts: GpuFacts, slot: int, units: int) -> gpu_pb2.Gpu:
    """A GPU of ``hello``."""
    return gpu_pb2.Gpu(
        uuid=facts.uuid,
        slot=slot,
        name=facts.name,
        memory_total_bytes=facts.memory_total_bytes,
        compute_capability=facts.compute_capability,
        pci_bus_id=facts.pci_bus_id,
        pci_device_id=facts.pci_device_id,
        serial=facts.serial,
        mig_enabled=facts.mig_enabled,
        persistence_mode=facts.persistence_mode,
        numa_node=facts.numa_node,
        units=units,
    )


def gpu_lease_message(slot: SlotLease, reading: GpuReading | None) -> lease_pb2.GpuLease:
    """An entry of ``worker_load``."""
    standing = slot.standing
    return lease_pb2.GpuLease(
        gpu_uuid=slot.gpu_uuid,
        slot=slot.slot,
        state=slot.state,
        lease_id=slot.lease.lease_id if slot.lease and not slot.hold else None,
        workload_id=slot.lease.workload_id if slot.lease and not slot.hold else None,
        since=timestamp(slot.since),
        health=standing.health,
        sample=None if reading is None or reading.lost else _sample(reading),
        health_reason=standing.health_reason[:REASON_LIMIT],
        cordon=cordon_message(standing.cordon),
        foreign_processes=[
            lease_pb2.ForeignProcess(
                pid=process.pid,
                user=process.user,
                command=process.command,
                device_memory_bytes=process.device_memory_bytes,
                workload_id=process.workload_id,
                workload_name=process.workload_name,
            )
            for process in slot.foreign
        ],
        asleep_bytes=slot.asleep_bytes or None,
        hold=_hold_message(slot.hold),
    )


def _hold_message(record: Hold | None) -> lease_pb2.Hold | None:
    if record is None:
        return None
    return lease_pb2.Hold(
        hold_id=record.hold_id,
        workload_ids=record.workload_ids,
        held_by=record.held_by,
        create_time=timestamp(record.create_time),
        expire_time=timestamp(record.expire_time),
    )


def cordon_message(record: Cordon | None) -> lease_pb2.Cordon | None:
    """A cordon, or None."""
    if record is None:
        return None
    return lease_pb2.Cordon(
        reason=record.reason,
        cordoned_by=record.cordoned_by,
        cordon_time=timestamp(record.cordon_time),
    )


def _sample(reading: GpuReading) -> gpu_pb2.GpuSample:
    return gpu_pb2.GpuSample(
        sample_time=timestamp(datetime.now(UTC)),
        utilization_percent=reading.utilization_percent,
        encoder_utilization_percent=reading.encoder_utilization_percent,
        decoder_utilization_percent=reading.decoder_utilization_percent,
        memory_used_bytes=reading.memory_used_bytes,
        memory_total_bytes=reading.memory_total_bytes,
        temperature_celsius=reading.temperature_celsius,
        ecc_uncorrected_errors=reading.ecc_uncorrected_errors,
    )


def lease_message(record: Lease) -> lease_pb2.Lease:
    """A lease."""
    return lease_pb2.Lease(
        lease_id=record.lease_id,
        workload_id=record.workload_id,
        gpu_uuids=record.gpu_uuids,
        grant_time=timestamp(record.grant_time),
        fencing_token=record.fencing_token,
    )


def gpu_lease_messages(
    slots: Iterable[SlotLease], readings: Mapping[str, GpuReading]
) -> list[lease_pb2.GpuLease]:
    """The pool, in slot order."""
    return [gpu_lease_message(slot, readings.get(slot.gpu_uuid)) for slot in slots]
