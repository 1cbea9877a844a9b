"""Standard output, which may be a pipe that nobody reads any more, or a full disk."""

import os
import sys

import click

from leasehold_client.errors import LeaseholdError
from leasehold_client.terminal_text import safe_text


def echo(text: str) -> None:
    """Prints a line. Where nobody reads any more it is dropped: what is done stays done.

    Raises:
        LeaseholdError: It can't be written, as on a full disk.
    """
    try:
        click.echo(safe_text(text))
    except OSError as error:
        _give_up(error)


def write(data: bytes) -> bool:
    """Writes bytes as they are, at once. False: nobody reads any more.

    Raises:
        LeaseholdError: They can't be written, as on a full disk.
    """
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        _give_up(error)
        return False
    return True


def _give_up(error: OSError) -> None:
    # What is still buffered would fail once more, with a traceback, when Python exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        raise LeaseholdError(f"the output can't be written: {error.strerror}") from error
