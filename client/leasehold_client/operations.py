"""What can be asked of workloads, as messages."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, gpu_pb2
from leasehold.v1.workload_pb2 import EvictionPolicy

Moves: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]
"""Workloads by id or name, each with its pairs of (old UUID, new UUID)."""


def suspension(
    lock_timeout_s: float | None, policy: EvictionPolicy | None = None, *, force: bool = False
) -> command_pb2.SuspendOperation:
    """A suspension. None: the worker's lock timeout, and the policy of the workload's spec."""
    return command_pb2.SuspendOperation(policy=policy, lock_timeout=duration(lock_timeout_s), force=force)


def waking(gpu_uuids: Sequence[str], checkpoint_id: str) -> command_pb2.RestoreOperation:
    """A restore. Empty: the GPUs and the checkpoint that the worker chooses."""
    return command_pb2.RestoreOperation(gpu_uuids=gpu_uuids, checkpoint_id=checkpoint_id)


def remapping(moves: Moves, lock_timeout_s: float | None) -> command_pb2.RemapOperation:
    """A remap of all these workloads. None: the worker's lock timeout."""
    messages = [
        command_pb2.Move(
            workload_id=workload,
            pairs=[gpu_pb2.GpuPair(old_uuid=old, new_uuid=new) for old, new in pairs],
        )
        for workload, pairs in moves.items()
    ]
    return command_pb2.RemapOperation(moves=messages, lock_timeout=duration(lock_timeout_s))


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """A span of time; None stays absent."""
    if seconds is None:
        return None
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message
