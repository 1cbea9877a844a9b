"""The worker's image directory: what is on it, what of it is needed, and how much more may be put there.

Images of processes and what applications saved share one directory and one budget. What no parked workload
needs is deleted in its time. All but :meth:`CheckpointDisk.run` blocks, and is called in a thread.
"""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, final

import trio
from leasehold.v1 import checkpoint_pb2, errors_pb2
from leasehold.v1.checkpoint_pb2 import Checkpoint

from leasehold_worker import wire
from leasehold_worker.errors import OperationError
from leasehold_worker.images import budget
from leasehold_worker.images.budget import KeptImage
from leasehold_worker.images.envelope_file import StoredCheckpoint
from leasehold_worker.images.envelope_store import DamagedCheckpoint, EnvelopeStore
from leasehold_worker.images.store import ImageStore, StoredImage
from leasehold_worker.workload import (
    ENDED,
    PARKED,
    RUNNING,
    Workload,
)
from leasehold_worker.workloads import Workloads

logger = logging.getLogger(__name__)

DEFAULT_KEPT: Final = 3
"""Checkpoints of an application that are kept, where its workload says nothing."""

LOOK_INTERVAL_S: Final = 60.0
"""How often what nobody needs is looked for."""


@final
class CheckpointDisk:
    """What is kept on disk for this worker's workloads.

    Args:
        images: Images of processes.
        envelopes: What applications saved.
        workloads: The registry, which says what is needed.
        limit_bytes: What all of it may take. 0: what the disk has.
        reserve_bytes: What is left free on that disk.
        keep_images: Images stay that nobody needs any more, until they expire.
        expiry: How long what nobody needs is kept.
        worker_id: Whose images are deleted; others may share the directory.
    """

    def __init__(
        self,
        images: ImageStore,
        envelopes: EnvelopeStore,
        workloads: Workloads,
        *,
        limit_bytes: int,
        reserve_bytes: int,
        keep_images: bool,
        expiry: timedelta,
        worker_id: str,
    ) -> None:
        self._images = images
        self._envelopes = envelopes
        self._workloads = workloads
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._keep_images = keep_images
        self._expiry = expiry
        self._worker_id = worker_id

    def available_bytes(self) -> int:
        """Bytes that may be added: what the disk has, or what is left of the budget."""
        left = self._envelopes.available_bytes() - self._reserve_bytes
        if self._limit_bytes:
            left = min(left, self._limit_bytes - self.used_bytes())
        in_use = self.in_use()
        return max(
            0, left + sum(each.size_bytes for each in self._own_images() if each.image_id not in in_use)
        )

    def make_room(self, need_bytes: int) -> None:
        """Deletes the oldest images that nobody needs, as few as serve.

        Raises:
            OperationError: INSUFFICIENT_DISK: there is not as much.
        """
        chosen = budget.make_room(
            self._own_images(),
            self.in_use(),
            need_bytes=need_bytes,
            budget_bytes=self._limit_bytes,
            free_disk_bytes=max(0, self._envelopes.available_bytes() - self._reserve_bytes),
        )
        for image_id in chosen:
            self._delete_image(image_id)

    def _own_images(self) -> list[KeptImage]:
        """Images of this worker: others may share the directory."""
        return [
            KeptImage(
                image.manifest.image_id,
                image.manifest.subject.workload_id,
                image.manifest.create_time,
                image.manifest.size_bytes,
            )
            for image in self._images.images()
            if image.manifest.subject.host.worker_id == self._worker_id
        ]

    def used_bytes(self) -> int:
        """Bytes that all of it takes."""
        return self._images.used_bytes() + sum(each.file_bytes for each in self._saved())

    def checkpoints(self, workload_id: str = "") -> list[Checkpoint]:
        """All checkpoints, or those of a workload, newest first."""
        in_use = self.in_use()
        found = [_of_image(image, in_use) for image in self._images.images()]
        found += [_of_envelope(each, in_use) for each in self._saved()]
        mine = [each for each in found if workload_id in ("", each.workload_id)]
        return sorted(
            mine, key=lambda each: (each.create_time.ToNanoseconds(), each.checkpoint_id), reverse=True
        )

    def in_use(self) -> set[str]:
        """Ids of what parked workloads are woken from."""
        return {
            workload.parked.checkpoint_id
            for workload in self._workloads.all()
            if workload.parked is not None and workload.state not in ENDED
        }

    def delete(self, checkpoint_ids: Sequence[str], *, force: bool) -> None:
        """Deletes checkpoints, all of them or none.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, or CHECKPOINT_IN_USE.
        """
        known = {each.checkpoint_id for each in self.checkpoints()}
        known |= {each.checkpoint_id for each in self._envelopes.scan_all()}
        for checkpoint_id in checkpoint_ids:
            if checkpoint_id not in known:
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
                    f"this worker has no checkpoint {checkpoint_id[:64]!r}: "
                    "`leasehold get checkpoints` lists them",
                    {"checkpoint_id": checkpoint_id[:64]},
                )
            if checkpoint_id in self.in_use() and not force:
                raise OperationError(
                    errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE,
                    f"a parked workload is woken from {checkpoint_id}: wake or stop that first, or "
                    "force it, and the workload is lost",
                    {"checkpoint_id": checkpoint_id},
                )
        images = {image.manifest.image_id for image in self._images.images()}
        for checkpoint_id in checkpoint_ids:
            if checkpoint_id in images:
                self._images.delete(checkpoint_id)
            else:
                self._envelopes.delete(checkpoint_id)

    def clean_up(self, workload: Workload) -> None:
        """Deletes what a workload does not need any more: the images that it was, and old checkpoints."""
        kept = workload.spec.keep_checkpoints or DEFAULT_KEPT
        in_use = self.in_use()
        self._envelopes.keep_last(workload.workload_id, kept, in_use)
        for image in self._images.images():
            mine = image.manifest.subject.workload_id == workload.workload_id
            if mine and image.manifest.image_id not in in_use and not self._keep_images:
                self._delete_image(image.manifest.image_id)

    def sweep(self) -> None:
        """Deletes what an earlier start of the worker has left half written."""
        for path in self._images.sweep():
            logger.info("%s is deleted: it was never finished", path)
        self._envelopes.sweep()

    async def run(self) -> None:
        """Deletes what nobody needs, again and again, until cancelled."""
        while True:
            await trio.to_thread.run_sync(self._expire, self._busy(), self._living())
            await trio.sleep(LOOK_INTERVAL_S)

    def _living(self) -> set[str]:
        return {each.workload_id for each in self._workloads.all() if each.state not in ENDED}

    def _busy(self) -> set[str]:
        """Workloads of which images may be on their way: they are left alone."""
        return {
            workload.workload_id
            for workload in self._workloads.all()
            if workload.state not in ENDED | PARKED | {RUNNING}
        }

    def _expire(self, busy: set[str], living: set[str]) -> None:
        in_use, now = self.in_use(), datetime.now(UTC)
        images = [each for each in self._own_images() if each.workload_id not in busy]
        kept_for = self._expiry if self._keep_images else timedelta(0)
        for image_id in budget.expired(images, in_use, now=now, keep_for=kept_for, keep_count=None):
            self._delete_image(image_id)
        saved = [
            KeptImage(each.checkpoint_id, each.envelope.workload_id, each.envelope.created, each.file_bytes)
            for each in self._saved()
            if each.envelope.workload_id not in living
        ]
        for checkpoint_id in budget.expired(saved, in_use, now=now, keep_for=self._expiry, keep_count=None):
            self._envelopes.delete(checkpoint_id)

    def _delete_image(self, image_id: str) -> None:
        try:
            self._images.delete(image_id)
            logger.info("image %s is deleted: nobody needs it", image_id)
        except OperationError as error:
            logger.warning("image %s stays: %s", image_id, error.message)

    def _saved(self) -> list[StoredCheckpoint]:
        found = self._envelopes.scan_all()
        for damaged in found:
            if isinstance(damaged, DamagedCheckpoint):
                logger.warning("%s", damaged.error.message)
        return [each for each in found if isinstance(each, StoredCheckpoint)]


def _of_image(image: StoredImage, in_use: set[str]) -> Checkpoint:
    manifest = image.manifest
    return Checkpoint(
        checkpoint_id=manifest.image_id,
        kind=checkpoint_pb2.CHECKPOINT_KIND_IMAGE,
        workload_id=manifest.subject.workload_id,
        workload_name=manifest.subject.workload_name,
        create_time=wire.timestamp(manifest.create_time),
        size_bytes=manifest.size_bytes,
        in_use=manifest.image_id in in_use,
    )


def _of_envelope(saved: StoredCheckpoint, in_use: set[str]) -> Checkpoint:
    envelope = saved.envelope
    return Checkpoint(
        checkpoint_id=envelope.checkpoint_id,
        kind=checkpoint_pb2.CHECKPOINT_KIND_APPLICATION,
        workload_id=envelope.workload_id,
        workload_name=envelope.workload_name,
        create_time=wire.timestamp(envelope.created),
        size_bytes=saved.file_bytes,
        kernel=envelope.kernel,
        in_use=envelope.checkpoint_id in in_use,
        custom=envelope.custom,
    )
