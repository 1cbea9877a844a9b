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
from leasehold_worker.images.envelope_file import StoredCheckpoint
from leasehold_worker.images.envelope_store import DamagedCheckpoint, EnvelopeStore
from leasehold_worker.images.store import ImageStore, StoredImage
from leasehold_worker.workloads import ENDED, PARKED, RUNNING, Workloads

logger = logging.getLogger(__name__)

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
        return max(0, left)

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

    def clean_up(self, workload_id: str, kept: int, image_id: str) -> None:
        """Deletes what a workload does not need any more.

        Args:
            workload_id: The workload.
            kept: How many of what its application saved are kept.
            image_id: An image that it was, before it became something else. Empty: none.
        """
        self._envelopes.keep_last(workload_id, kept, self.in_use())
        if image_id and not self._keep_images:
            self._delete_image(image_id)

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
        in_use = self.in_use()
        oldest = datetime.now(UTC) - self._expiry
        for image in self._images.images():
            manifest = image.manifest
            ours = manifest.subject.host.worker_id == self._worker_id
            needed = manifest.image_id in in_use or manifest.subject.workload_id in busy
            if ours and not needed and (not self._keep_images or manifest.create_time < oldest):
                self._delete_image(manifest.image_id)
        for saved in self._saved():
            envelope = saved.envelope
            needed = envelope.checkpoint_id in in_use or envelope.workload_id in living
            if not needed and envelope.created < oldest:
                self._envelopes.delete(envelope.checkpoint_id)

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
