"""Writing a checkpoint of an application, and reading it again. It blocks, and is called in a thread."""

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Kernel

from leasehold_worker.errors import OperationError
from leasehold_worker.images.envelope import (
    PAYLOAD_OFFSET,
    Envelope,
    check_custom,
    now,
    read_payload,
    verify_payload,
    write_header,
)

SUFFIX: Final = ".checkpoint"
PARTIAL_SUFFIX: Final = ".partial"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on disk.

    Attributes:
        path: Its file.
        envelope: What its header says.
    """

    path: Path
    envelope: Envelope

    @property
    def checkpoint_id(self) -> str:
        """Its id."""
        return self.envelope.checkpoint_id

    @property
    def file_bytes(self) -> int:
        """Bytes on disk."""
        return PAYLOAD_OFFSET + self.envelope.size_bytes


@final
@dataclass(slots=True)
class EnvelopeWriter:
    """A checkpoint that is being written. Left without :meth:`commit`, it leaves nothing behind."""

    workload_id: str
    workload_name: str
    kernel: Kernel
    path: Path
    checkpoint_id: str
    _descriptor: int
    size_bytes: int = 0
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def sha256(self) -> bytes:
        """Digest of what was written so far."""
        return self._digest.digest()

    def write(self, data: bytes) -> None:
        """Adds a piece.

        Raises:
            OperationError: INSUFFICIENT_DISK, or PERMISSION_OR_OS.
        """
        with disk_errors(self.path.parent):
            position = 0
            while position < len(data):
                position += os.pwrite(
                    self._descriptor, data[position:], PAYLOAD_OFFSET + self.size_bytes + position
                )
        self.size_bytes += len(data)
        self._digest.update(data)

    def commit(self, custom: Mapping[str, str]) -> StoredCheckpoint:
        """Brings it to disk under its name. From then on it is there, whatever happens.

        Raises:
            OperationError: It can't be, and is not there.
        """
        check_custom(custom)
        envelope = Envelope(
            checkpoint_id=self.checkpoint_id,
            workload_id=self.workload_id,
            workload_name=self.workload_name,
            kernel_id=self.kernel.kernel_id,
            kind=self.kernel.kind,
            version=self.kernel.version,
            created=now(),
            size_bytes=self.size_bytes,
            sha256=self._digest.hexdigest(),
            custom=dict(custom),
        )
        final_path = self.path.with_suffix(SUFFIX)
        with disk_errors(self.path.parent):
            write_header(self._descriptor, envelope)
            os.fsync(self._descriptor)
            self.path.rename(final_path)
            try:
                _sync_folder(self.path.parent)
                _sync_folder(self.path.parent.parent)
            except OSError:
                final_path.unlink(missing_ok=True)
                raise
        return StoredCheckpoint(final_path, envelope)

    def close(self) -> None:
        """Lets go of the file. What was not committed is gone. Twice is as good as once."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):
                self.path.parent.rmdir()  # unless there are others in it
            os.close(self._descriptor)
            self._descriptor = -1


@final
class EnvelopeReader:
    """An open checkpoint."""

    def __init__(self, descriptor: int, checkpoint: StoredCheckpoint) -> None:
        self._descriptor = descriptor
        self._checkpoint = checkpoint

    def verify(self) -> None:
        """Reads all of it, and compares its digest.

        Raises:
            OperationError: CHECKPOINT_CORRUPT, or it can't be read.
        """
        with disk_errors(self._checkpoint.path.parent):
            verify_payload(self._descriptor, self._checkpoint.envelope)

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """Reads the payload from its begin.

        Raises:
            OperationError: CHECKPOINT_CORRUPT, or it can't be read.
        """
        with disk_errors(self._checkpoint.path.parent):
            yield from read_payload(self._descriptor, self._checkpoint.envelope, piece_bytes)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Says what the kernel says of files as refusals.

    Raises:
        OperationError: INSUFFICIENT_DISK, or PERMISSION_OR_OS.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OperationError(
                errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
                f"the disk of {folder} is full ({error.strerror}): delete checkpoints, or give the worker "
                "another image directory",
            ) from error
        raise OperationError(
            errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
            f"a checkpoint in {folder} can't be read or written ({error.strerror}): see to the disk and to "
            "who owns the folder",
        ) from error
