"""The audit as a file of JSON lines, for programs that collect logs. All functions block.

The last line tells which entry was written last. So a restart goes on with the next entry: none is lost, and
none is written twice. A line that a full disk or a crash has cut is removed before the next write.
"""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from google.protobuf.json_format import MessageToDict, Parse, ParseError
from leasehold.v1.audit_pb2 import AuditEntry

from leasehold_coordinator.storage.audit_chain import Link

FILE_LIMIT_BYTES: Final = 64 * 2**20
"""Size from which on the next write begins a new file."""

FILE_COUNT: Final = 8
"""Most files: PATH is the newest, and PATH.7 the oldest."""

LINE_LIMIT_BYTES: Final = 65_536
"""Most bytes of a line. Arguments have 4 KiB, and JSON writes a byte as six at most."""


@final
class AuditFile:
    """The newest of the files, while this process has it open and locked.

    Args:
        path: Its path.

    Raises:
        OSError: The file can't be opened, or is none that only this user may change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _open(path)
        try:
            self.last, self._end = _last_line(self._descriptor)
            """The last entry of the file. None: the file is empty."""
            if self.last is None:
                with suppress(FileNotFoundError):
                    self.last = _last_of(_numbered(path, 1))
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, entries: Sequence[AuditEntry]) -> None:
        """Adds entries, and returns once they are on disk.

        Raises:
            OSError: The disk is full; or ESTALE, somebody renamed the file. Open it again before another try.
        """
        data = b"".join(map(_line, entries))
        if self._end and self._end + len(data) > FILE_LIMIT_BYTES:
            self.rotate()
        if not self._is_in_place():
            raise OSError(errno.ESTALE, "the file was renamed or replaced", str(self._path))
        os.ftruncate(self._descriptor, self._end)
        _write(self._descriptor, data, self._end)
        os.fsync(self._descriptor)
        self._end += len(data)

    def _is_in_place(self) -> bool:
        ours = os.fstat(self._descriptor)
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino)

    def rotate(self) -> None:
        """Begins a new file if this one has entries, and deletes the oldest one of too many."""
        if not self._end:
            return
        for number in range(FILE_COUNT - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(_numbered(self._path, number - 1), _numbered(self._path, number))
        os.close(self._descriptor)
        self._descriptor, self._end = -1, 0
        self._descriptor = _open(self._path)

    def close(self) -> None:
        """Closes the file, which releases the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _open(path: Path, flags: int = os.O_CREAT) -> int:
    """Opens and locks a file, which only this user may read.

    Raises:
        OSError: It can't be opened, another process has locked it, or it belongs to another user.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise OSError(errno.EPERM, "it is no regular file of this user with one name", str(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, 0o600)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(errno.EBUSY, "another process writes it", str(path)) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(descriptor: int, data: bytes, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)


def _last_of(path: Path) -> Link | None:
    descriptor = _open(path, 0)
    try:
        return _last_line(descriptor)[0]
    finally:
        os.close(descriptor)


def _last_line(descriptor: int) -> tuple[Link | None, int]:
    """The entry of the last whole line, and where this line ends.

    Raises:
        OSError: The last line is not an entry, so the file may have other content.
    """
    size = os.fstat(descriptor).st_size
    begin = max(0, size - 2 * LINE_LIMIT_BYTES)
    data = os.pread(descriptor, size - begin, begin)
    end = data.rfind(b"\n") + 1
    if not end:
        if size >= LINE_LIMIT_BYTES:
            raise OSError(errno.EINVAL, "it has other content than the audit")
        return None, 0
    try:
        entry = Parse(data[data.rfind(b"\n", 0, end - 1) + 1 : end], AuditEntry())
    except (ParseError, UnicodeDecodeError):
        raise OSError(errno.EINVAL, "it has other content than the audit") from None
    return Link(entry.number, entry.hash), begin + end


def _line(entry: AuditEntry) -> bytes:
    """An entry as `leasehold get audit -o json` shows it, on one line."""
    fields = MessageToDict(entry, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
