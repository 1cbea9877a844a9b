"""What lies where a checkpoint should be, and can't be used as one."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.files.regular_files import time_of
from leasehold_worker.host.capacity import directory_bytes


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A file, or the folder of an image, that says nothing, or something else than what is there.

    Attributes:
        path: Where it is.
        checkpoint_id: Its id, by its name.
        error: What is wrong with it.
    """

    path: Path
    checkpoint_id: str
    error: OperationError

    @property
    def workload_id(self) -> str:
        """The workload that it is of, by its place."""
        return self.path.parent.name

    @property
    def is_corrupt(self) -> bool:
        """Whether it will never serve; else it can't be read here, or by this release."""
        return self.error.reason == errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT

    def age(self) -> tuple[datetime, int]:
        """When it was written, and the bytes that it has on disk; of one that is gone, now and none."""
        try:
            facts = self.path.lstat()
        except OSError:
            return datetime.now(UTC), 0
        size = directory_bytes(self.path) if self.path.is_dir() else facts.st_size
        return time_of(facts.st_mtime), size
