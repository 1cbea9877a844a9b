"""Small files of the worker's state: one line each, on disk before a write returns. All calls block."""

from pathlib import Path
from typing import Final

from leasehold_worker.errors import StartError
from leasehold_worker.files.file_replacement import replace_file
from leasehold_worker.files.workload_files import read_regular

TEXT_LIMIT: Final = 256
"""Bytes of a file that are read."""


def read_number(path: Path) -> int:
    """The number in a file; 0 if there is none.

    Raises:
        StartError: The file can't be read, or has no number.
    """
    text = read_text(path)
    if text is None:
        return 0
    if not text.isdecimal():
        raise damaged(path, "no number")
    return int(text)


def read_text(path: Path) -> str | None:
    """The line in a file. None: there is no file. An unreadable file is not a missing one.

    Raises:
        StartError: The file can't be read, or has no whole line.
    """
    try:
        text = read_regular(path, TEXT_LIMIT).decode("ascii")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise damaged(path, "no text") from error
    except OSError as error:
        raise _unusable(path, error) from error
    if not text.endswith("\n"):  # a number without its last digits is another number
        raise damaged(path, "no whole line")
    return text.strip()


def write_text(path: Path, text: str) -> None:
    """Replaces the line in a file.

    Raises:
        StartError: The file can't be written.
    """
    try:
        replace_file(path, f"{text}\n".encode("ascii"))
    except OSError as error:
        raise _unusable(path, error) from error


def damaged(path: Path, what: str) -> StartError:
    """The error of a file with wrong contents.

    Args:
        path: The file.
        what: What it holds, such as "no number".
    """
    return StartError(
        f"{path} is damaged, it holds {what}: restore it from a backup, or end this "
        "worker's workloads and choose another directory with --state-dir"
    )


def _unusable(path: Path, error: OSError) -> StartError:
    return StartError(
        f"{path} can't be read or written ({error.strerror}): check its disk and the free space there"
    )
