"""Standard output, which may be a pipe that nobody reads any more, or a full disk."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from leasehold_client.display.terminal_text import discard, safe_text
from leasehold_client.errors import LeaseholdError


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
    if sys.stdout is None:  # it was closed before we started
        return False
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        _give_up(error)
        return False
    return True


@contextmanager
def printed_by_click() -> Iterator[None]:
    """Ends the command where click or another room prints what can't be written.

    Raises:
        Exit: Nobody reads any more: that is no failure.
        ClickException: The output can't be written, as on a full disk.
    """
    try:
        yield
    except OSError as error:
        if not _is_broken():
            raise
        discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise click.exceptions.Exit(0) from error
        raise click.ClickException(_message(error)) from error


def _is_broken() -> bool:
    """Whether standard output still has what it could not write."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _give_up(error: OSError) -> None:
    discard(sys.stdout)
    if not isinstance(error, BrokenPipeError):
        raise LeaseholdError(_message(error)) from error


def _message(error: OSError) -> str:
    return f"the output can't be written: {error.strerror}"
