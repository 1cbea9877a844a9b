"""What a worker keeps across restarts: its id, the highest epoch that it has seen, its number of starts."""

import fcntl
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from leasehold_worker.errors import StartError


@final
class StateDirectory:
    """The directory, locked for one worker. Made by :func:`open_state_directory`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._epoch_lock = threading.Lock()
        self.workloads_path = path / "workloads"
        """One folder per workload, with its output."""
        self.journal_path = path / "journal.sqlite3"
        """Commands and workloads."""

    def worker_id(self) -> str:
        """The worker's id, made at the first start."""
        path = self._path / "worker_id"
        if not path.exists():
            self._write(path, f"worker-{uuid.uuid4().hex[:12]}")
        return path.read_text(encoding="ascii").strip()

    def last_epoch(self) -> int:
        """The highest epoch seen, 0 before the first."""
        path = self._path / "epoch"
        return int(path.read_text(encoding="ascii")) if path.exists() else 0

    def save_epoch(self, epoch: int) -> None:
        """Keeps the epoch, on disk before this returns. It never goes back, however late the disk is."""
        with self._epoch_lock:
            if epoch > self.last_epoch():
                self._write(self._path / "epoch", str(epoch))

    def count_start(self) -> int:
        """Counts this start of the worker: 1 for the first. The number is on disk before this returns.

        Raises:
            StartError: The count can't be read.
        """
        path = self._path / "starts"
        try:
            number = 1 + (int(path.read_text(encoding="ascii")) if path.exists() else 0)
        except ValueError:
            raise StartError(
                f"{path} is damaged, it holds no number: restore it from a backup, or end this worker's "
                "workloads and choose another directory with --state-dir"
            ) from None
        self._write(path, str(number))
        return number

    def _write(self, path: Path, text: str) -> None:
        fresh = path.with_suffix(".new")
        with fresh.open("w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def open_state_directory(path: Path) -> Iterator[StateDirectory]:
    """Opens the directory for this process alone, and makes it where it is missing.

    Raises:
        StartError: It can't be used, or another worker uses it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w")
    except OSError as error:
        raise StartError(
            f"the state directory {path} can't be written ({error.strerror}): choose another with --state-dir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"another worker uses the state directory {path}: give each its own with --state-dir"
            ) from None
        yield StateDirectory(path)
