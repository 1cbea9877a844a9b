"""The state file of a simulated host, mapped into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from pathlib import Path
from typing import Final, final

from leasehold_simgpu import layout
from leasehold_simgpu.errors import HostLockedError, InvalidSettingError, NoSuchHostError
from leasehold_simgpu.process_table import is_stopped

STATE_BYTES: Final = ctypes.sizeof(layout.Host)
_LOCK_POLL_S: Final = 0.0016
_LOCK_POLLS_WHILE_STOPPED: Final = 1250  # 2 seconds or more


@final
class StateFile:
    """A shared mapping of a directory's state file. Every process sees the writes of the others at once."""

    def __init__(self, directory: Path, memory: mmap.mmap) -> None:
        self.directory = directory
        self.host = layout.Host.from_buffer(memory)

    @classmethod
    def create(cls, directory: Path, host: layout.Host) -> StateFile:
        """Writes the state of a new host atomically.

        Raises:
            InvalidSettingError: The directory holds a host, or cannot be written.
        """
        host.magic = layout.MAGIC
        host.layout_bytes = STATE_BYTES
        temporary = directory / f".state.{os.getpid()}"
        try:
            (directory / "memory").mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(bytes(host))
            os.link(temporary, directory / "state")  # unlike a rename, a link fails if the file exists
        except FileExistsError as error:
            raise InvalidSettingError(
                f"{directory} already holds a simulated host: open it, or name a new directory"
            ) from error
        except OSError as error:
            raise InvalidSettingError(
                f"{directory} cannot hold a simulated host: {error.strerror}"
            ) from error
        finally:
            with suppress(OSError):  # the error above says what is wrong
                temporary.unlink(missing_ok=True)
        return cls.open(directory)

    @classmethod
    def open(cls, directory: Path) -> StateFile:
        """Maps the state of a host.

        Raises:
            NoSuchHostError: The directory holds no host, or a host of another version of simgpu.
        """
        try:
            with open(directory / "state", "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                memory = mmap.mmap(file.fileno(), size) if size == STATE_BYTES else None
        except PermissionError as error:
            raise NoSuchHostError(
                f"the simulated host in {directory} can't be opened: {error.strerror}; run the command as "
                "its owner, or name another directory"
            ) from error
        except OSError as error:
            raise NoSuchHostError(
                f"{directory} holds no simulated host ({error.strerror}): create one with "
                f"`leasehold simgpu exec --dir {directory} COMMAND`"
            ) from error
        if memory is None or layout.Host.from_buffer_copy(memory).magic != layout.MAGIC:
            raise NoSuchHostError(f"{directory} holds a simulated host of another version: create a new one")
        return cls(directory, memory)

    @contextmanager
    def locked(self) -> Iterator[layout.Host]:
        """Takes the flock of the libraries. Each call opens the file again, so threads exclude each other.

        Raises:
            HostLockedError: A process holds the lock and stays stopped.
        """
        with open(self.directory / "state", "rb") as file:
            self._lock(file.fileno())
            self.host.lock_holder = os.getpid()
            try:
                yield self.host
            finally:
                self.host.lock_holder = 0
                flock(file, LOCK_UN)  # explicit: a child that another thread forked may have the file open

    def _lock(self, descriptor: int) -> None:
        """Like `simgpu_lock` of the libraries."""
        polls_while_stopped = 0
        while polls_while_stopped <= _LOCK_POLLS_WHILE_STOPPED:
            try:
                return flock(descriptor, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                holder = self.host.lock_holder
                polls_while_stopped = polls_while_stopped + 1 if is_stopped(holder) else 0
                time.sleep(_LOCK_POLL_S)
        raise HostLockedError(
            f"process {holder} is stopped and holds the lock of the simulated host in {self.directory}: "
            f"continue it (kill -CONT {holder})"
        )
