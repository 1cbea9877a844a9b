"""Checkpoints as messages of the protos: images, application checkpoints, and damaged ones."""

from collections.abc import Container
from typing import Final

from leasehold.v1 import checkpoint_pb2
from leasehold.v1.checkpoint_pb2 import Checkpoint

from leasehold_worker.checkpoints.application_file import StoredCheckpoint
from leasehold_worker.checkpoints.damaged import DamagedCheckpoint
from leasehold_worker.checkpoints.image_store import StoredImage
from leasehold_worker.timestamps import timestamp

PROBLEM_LIMIT: Final = 1024
"""Characters of a reported error."""

IMAGE, APPLICATION = (
    checkpoint_pb2.CHECKPOINT_KIND_IMAGE,
    checkpoint_pb2.CHECKPOINT_KIND_APPLICATION,
)


def of_image(image: StoredImage | DamagedCheckpoint, in_use: Container[str]) -> Checkpoint:
    """The message of an image."""
    if isinstance(image, DamagedCheckpoint):
        return _of_damaged(image, IMAGE, in_use)
    manifest = image.manifest
    return Checkpoint(
        checkpoint_id=manifest.image_id,
        kind=IMAGE,
        workload_id=manifest.subject.workload_id,
        workload_name=manifest.subject.workload_name,
        create_time=timestamp(manifest.create_time),
        size_bytes=manifest.size_bytes,
        in_use=manifest.image_id in in_use,
        owner_worker_id=manifest.subject.host.worker_id,
        owner=manifest.subject.owner,
    )


def of_envelope(saved: StoredCheckpoint | DamagedCheckpoint, in_use: Container[str]) -> Checkpoint:
    """The message of an application checkpoint."""
    if isinstance(saved, DamagedCheckpoint):
        return _of_damaged(saved, APPLICATION, in_use)
    header = saved.header
    return Checkpoint(
        checkpoint_id=header.checkpoint_id,
        kind=APPLICATION,
        workload_id=header.workload_id,
        workload_name=header.workload_name,
        create_time=timestamp(header.created),
        size_bytes=saved.file_bytes,
        kernel=header.kernel,
        in_use=header.checkpoint_id in in_use,
        custom=header.custom,
        owner_worker_id=header.worker_id,
        owner=header.owner,
    )


def _of_damaged(
    damaged: DamagedCheckpoint, kind: checkpoint_pb2.CheckpointKind.ValueType, in_use: Container[str]
) -> Checkpoint:
    """The message of a damaged checkpoint: only its path and age are certain."""
    written, size = damaged.age()
    return Checkpoint(
        checkpoint_id=damaged.checkpoint_id,
        kind=kind,
        workload_id=damaged.workload_id,
        create_time=timestamp(written),
        size_bytes=size,
        in_use=damaged.checkpoint_id in in_use,
        problem=damaged.error.message[:PROBLEM_LIMIT],
    )
