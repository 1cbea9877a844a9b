"""The folder of images: one is there whole and on disk, with its manifest, or not at all.

An image is a folder ``<root>/<workload id>/<image id>``, and ``<image id>.partial`` until it is final. What
is not final is locked by whoever writes it, since several workers may share the root. What applications saved
of themselves lies beside the images, as files, and is none of ours. Everything here blocks;
:mod:`.publishing` calls in a thread what takes long.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.images.digests import corrupt, digest_files, sync, verify_files
from leasehold_worker.images.envelope_file import disk_errors
from leasehold_worker.images.manifest import (
    MANIFEST_FILE,
    ImageSubject,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from leasehold_worker.images.working import WORK_SUFFIX
from leasehold_worker.machine import DiskSpace, directory_bytes, disk_space

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX: Final = ".partial"
_MODE: Final = 0o700
_WORKLOAD_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)
_IMAGE_ID: Final = re.compile(r"i-\d{8}T\d{12}Z-[0-9a-f]{8}", re.ASCII)


def _nobody(_: int) -> None:
    """Is told how far it is, and does not care."""


def _never() -> None:
    """Never gives up."""


@dataclass(slots=True)
class PartialImage:
    """An image that is being written.

    Attributes:
        image_id: Its id to be.
        path: Where its files go.
    """

    image_id: str
    path: Path
    _lock: int

    def close(self) -> None:
        """Lets go of it: what is not final by now may be swept. Repeating does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A final image.

    Attributes:
        path: Its folder.
        manifest: What it says of itself.
    """

    path: Path
    manifest: Manifest


@final
class ImageStore:
    """The images below a folder.

    Args:
        root: The folder. It is made when something is kept there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, workload_id: str) -> PartialImage:
        """Makes a folder for an image to be.

        Raises:
            OperationError: It can't be made, or the workload's id is none.
        """
        folder = self._folder(workload_id)
        image_id = f"i-{datetime.now(UTC):%Y%m%dT%H%M%S%f}Z-{secrets.token_hex(4)}"
        path = folder / f"{image_id}{PARTIAL_SUFFIX}"
        with disk_errors(folder):
            folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
            path.mkdir(mode=_MODE)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return PartialImage(image_id, path, lock)

    def publish(
        self,
        partial: PartialImage,
        subject: ImageSubject,
        progress: Callable[[int], None] = _nobody,
        check: Callable[[], None] = _never,
    ) -> StoredImage:
        """Makes an image final: all on disk, with its manifest.

        Args:
            partial: The image, complete.
            subject: What it is of.
            progress: Is told how many bytes have been read and are on disk.
            check: Called again and again up to the rename. What it raises ends this, and the image is not
                final.

        Raises:
            OperationError: The disk failed, and it is not final.
        """
        with disk_errors(partial.path.parent):
            files = digest_files(partial.path, progress, check)
            manifest = Manifest(
                image_id=partial.image_id, create_time=datetime.now(UTC), files=files, subject=subject
            )
            (partial.path / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
            sync(partial.path / MANIFEST_FILE)
            sync(partial.path)
            check()
            final_path = partial.path.with_name(partial.image_id)
            partial.path.rename(final_path)
        # It is there from here on, so that a failure to say so to the disk is no reason to say that it isn't.
        with suppress(OSError):
            sync(final_path.parent)
            sync(self.root)
        partial.close()
        return StoredImage(final_path, manifest)

    def verify(
        self,
        image: StoredImage,
        progress: Callable[[int], None] = _nobody,
        check: Callable[[], None] = _never,
    ) -> None:
        """Looks whether an image is as it was written, byte for byte.

        Args:
            image: The image.
            progress: Is told how many bytes were looked at.
            check: Called again and again. What it raises ends this.

        Raises:
            OperationError: CHECKPOINT_CORRUPT; or the disk failed.
        """
        with disk_errors(image.path.parent):
            verify_files(image.path, image.manifest, progress, check)

    def images(self) -> list[StoredImage]:
        """All images whose manifest can be read, the oldest first. Others are logged and left out."""
        found = []
        for path in self._paths():
            try:
                found.append(self._read(path))
            except OperationError as error:
                logger.warning("%s", error)
        return sorted(found, key=lambda image: image.manifest.image_id)

    def find(self, image_id: str) -> StoredImage:
        """An image by its id.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, there is none. CHECKPOINT_CORRUPT, its manifest can't be read.
        """
        path = self._path_of(image_id)
        if path is None:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
                f"there is no image {image_id!r} on this worker: see the list of checkpoints",
                {"checkpoint_id": image_id},
            )
        return self._read(path)

    def delete(self, image_id: str) -> None:
        """Deletes an image. From its first step on it is no image any more. Repeating does nothing.

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
                shutil.rmtree(gone)

    def sweep(self) -> list[Path]:
        """Removes what a crash has left: what is not final and belongs to nobody who lives.

        Returns:
            What was removed.
        """
        removed = []
        for path in self._leftovers():
            if _is_left(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        return removed

    def used_bytes(self) -> int:
        """Disk that final images take."""
        return sum(directory_bytes(path) for path in self._paths())

    def disk(self) -> DiskSpace:
        """The volume.

        Raises:
            OperationError: It can't be read.
        """
        folder = self.root
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with disk_errors(folder):
            return disk_space(folder)

    def _folder(self, workload_id: str) -> Path:
        if _WORKLOAD_ID.fullmatch(workload_id) is None:
            raise OperationError(
                errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
                f"{workload_id!r} is no workload's id: give letters, digits, - and _",
                {"field": "workload_id"},
            )
        return self.root / workload_id

    def _folders(self) -> Iterator[Path]:
        try:
            entries = sorted(self.root.iterdir())
        except FileNotFoundError:
            return
        for path in entries:
            if _WORKLOAD_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path

    def _paths(self) -> Iterator[Path]:
        for folder in self._folders():
            for path in sorted(folder.iterdir()):
                if _IMAGE_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    yield path

    def _leftovers(self) -> Iterator[Path]:
        for folder in self._folders():
            for path in sorted(folder.iterdir()):
                suffix = path.suffix in {PARTIAL_SUFFIX, WORK_SUFFIX}
                if suffix and path.name.startswith("i-") and path.is_dir() and not path.is_symlink():
                    yield path

    def _path_of(self, image_id: str) -> Path | None:
        if _IMAGE_ID.fullmatch(image_id) is None:
            return None
        return next((path for path in self._paths() if path.name == image_id), None)

    def _read(self, path: Path) -> StoredImage:
        try:
            manifest = decode_manifest((path / MANIFEST_FILE).read_bytes())
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise corrupt(path.name, f"its manifest can't be used ({why})") from error
        if manifest.image_id != path.name or manifest.subject.workload_id != path.parent.name:
            raise corrupt(path.name, f"its manifest is of {manifest.image_id}")
        return StoredImage(path, manifest)


def _is_left(path: Path) -> bool:
    """Whether nobody who lives has it locked; a working directory belongs with what it works for."""
    owner = path.with_suffix("") if path.suffix == WORK_SUFFIX else path
    try:
        descriptor = os.open(owner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
