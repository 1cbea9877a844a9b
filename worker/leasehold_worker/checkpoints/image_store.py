"""The directory of images: each is complete, on disk and with a manifest, or absent.

An image is a folder ``<root>/<workload id>/<image id>``, and ``<image id>.partial`` until it is final. The
writer locks an unfinished one, since several workers may share the root. Application checkpoints lie beside
the images, as files, and are ignored. All calls block; :mod:`.publication` runs the long ones in a thread.
"""

import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

import msgspec
from leasehold.v1 import errors_pb2

from leasehold_worker.checkpoints.damaged import DamagedCheckpoint
from leasehold_worker.checkpoints.folders import (
    FOLDER_MODE,
    WORK_SUFFIX,
    disk_errors,
    make_inside,
    remove_if_empty,
)
from leasehold_worker.checkpoints.image_digests import corrupt, digest_files, sync, verify_files
from leasehold_worker.checkpoints.image_manifest import (
    MANIFEST_FILE,
    MANIFEST_LIMIT_BYTES,
    ImageSubject,
    Manifest,
    UnknownFormatError,
    decode_manifest,
    encode_manifest,
    has_mac,
)
from leasehold_worker.errors import OperationError
from leasehold_worker.files.folder_trees import directory_bytes, discard_tree, remove_tree
from leasehold_worker.files.regular_files import open_regular

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX: Final = ".partial"
_WORKLOAD_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)
_IMAGE_ID: Final = re.compile(r"i-\d{8}T\d{12}Z-[0-9a-f]{8}", re.ASCII)


def _nobody(_: int) -> None:
    """Ignores progress."""


def _never() -> None:
    """Never gives up."""


@dataclass(slots=True)
class PartialImage:
    """An image in progress.

    Attributes:
        image_id: Its future id.
        path: Folder of its files.
    """

    image_id: str
    path: Path
    _lock: int

    def close(self) -> None:
        """Releases the lock: an unfinished image may now be swept. Repeated calls do nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def discard(self) -> None:
        """Releases the lock, and deletes the files. It blocks."""
        self.close()
        discard_tree(self.path)
        remove_if_empty(self.path.parent)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A final image.

    Attributes:
        path: Its folder.
        manifest: Its manifest.
    """

    path: Path
    manifest: Manifest


@final
class ImageStore:
    """The images below a folder.

    Args:
        root: The folder. It is created with the first image.
        key: The worker's key for MACs of its images. Empty: images have none, and none is required.
    """

    def __init__(self, root: Path, key: bytes = b"") -> None:
        self.root = root
        self._key = key
        self._passed_over: set[Path] = set()

    def begin(self, workload_id: str) -> PartialImage:
        """Creates a folder for a new image.

        Raises:
            OperationError: The folder can't be created, or the workload's id is invalid.
        """
        folder = self._folder(workload_id)
        image_id = f"i-{datetime.now(UTC):%Y%m%dT%H%M%S%f}Z-{secrets.token_hex(4)}"
        path = folder / f"{image_id}{PARTIAL_SUFFIX}"
        with disk_errors(folder):
            make_inside(folder, lambda: path.mkdir(mode=FOLDER_MODE))
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return PartialImage(image_id, path, lock)

    def publish(
        self,
        partial: PartialImage,
        subject: ImageSubject,
        progress: Callable[[int], None] = _nobody,
        check: Callable[[], None] = _never,
        commit: Callable[[], None] = _never,
    ) -> StoredImage:
        """Publishes an image: all on disk, with its manifest.

        Args:
            partial: The image, complete.
            subject: Its subject.
            progress: Receives the number of digested bytes on disk.
            check: Called repeatedly before the rename. Its exception ends the call, and the image is not
                final.
            commit: Called once, directly before the rename. Its exception has the same effect.

        Raises:
            OperationError: The disk failed, and the image is not final.
        """
        with disk_errors(partial.path.parent):
            files = digest_files(partial.path, progress, check)
            manifest = Manifest(
                image_id=partial.image_id, create_time=datetime.now(UTC), files=files, subject=subject
            )
            (partial.path / MANIFEST_FILE).write_bytes(encode_manifest(manifest, self._key))
            sync(partial.path / MANIFEST_FILE)
            sync(partial.path)
            commit()
            final_path = partial.path.with_name(partial.image_id)
            partial.path.rename(final_path)
            try:
                sync(final_path.parent)
                sync(self.root)
            except OSError:
                # Otherwise a power failure could still destroy the image after the kill.
                final_path.rename(partial.path)
                raise
        partial.close()
        return StoredImage(final_path, manifest)

    def verify(
        self,
        image: StoredImage,
        progress: Callable[[int], None] = _nobody,
        check: Callable[[], None] = _never,
    ) -> None:
        """Verifies an image, byte for byte, and that this worker wrote it.

        Args:
            image: The image.
            progress: Receives the number of verified bytes.
            check: Called repeatedly. Its exception ends the call.

        Raises:
            OperationError: CHECKPOINT_CORRUPT; or an error of the disk.
        """
        with disk_errors(image.path.parent):
            self._require_own(image)
            verify_files(image.path, image.manifest, progress, check)

    def _require_own(self, image: StoredImage) -> None:
        """Refuses an image whose manifest has not the MAC of this worker."""
        if not self._key:
            return
        data = self._read_manifest(image.path)
        try:
            is_own = has_mac(data, self._key) and decode_manifest(data) == image.manifest
        except (ValueError, msgspec.MsgspecError):
            is_own = False
        if not is_own:
            raise corrupt(
                image.manifest.image_id,
                "its manifest has no valid MAC of this worker, so somebody else may have made or changed it",
            )

    def images(self) -> list[StoredImage]:
        """All images with a readable manifest, the oldest first."""
        return [image for image in self.scan() if isinstance(image, StoredImage)]

    def scan(self) -> list[StoredImage | DamagedCheckpoint]:
        """All images, the oldest first, except unreadable ones of other users."""
        found: list[StoredImage | DamagedCheckpoint] = []
        for path in sorted(self._paths(), key=lambda path: path.name):
            try:
                found.append(self._read(path))
            except OperationError as error:
                if _is_folder(path):  # otherwise the image was just deleted
                    found.append(DamagedCheckpoint(path, path.name, error))
        return found

    def find(self, image_id: str) -> StoredImage:
        """An image by its id.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT: there is none. CHECKPOINT_CORRUPT: its manifest can't be read.
        """
        path = self._path_of(image_id)
        if path is None:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
                f"no image {image_id!r} on this worker: give an id of `leasehold get checkpoints`",
                {"checkpoint_id": image_id},
            )
        return self._read(path)

    def delete(self, image_id: str) -> None:
        """Deletes an image, damaged or not. The first step makes it invalid. Repeated calls do nothing.

        Raises:
            OperationError: The disk failed.
        """
        path = self._path_of(image_id)
        if path is not None:
            # The number keeps it apart from one that a crash has left half deleted.
            gone = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
            with disk_errors(path.parent):
                path.rename(gone)
                sync(path.parent)
                with suppress(FileNotFoundError):  # another worker may be deleting it too
                    remove_tree(gone)
            remove_if_empty(path.parent)

    def sweep(self) -> list[Path]:
        """Removes the remains of a crash: unfinished images without a living writer.

        Returns:
            The removed paths.
        """
        removed = []
        for path in self._leftovers():
            if _is_left(path):
                discard_tree(path)
                removed.append(path)
        return removed

    def used_bytes(self) -> int:
        """Disk usage of final images."""
        return sum(directory_bytes(path) for path in self._paths())

    def _folder(self, workload_id: str) -> Path:
        if _WORKLOAD_ID.fullmatch(workload_id) is None:
            raise OperationError(
                errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
                f"invalid workload id {workload_id!r}: use letters, digits, - and _",
                {"field": "workload_id"},
            )
        return self.root / workload_id

    def _entries(self, folder: Path) -> list[Path]:
        """The entries of a folder. An unreadable folder is skipped, and logged once."""
        try:
            return sorted(folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            if folder not in self._passed_over:
                self._passed_over.add(folder)
                logger.warning("ignored %s, which can't be read: %s", folder, error.strerror)
            return []

    def _folders(self) -> Iterator[Path]:
        for path in self._entries(self.root):
            if _WORKLOAD_ID.fullmatch(path.name) and _is_folder(path):
                yield path

    def _paths(self) -> Iterator[Path]:
        for folder in self._folders():
            for path in self._entries(folder):
                if _IMAGE_ID.fullmatch(path.name) and _is_folder(path):
                    yield path

    def _leftovers(self) -> Iterator[Path]:
        for folder in self._folders():
            for path in self._entries(folder):
                suffix = path.suffix in {PARTIAL_SUFFIX, WORK_SUFFIX}
                if suffix and path.name.startswith("i-") and _is_folder(path):
                    yield path

    def _path_of(self, image_id: str) -> Path | None:
        if _IMAGE_ID.fullmatch(image_id) is None:
            return None
        return next((path for path in self._paths() if path.name == image_id), None)

    def _read(self, path: Path) -> StoredImage:
        try:
            manifest = decode_manifest(self._read_manifest(path))
        except UnknownFormatError as error:
            raise OperationError(
                errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
                f"image {path.name} can't be used here ({error}): restore it with a worker of "
                "the release that wrote it",
                {"checkpoint_id": path.name},
            ) from error
        except ValueError as error:
            raise corrupt(path.name, f"its manifest can't be used: {error}") from error
        if manifest.image_id != path.name or manifest.subject.workload_id != path.parent.name:
            raise corrupt(path.name, f"its manifest has the id {manifest.image_id}")
        return StoredImage(path, manifest)

    def _read_manifest(self, path: Path) -> bytes:
        with disk_errors(path.parent):
            try:
                with open_regular(path / MANIFEST_FILE) as descriptor:
                    size = os.fstat(descriptor).st_size
                    if size <= MANIFEST_LIMIT_BYTES:
                        return os.pread(descriptor, MANIFEST_LIMIT_BYTES, 0)
            except FileNotFoundError as error:
                raise corrupt(path.name, "its manifest is missing") from error
        raise corrupt(path.name, f"its manifest has {size} bytes")


def _is_left(path: Path) -> bool:
    """Whether an unfinished image has no living writer; a working directory counts with its image."""
    owner = path
    if path.suffix == WORK_SUFFIX:
        owner = path.with_suffix("")
        if owner.suffix != PARTIAL_SUFFIX:
            owner = owner.with_suffix("")  # each restore of an image has a working directory of its own
    try:
        descriptor = os.open(owner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # the file belongs to another user
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
