"""Writer and reader of an application checkpoint. All calls block, and belong in a thread.

The calls on one of them exclude each other. So a descriptor stays open while an abandoned thread, which waits
for the volume, uses it.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from leasehold.v1.workload_pb2 import Kernel

from leasehold_worker.checkpoints.application_format import (
    PAYLOAD_OFFSET,
    ApplicationHeader,
    check_custom,
    now,
    read_payload,
    verify_payload,
    write_header,
)
from leasehold_worker.checkpoints.folders import disk_errors, remove_if_empty

SUFFIX: Final = ".checkpoint"
PARTIAL_SUFFIX: Final = ".partial"


def _never() -> None:
    """Never gives up."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on disk.

    Attributes:
        path: Its file.
        envelope: Its header.
    """

    path: Path
    header: ApplicationHeader

    @property
    def checkpoint_id(self) -> str:
        """Its id."""
        return self.header.checkpoint_id

    @property
    def file_bytes(self) -> int:
        """Bytes on disk."""
        return PAYLOAD_OFFSET + self.header.size_bytes


@final
class ApplicationWriter:
    """A checkpoint in progress. Unless :meth:`commit` is called, it leaves no file behind.

    Args:
        workload_id: The workload.
        workload_name: Its name.
        kernel: The application.
        owner: Owner of the workload. Empty: unknown.
        worker_id: The worker that writes it.
        path: The file, without its final name.
        descriptor: The same, open and locked.
    """

    def __init__(
        self,
        workload_id: str,
        workload_name: str,
        kernel: Kernel,
        owner: str,
        worker_id: str,
        path: Path,
        descriptor: int,
    ) -> None:
        self.path = path
        self.size_bytes = 0
        self._workload_id = workload_id
        self._workload_name = workload_name
        self._kernel = kernel
        self._owner = owner
        self._worker_id = worker_id
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Adds a piece.

        Raises:
            OperationError: INSUFFICIENT_DISK, or PERMISSION_OR_OS.
        """
        with self._lock, disk_errors(self.path.parent):
            position = 0
            while position < len(data):
                position += os.pwrite(
                    self._descriptor, data[position:], PAYLOAD_OFFSET + self.size_bytes + position
                )
            self.size_bytes += len(data)
            self._digest.update(data)

    def commit(self, custom: Mapping[str, str], check: Callable[[], None] = _never) -> StoredCheckpoint:
        """Publishes the checkpoint on disk under its final name.

        Args:
            custom: Facts of the application.
            check: Called once, directly before the rename. Its exception ends the call, and the file is not
                final.

        Raises:
            OperationError: The commit failed, and the file is deleted.
        """
        check_custom(custom)
        header = ApplicationHeader(
            checkpoint_id=self.path.stem,
            workload_id=self._workload_id,
            workload_name=self._workload_name,
            kernel_id=self._kernel.kernel_id,
            kind=self._kernel.kind,
            version=self._kernel.version,
            created=now(),
            size_bytes=self.size_bytes,
            sha256=self._digest.hexdigest(),
            custom=dict(custom),
            worker_id=self._worker_id,
            owner=self._owner,
        )
        final_path = self.path.with_suffix(SUFFIX)
        with self._lock, disk_errors(self.path.parent):
            write_header(self._descriptor, header)
            os.fsync(self._descriptor)
            check()
            self.path.rename(final_path)
            try:
                _sync_folder(self.path.parent)
                _sync_folder(self.path.parent.parent)
            except OSError:
                final_path.unlink(missing_ok=True)
                raise
        return StoredCheckpoint(final_path, header)

    def close(self) -> None:
        """Closes the file. An uncommitted one is deleted. Repeated calls do nothing."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                self.path.unlink(missing_ok=True)
                remove_if_empty(self.path.parent)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1


@final
class ApplicationReader:
    """An open checkpoint."""

    def __init__(self, descriptor: int, checkpoint: StoredCheckpoint) -> None:
        self._descriptor = descriptor
        self._checkpoint = checkpoint
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def verify(self, check: Callable[[], None] = _never) -> None:
        """Reads the whole payload, and compares its digest.

        Args:
            check: Called repeatedly. Its exception ends the call.

        Raises:
            OperationError: CHECKPOINT_CORRUPT, or an error of the disk.
        """
        with self._lock, disk_errors(self._checkpoint.path.parent):
            verify_payload(self._descriptor, self._checkpoint.header, check)

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """Reads the payload from its start.

        Raises:
            OperationError: CHECKPOINT_CORRUPT, or an error of the disk.
        """
        pieces = read_payload(self._descriptor, self._checkpoint.header, piece_bytes)
        while True:
            with self._lock, disk_errors(self._checkpoint.path.parent):
                piece = next(pieces, b"")
            if not piece:
                return
            yield piece

    def close(self) -> None:
        """Closes the file. Repeated calls do nothing."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
