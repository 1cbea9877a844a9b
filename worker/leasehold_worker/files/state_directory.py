"""The worker's state across restarts: its id, the highest epoch that it has seen, its number of starts."""

import fcntl
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import Enrolment, read_enrolment, write_enrolment
from leasehold_worker.files.private_directories import PRIVATE, close_to_others, create_private
from leasehold_worker.files.state_files import damaged, read_number, read_text, write_text
from leasehold_worker.files.workload_files import USER_FOLDERS

_ID: Final = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)


@final
class StateDirectory:
    """The directory, locked for one worker. Made by :func:`open_state_directory`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._epoch_lock = threading.Lock()
        self._enrolment_lock = threading.Lock()
        self.workloads_path = path / "workloads"
        """One folder per workload, with its output."""
        self.keys_path = path / "keys"
        """Keys, apart from the journal."""
        self.journal_path = path / "journal.sqlite3"
        """Commands and workloads."""

    def worker_id(self) -> str:
        """The worker's id, made at the first start.

        Raises:
            StartError: The id can't be read or written.
        """
        path = self._path / "worker_id"
        worker_id = read_text(path)
        if worker_id is None:
            worker_id = f"worker-{uuid.uuid4().hex[:12]}"
            write_text(path, worker_id)
        if not _ID.fullmatch(worker_id):
            raise damaged(path, "no id")
        return worker_id

    def last_epoch(self) -> int:
        """The highest epoch seen, 0 before the first.

        Raises:
            StartError: The epoch can't be read.
        """
        return read_number(self._path / "epoch")

    def save_epoch(self, epoch: int) -> None:
        """Stores the epoch, on disk before this returns. The stored epoch never decreases.

        Raises:
            StartError: The epoch can't be read or written.
        """
        with self._epoch_lock:
            if epoch > self.last_epoch():
                write_text(self._path / "epoch", str(epoch))

    def enrolment(self) -> Enrolment | None:
        """The worker's own credential. None: the worker has not joined.

        Raises:
            StartError: The file is damaged, or others could read it.
            OSError: The file can't be read.
        """
        return read_enrolment(self._path)

    def save_enrolment(self, enrolment: Enrolment) -> None:
        """Stores the worker's own credential, on disk before this returns.

        Raises:
            OSError: It can't be written.
        """
        write_enrolment(self._path, enrolment)

    def change_enrolment(self, change: Callable[[Enrolment], Enrolment]) -> Enrolment:
        """Changes the worker's own credential, one change at a time, and returns it.

        Raises:
            StartError: The file is damaged, or others could read it.
            OSError: It can't be read or written.
        """
        with self._enrolment_lock:
            changed = change(self.enrolment() or Enrolment())
            self.save_enrolment(changed)
        return changed

    def count_start(self) -> int:
        """Counts this start of the worker: 1 for the first. The number is on disk before this returns.

        Raises:
            StartError: The count can't be read or written.
        """
        number = 1 + read_number(self._path / "starts")
        write_text(self._path / "starts", str(number))
        return number


@contextmanager
def open_state_directory(path: Path, mode: int = PRIVATE) -> Iterator[StateDirectory]:
    """Opens the directory for this process alone, and creates a missing one.

    Args:
        path: The directory.
        mode: Its permissions.

    Raises:
        StartError: The directory can't be used, another user could change it, or another worker uses it.
    """
    try:
        create_private(path, "state directory", mode)
        lock = os.fdopen(os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _unwritable(path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"another worker uses the state directory {path}: give each its own with --state-dir"
            ) from None
        try:
            close_to_others(path, "state directory", mode, USER_FOLDERS)  # now it is no other worker's
        except OSError as error:
            raise _unwritable(path, error) from error
        yield StateDirectory(path)


def _unwritable(path: Path, error: OSError) -> StartError:
    return StartError(
        f"the state directory {path} can't be written ({error.strerror}): choose another with --state-dir"
    )
