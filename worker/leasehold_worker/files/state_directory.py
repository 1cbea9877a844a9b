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
from leasehold_worker.files.workload_files import USER_FOLDERS, read_regular

TEXT_LIMIT: Final = 256
"""Bytes of a file that are read."""

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
        worker_id = self._read(path)
        if worker_id is None:
            worker_id = f"worker-{uuid.uuid4().hex[:12]}"
            self._keep(path, worker_id)
        if not _ID.fullmatch(worker_id):
            raise _damaged(path, "no id")
        return worker_id

    def last_epoch(self) -> int:
        """The highest epoch seen, 0 before the first.

        Raises:
            StartError: The epoch can't be read.
        """
        return self._number("epoch")

    def save_epoch(self, epoch: int) -> None:
        """Stores the epoch, on disk before this returns. The stored epoch never decreases.

        Raises:
            StartError: The epoch can't be read or written.
        """
        with self._epoch_lock:
            if epoch > self.last_epoch():
                self._keep(self._path / "epoch", str(epoch))

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
        number = 1 + self._number("starts")
        self._keep(self._path / "starts", str(number))
        return number

    def _number(self, name: str) -> int:
        """The number in a file; 0 if there is none."""
        path = self._path / name
        text = self._read(path)
        if text is None:
            return 0
        if not text.isdecimal():
            raise _damaged(path, "no number")
        return int(text)

    def _keep(self, path: Path, text: str) -> None:
        try:
            self._write(path, text)
        except OSError as error:
            raise _unusable(path, error) from error

    def _read(self, path: Path) -> str | None:
        """The line in a file. None: there is no file. An unreadable file is not a missing one."""
        try:
            text = read_regular(path, TEXT_LIMIT).decode("ascii")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise _damaged(path, "no text") from error
        except OSError as error:
            raise _unusable(path, error) from error
        if not text.endswith("\n"):  # a number without its last digits is another number
            raise _damaged(path, "no whole line")
        return text.strip()

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


def _unusable(path: Path, error: OSError) -> StartError:
    return StartError(
        f"{path} can't be read or written ({error.strerror}): check its disk and the free space there"
    )


def _damaged(path: Path, what: str) -> StartError:
    return StartError(
        f"{path} is damaged, it holds {what}: restore it from a backup, or end this "
        "worker's workloads and choose another directory with --state-dir"
    )


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
