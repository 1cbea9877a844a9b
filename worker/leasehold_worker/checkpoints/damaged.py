"""Damaged checkpoints: files that can't be used as one."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.files.folder_trees import directory_bytes
from leasehold_worker.files.regular_files import time_of


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A file or an image folder without a usable header or manifest.

    Attributes:
        path: Its path.
        checkpoint_id: The id in its name.
        error: Its error.
    """

    path: Path
    checkpoint_id: str
    error: OperationError

    @property
    def workload_id(self) -> str:
        """The workload's id, according to the path."""
        return self.path.parent.name

    @property
    def is_corrupt(self) -> bool:
        """Whether the damage is permanent; else this user or this release can't read it."""
        return self.error.reason == errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT

    def age(self) -> tuple[datetime, int]:
        """Time of writing, and bytes on disk; for a deleted one, the current time and 0."""
        try:
            facts = self.path.lstat()
        except OSError:
            return datetime.now(UTC), 0
        size = directory_bytes(self.path) if self.path.is_dir() else facts.st_size
        return time_of(facts.st_mtime), size
