"""The worker's image directory: its contents, their users, and the room that is left.

Process images and application checkpoints share one directory and one budget. Checkpoints that no suspended
workload needs are deleted in time. Other workers may share the directory. Their checkpoints count, are listed
and read, and are deleted by force only. All calls but :meth:`CheckpointDisk.run`,
:meth:`CheckpointDisk.expect` and :meth:`CheckpointDisk.room` block, and belong in a thread.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.checkpoint_pb2 import Checkpoint

from leasehold_worker.checkpoints import retention
from leasehold_worker.checkpoints.ages import Ages
from leasehold_worker.checkpoints.application_file import StoredCheckpoint
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.damaged import DamagedCheckpoint
from leasehold_worker.checkpoints.disk_reservations import DiskReservation, DiskReservations
from leasehold_worker.checkpoints.image_store import ImageStore, StoredImage
from leasehold_worker.checkpoints.messages import IMAGE, of_envelope, of_image
from leasehold_worker.checkpoints.retention import StoredItem
from leasehold_worker.errors import OperationError
from leasehold_worker.files.folder_trees import directory_bytes
from leasehold_worker.leasing.host_reservations import KEPT_FREE_PERCENT
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED, PARKED, RUNNING, SUSPENDING
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

DEFAULT_KEPT: Final = 3
"""Application checkpoints that are kept per workload, by default."""

CLEAN_UP_TIMEOUT_S: Final = 10.0
CLEAN_UPS_AT_ONCE: Final = 4
"""Threads that delete unneeded files of workloads, including those that hang."""

LOOK_INTERVAL_S: Final = 60.0
"""Interval of the search for unneeded checkpoints."""


def _nothing() -> None:
    """Checks nothing."""


@final
class CheckpointDirectory:
    """The checkpoints on disk of this worker's workloads.

    Args:
        images: The process images.
        envelopes: The application checkpoints.
        workloads: The registry, with the needed checkpoints.
        limit_bytes: Budget of all checkpoints. 0: the free space of the disk.
        reserve_bytes: Reserve of the disk, if it exceeds a tenth of the disk.
        keep_images: Unneeded images stay until they expire.
        expiry: Age at which unneeded checkpoints are deleted.
        worker_id: The worker whose checkpoints are deleted; others may share the directory.
    """

    def __init__(
        self,
        images: ImageStore,
        application_store: ApplicationStore,
        workloads: Workloads,
        *,
        limit_bytes: int,
        reserve_bytes: int,
        keep_images: bool,
        expiry: timedelta,
        worker_id: str,
    ) -> None:
        self._images = images
        self._application_store = application_store
        self._workloads = workloads
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._keep_images = keep_images
        self._expiry = expiry
        self._worker_id = worker_id
        self._rooms = DiskReservations()
        self._expected: dict[str, Workload] = {}
        self._told: set[str] = set()
        self._clean_ups = trio.CapacityLimiter(CLEAN_UPS_AT_ONCE)
        self._own_ages, self._left_ages = Ages(), Ages()
        self._damaged_ages, self._saved_ages = Ages(), Ages()

    def available_bytes(self) -> int:
        """Bytes that may be added: the free space of the disk, or the rest of the budget.

        Raises:
            OperationError: The disk does not answer.
        """
        left = self._free_bytes()
        if self._limit_bytes:
            left = min(left, self._limit_bytes - self.used_bytes() - self._rooms.held_bytes)
        return max(0, left + sum(each.size_bytes for each in self._spare_images()))

    def room(self) -> DiskReservation:
        """A context with a reservation of disk, which begins with no bytes.

        A larger reservation deletes the oldest unneeded images, as few as suffice.
        """
        return self._rooms.open(self._make_room)

    def _make_room(self, more_bytes: int, is_needed: Callable[[], bool]) -> None:
        """Deletes unneeded images until so many bytes more fit, as long as they are needed.

        Raises:
            OperationError: INSUFFICIENT_DISK: the images do not suffice.
        """
        stuck: set[str] = set()
        while chosen := retention.make_room(
            [each for each in self._spare_images() if each.image_id not in stuck],
            need_bytes=more_bytes,
            used_bytes=self.used_bytes() + self._rooms.held_bytes,
            budget_bytes=self._limit_bytes,
            free_disk_bytes=self._free_bytes(),
        ):
            for image_id in chosen:
                if not is_needed():
                    return
                if not self._delete_image(image_id):
                    stuck.add(image_id)

    def _free_bytes(self) -> int:
        """Free space of the disk, less the reserve and unwritten reservations. May be negative."""
        # Read before the free space: bytes written in between then count twice instead of not at all.
        unwritten = self._rooms.unwritten_bytes
        volume = self._application_store.disk_space()
        kept_free = max(volume.total_bytes * KEPT_FREE_PERCENT // 100, self._reserve_bytes)
        return volume.available_bytes - kept_free - unwritten

    def _own_images(self) -> list[StoredImage]:
        return [
            image for image in self._images.images() if self._is_own(image.manifest.subject.host.worker_id)
        ]

    def _is_own(self, worker_id: str) -> bool:
        return worker_id == self._worker_id

    def _spare_images(self) -> list[StoredItem]:
        """This worker's images that no workload needs."""
        images = self._own_images()
        in_use = self.in_use()  # read after the images: an image counts as in use before it exists
        return [_kept_image(image) for image in images if image.manifest.image_id not in in_use]

    def used_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return self._images.used_bytes() + sum(
            each.age()[1] if isinstance(each, DamagedCheckpoint) else each.file_bytes
            for each in self._application_store.scan_all()
        )

    def checkpoints(self, workload_id: str = "") -> list[Checkpoint]:
        """All checkpoints, damaged ones included, or those of a workload; newest first."""
        images, saved = self._images.scan(), self._application_store.scan_all()
        self._tell_damaged([*images, *saved])
        in_use = self.in_use()
        found = [of_image(image, in_use) for image in images]
        found += [of_envelope(each, in_use) for each in saved]
        mine = [each for each in found if workload_id in ("", each.workload_id)]
        return sorted(
            mine, key=lambda each: (each.create_time.ToNanoseconds(), each.checkpoint_id), reverse=True
        )

    def expect(self, checkpoint_id: str, workload: Workload) -> None:
        """Protects the future checkpoint of a SUSPENDING workload until that state ends."""
        self._expected[checkpoint_id] = workload

    def expect_interrupted(self) -> None:
        """Expects all checkpoints of workloads that an earlier run of the worker left SUSPENDING."""
        halfway = {each.workload_id: each for each in self._workloads.all() if each.state == SUSPENDING}
        for found in [*self._images.scan(), *self._application_store.scan_all()]:
            if workload := halfway.get(found.path.parent.name):
                self.expect(found.path.stem, workload)

    def in_use(self) -> set[str]:
        """Ids of the checkpoints of suspended workloads, and of suspends in progress."""
        for checkpoint_id, workload in tuple(self._expected.items()):
            if workload.state != SUSPENDING:
                self._expected.pop(checkpoint_id, None)
        # In this order: a workload records its image before its state becomes suspended.
        return set(self._expected) | {
            parked.checkpoint_id
            for workload in self._workloads.all()
            if (parked := workload.parked) is not None and workload.state not in ENDED
        }

    def delete(
        self, checkpoint_ids: Sequence[str], *, force: bool, check: Callable[[], None] = _nothing
    ) -> None:
        """Deletes checkpoints, damaged or not, all or none. One that vanishes meanwhile counts as deleted.

        Args:
            checkpoint_ids: The checkpoints.
            force: Delete those that a workload needs, too.
            check: Called before the first deletion. Its exception ends the call, and nothing is deleted.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT; CHECKPOINT_IN_USE: a workload needs it, or may on the worker
                that made it; or an error of the disk.
        """
        found = {each.checkpoint_id: each for each in self.checkpoints()}
        wanted = list(dict.fromkeys(checkpoint_ids))
        for checkpoint_id in wanted:
            if checkpoint_id not in found:
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
                    f"no checkpoint {checkpoint_id[:64]!r} on this worker: give an id of "
                    "`leasehold get checkpoints`",
                    {"checkpoint_id": checkpoint_id[:64]},
                )
            if not force:
                self._require_unneeded(found[checkpoint_id])
        check()
        for checkpoint_id in wanted:
            try:
                if found[checkpoint_id].kind == IMAGE:
                    self._images.delete(checkpoint_id)
                else:
                    self._application_store.delete(checkpoint_id)
            except OperationError as error:
                if error.reason != errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT:
                    raise

    def _require_unneeded(self, checkpoint: Checkpoint) -> None:
        """Refuses checkpoints that a workload needs or may need.

        Raises:
            OperationError: CHECKPOINT_IN_USE.
        """
        checkpoint_id, owner = checkpoint.checkpoint_id, checkpoint.owner_worker_id
        if checkpoint.in_use:
            raise OperationError(
                errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE,
                f"a suspended workload needs {checkpoint_id}: restore or stop it first; with "
                "force the workload is lost",
                {"checkpoint_id": checkpoint_id},
            )
        if owner and not self._is_own(owner):
            raise OperationError(
                errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE,
                f"{checkpoint_id} belongs to worker {owner}, whose workloads may need it: "
                "delete it there, or use `--force`",
                {"checkpoint_id": checkpoint_id, "worker_id": owner},
            )

    async def clean_up_in_time(self, workload: Workload) -> None:
        """Like :meth:`clean_up`, in a thread. It can't be cancelled.

        A volume that does not answer is abandoned. No operation depends on it, and :meth:`run` deletes the
        same files later.
        """
        with trio.CancelScope(shield=True), trio.move_on_after(CLEAN_UP_TIMEOUT_S) as scope:
            await trio.to_thread.run_sync(
                self.clean_up, workload, abandon_on_cancel=True, limiter=self._clean_ups
            )
        if scope.cancelled_caught:
            logger.warning(
                "workload %s: its old checkpoints could not be deleted within %g s: check "
                "the volume of the image directory",
                workload.name,
                CLEAN_UP_TIMEOUT_S,
            )

    def clean_up(self, workload: Workload) -> None:
        """Deletes the checkpoints that a workload no longer needs: images, and old application ones."""
        kept = workload.spec.keep_checkpoints or DEFAULT_KEPT
        images = [] if self._keep_images else self._images.scan()
        in_use = self.in_use()
        self._application_store.keep_last(workload.workload_id, kept, in_use)
        for image in images:
            if image.path.parent.name == workload.workload_id and image.path.name not in in_use:
                self._delete_image(image.path.name)

    def sweep(self) -> None:
        """Deletes incomplete files of an earlier run of the worker. Failures are logged."""
        try:
            for path in self._images.sweep():
                logger.info("deleted the incomplete %s", path)
            self._application_store.sweep()
        except OSError as error:
            logger.warning("the search for incomplete checkpoints failed: %s", error)

    async def run(self) -> None:
        """Deletes unneeded checkpoints repeatedly, until cancelled. Failures are logged."""
        while True:
            try:
                await trio.to_thread.run_sync(
                    self._expire, self._busy(), self._living(), self._known(), abandon_on_cancel=True
                )
            except Exception:
                logger.exception("the search for unused files on disk failed, and is repeated")
            await trio.sleep(LOOK_INTERVAL_S)

    def _living(self) -> set[str]:
        return {each.workload_id for each in self._workloads.all() if each.state not in ENDED}

    def _busy(self) -> set[str]:
        """Workloads whose images may be in progress: they are left alone."""
        return {
            workload.workload_id
            for workload in self._workloads.all()
            if workload.state not in ENDED | PARKED | {RUNNING}
        }

    def _known(self) -> set[str]:
        """Workloads of the journal. Others may be those of a journal that was moved away."""
        return {each.workload_id for each in self._workloads.all()}

    def _expire(self, busy: set[str], living: set[str], known: set[str]) -> None:
        images, saved, now = self._images.scan(), self._application_store.scan_all(), datetime.now(UTC)
        self._tell_damaged([*images, *saved])
        in_use = self.in_use()
        own = [
            _kept_image(each)
            for each in images
            if isinstance(each, StoredImage)
            and self._is_own(each.manifest.subject.host.worker_id)
            and each.manifest.subject.workload_id not in busy
        ]
        kept_for = self._expiry if self._keep_images else timedelta(0)
        # Its journal may have been moved away, and may come back.
        left = [each for each in own if each.workload_id not in known]
        own = [each for each in own if each.workload_id in known]
        damaged = [each for each in map(_kept_damaged, images) if each and each.workload_id not in busy]
        expired = self._own_ages.expired(own, in_use, now=now, keep_for=kept_for)
        expired += self._left_ages.expired(left, in_use, now=now, keep_for=self._expiry)
        expired += self._damaged_ages.expired(damaged, in_use, now=now, keep_for=self._expiry)
        for image_id in expired:
            self._delete_image(image_id)
        old = [each for each in map(self._kept_envelope, saved) if each and each.workload_id not in living]
        for checkpoint_id in self._saved_ages.expired(old, in_use, now=now, keep_for=self._expiry):
            self._delete_saved(checkpoint_id)

    def _kept_envelope(self, saved: StoredCheckpoint | DamagedCheckpoint) -> StoredItem | None:
        """The expiry of the worker's own and of damaged checkpoints. None: it is not deleted."""
        if isinstance(saved, DamagedCheckpoint):
            return _kept_damaged(saved)
        header = saved.header
        if not header.worker_id or not self._is_own(header.worker_id):
            return None
        return StoredItem(saved.checkpoint_id, header.workload_id, header.created, saved.file_bytes)

    def _delete_image(self, image_id: str) -> bool:
        """Deletes an image. True: it is gone."""
        try:
            self._images.delete(image_id)
        except OperationError as error:
            logger.warning("image %s could not be deleted: %s", image_id, error.message)
            return False
        logger.info("deleted image %s, which no workload needs", image_id)
        return True

    def _delete_saved(self, checkpoint_id: str) -> None:
        try:
            self._application_store.delete(checkpoint_id)
        except OperationError as error:
            # UNKNOWN_CHECKPOINT: another caller has deleted it.
            if error.reason != errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT:
                logger.warning("checkpoint %s could not be deleted: %s", checkpoint_id, error.message)

    def _tell_damaged(self, found: Iterable[StoredImage | StoredCheckpoint | DamagedCheckpoint]) -> None:
        """Logs damaged checkpoints, each once."""
        for each in found:
            if isinstance(each, DamagedCheckpoint) and each.checkpoint_id not in self._told:
                self._told.add(each.checkpoint_id)
                logger.warning("%s", each.error.message)


def _kept_image(image: StoredImage) -> StoredItem:
    manifest = image.manifest
    return StoredItem(
        manifest.image_id, manifest.subject.workload_id, manifest.create_time, directory_bytes(image.path)
    )


def _kept_damaged(found: StoredImage | StoredCheckpoint | DamagedCheckpoint) -> StoredItem | None:
    """A permanently damaged checkpoint, by its path and age. None: the damage may pass."""
    if not isinstance(found, DamagedCheckpoint) or not found.is_corrupt:
        return None
    written, size = found.age()
    return StoredItem(found.checkpoint_id, found.workload_id, written, size)
