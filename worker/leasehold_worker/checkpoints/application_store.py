"""The directory of application checkpoints, which several workers may share.

Each is a file ``<root>/<workload id>/<checkpoint id>.checkpoint``, in the form of :mod:`.application_format`.
It gets that name only once it is complete and on disk. All calls block, and belong in a thread.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Kernel

from leasehold_worker.checkpoints.application_file import (
    PARTIAL_SUFFIX,
    SUFFIX,
    ApplicationReader,
    ApplicationWriter,
    StoredCheckpoint,
)
from leasehold_worker.checkpoints.application_format import corrupt, read_envelope, read_header
from leasehold_worker.checkpoints.damaged import DamagedCheckpoint
from leasehold_worker.checkpoints.folders import disk_errors, make_inside, remove_if_empty
from leasehold_worker.errors import OperationError
from leasehold_worker.files.regular_files import open_regular
from leasehold_worker.files.volume import DiskSpace, disk_space

logger = logging.getLogger(__name__)

_FILE_MODE: Final = 0o600

_ID: Final = re.compile(r"k-(\d{1,12})-[0-9a-f]{16}", re.ASCII)
"""A number that grows within its workload, and a random part."""

_WORKLOAD_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)


@final
class ApplicationStore:
    """The checkpoints below a folder.

    Args:
        root: The folder. It is created with the first checkpoint.
        worker_id: The worker that writes into it.
    """

    def __init__(self, root: Path, worker_id: str = "") -> None:
        self.root = root
        self._worker_id = worker_id

    def disk_space(self) -> DiskSpace:
        """Disk space of the volume.

        Raises:
            OperationError: The volume does not answer.
        """
        folder = self.root
        with disk_errors(folder):
            while not folder.exists() and folder != folder.parent:
                folder = folder.parent
            return disk_space(folder)

    def begin(
        self, workload_id: str, workload_name: str, kernel: Kernel, owner: str = ""
    ) -> ApplicationWriter:
        """Begins a checkpoint. While it is being written, it is locked against :meth:`sweep`.

        Raises:
            OperationError: The file can't be created.
        """
        folder = self._folder(workload_id)
        number = max((_number(path) for path in self._paths(workload_id)), default=0) + 1
        checkpoint_id = f"k-{number}-{secrets.token_hex(8)}"
        path = folder / f"{checkpoint_id}{PARTIAL_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with disk_errors(folder):
            descriptor = make_inside(folder, lambda: os.open(path, flags, _FILE_MODE))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return ApplicationWriter(workload_id, workload_name, kernel, owner, self._worker_id, path, descriptor)

    def scan(self, workload_id: str) -> list[StoredCheckpoint | DamagedCheckpoint]:
        """All checkpoints of a workload, newest first, by their numbers.

        Raises:
            OperationError: The folder of the workload can't be read.
        """
        with disk_errors(self.root), suppress(FileNotFoundError):
            os.scandir(self._folder(workload_id)).close()  # a folder that can't be read is not an empty one
        return self._found(workload_id)

    def _found(self, workload_id: str) -> list[StoredCheckpoint | DamagedCheckpoint]:
        """As :meth:`scan`, but a folder that can't be read counts as empty."""
        return [found for path in self._paths(workload_id) if (found := _look(path)) is not None]

    def scan_all(self) -> list[StoredCheckpoint | DamagedCheckpoint]:
        """All checkpoints, by workload, newest first."""
        try:
            folders = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        except OSError:
            return []
        return [found for name in folders if _WORKLOAD_ID.fullmatch(name) for found in self._found(name)]

    def find(self, checkpoint_id: str) -> StoredCheckpoint:
        """The checkpoint with this id, of any workload.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, or an error of the checkpoint.
        """
        found = _look(self._path(checkpoint_id))
        if found is None:
            raise _unknown(checkpoint_id)
        if isinstance(found, DamagedCheckpoint):
            raise found.error
        return found

    def open(self, checkpoint: StoredCheckpoint) -> ApplicationReader:
        """Opens a checkpoint, and compares its header again.

        Raises:
            OperationError: The file has been deleted or modified.
        """
        with disk_errors(checkpoint.path.parent):
            try:
                with open_regular(checkpoint.path) as descriptor:
                    if read_header(descriptor, checkpoint.path) != checkpoint.header:
                        raise corrupt(checkpoint.checkpoint_id, "has another header than before")
                    return ApplicationReader(os.dup(descriptor), checkpoint)
            except FileNotFoundError:
                raise _unknown(checkpoint.checkpoint_id) from None

    def delete(self, checkpoint_id: str) -> None:
        """Deletes a checkpoint, damaged or not.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, or an error of the disk.
        """
        path = self._path(checkpoint_id)
        with disk_errors(path.parent):
            path.unlink(missing_ok=True)
            remove_if_empty(path.parent)

    def keep_last(self, workload_id: str, count: int, in_use: Collection[str] = ()) -> list[str]:
        """Deletes the oldest checkpoints of a workload. A failed deletion is logged.

        Args:
            workload_id: The workload.
            count: Number of intact checkpoints to keep, the newest. At least one stays.
            in_use: Ids of further checkpoints to keep.

        Returns:
            Ids of the deleted checkpoints.
        """
        whole = 0
        deleted: list[str] = []
        for found in self._found(workload_id):
            superfluous = whole >= max(1, count) and found.checkpoint_id not in in_use
            whole += isinstance(found, StoredCheckpoint)
            if superfluous:
                try:
                    self.delete(found.checkpoint_id)
                    deleted.append(found.checkpoint_id)
                except OperationError as error:
                    logger.warning(
                        "checkpoint %s could not be deleted: %s", found.checkpoint_id, error.message
                    )
        return deleted

    def sweep(self) -> int:
        """Deletes files of writers that no longer run. Files of other workers' running writers stay.

        Returns:
            Number of deleted files.
        """
        removed = 0
        for path in self.root.glob(f"*/k-*{PARTIAL_SUFFIX}"):
            if not _ID.fullmatch(path.stem):
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    removed += 1
                finally:
                    os.close(descriptor)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
                    logger.warning("%s can't be removed: %s", path, error.strerror)
        return removed

    def _folder(self, workload_id: str) -> Path:
        if not _WORKLOAD_ID.fullmatch(workload_id):
            raise OperationError(
                errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
                f"invalid workload id {workload_id[:64]!r}: give one that `leasehold get workloads` shows",
            )
        return self.root / workload_id

    def _paths(self, workload_id: str) -> list[Path]:
        """The files of a workload, newest first."""
        try:
            names = os.listdir(self._folder(workload_id))
        except OSError:
            return []
        paths = [self._folder(workload_id) / name for name in names if name.endswith(SUFFIX)]
        return sorted(
            (path for path in paths if _ID.fullmatch(path.stem)),
            key=lambda path: (_number(path), path.name),
            reverse=True,
        )

    def _path(self, checkpoint_id: str) -> Path:
        if not _ID.fullmatch(checkpoint_id):
            raise _unknown(checkpoint_id)
        with disk_errors(self.root):
            for path in self.root.glob(f"*/{checkpoint_id}{SUFFIX}"):
                return path
        raise _unknown(checkpoint_id)


def _number(path: Path) -> int:
    match = _ID.fullmatch(path.stem)
    return int(match[1]) if match else 0


def _look(path: Path) -> StoredCheckpoint | DamagedCheckpoint | None:
    """The checkpoint in a file. None: it has just been deleted."""
    try:
        with disk_errors(path.parent), suppress(FileNotFoundError):
            return StoredCheckpoint(path, read_envelope(path))
    except OperationError as error:
        return DamagedCheckpoint(path, path.stem, error)
    return None


def _unknown(checkpoint_id: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
        f"no checkpoint {checkpoint_id[:64]!r} in this worker's image directory: give an id "
        "of `leasehold get checkpoints`",
        {"checkpoint_id": checkpoint_id[:64]},
    )
