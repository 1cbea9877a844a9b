"""Members and pairs of GPUs as messages of the protos."""

from collections.abc import Iterable

from leasehold.v1 import gpu_pb2, workload_pb2

from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import Member


def member_message(member: Member) -> workload_pb2.Member:
    """A member of a workload."""
    return workload_pb2.Member(
        pid=member.identity.pid,
        start_time_ticks=member.identity.start_time_ticks,
        state=member.state,
        device_memory_bytes=member.device_memory_bytes,
    )


def pair_messages(pairs: Iterable[GpuPair]) -> list[gpu_pb2.GpuPair]:
    """Pairs of GPUs, in their order."""
    return [gpu_pb2.GpuPair(old_uuid=pair.old_uuid, new_uuid=pair.new_uuid) for pair in pairs]
