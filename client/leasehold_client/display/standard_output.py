"""Standard output, which may be a closed pipe or a full disk."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from leasehold_client.display.terminal_text import discard, safe_cell, safe_text
from leasehold_client.errors import OutputError

_has_no_reader = False
"""Whether the pipe of standard output was found closed. Python reports that once."""


def echo(line: str) -> bool:
    """Prints a line. A line break within is escaped: in the text of somebody else it would forge a line.

    Returns:
        False if the pipe is closed, so that the line is dropped.

    Raises:
        OutputError: Standard output is closed, or the write failed, such as on a full disk.
    """
    return echo_escaped(safe_cell(line))


def echo_done(line: str) -> None:
    """Prints a line about a change. If the write fails, the error has the line.

    Raises:
        OutputError: As of :func:`echo`.
    """
    try:
        echo(line)
    except OutputError as error:
        error.message += f"; {line}"
        raise


def echo_lines(text: str) -> bool:
    """Prints lines, such as a document, in which nobody else could put a line break.

    Returns and raises:
        As :func:`echo`.
    """
    return echo_escaped(safe_text(text))


def echo_escaped(text: str) -> bool:
    """Prints a line that may have colours. Everything that others wrote in the line is escaped already.

    Returns and raises:
        As :func:`echo`.
    """
    if _has_no_reader:
        return False
    require_open()
    try:
        click.echo(text, color=True)  # click would remove colours where standard output is no terminal
    except OSError as error:
        _give_up(error)
        return False
    return True


def write(data: bytes) -> bool:
    """Writes and flushes bytes. Returns False if the pipe is closed.

    Raises:
        OutputError: Standard output is closed, or the write failed, such as on a full disk.
    """
    require_open()
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        _give_up(error)
        return False
    return True


def require_open() -> None:
    """Refuses a closed standard output. A verb that changes something calls this first.

    Raises:
        OutputError: Standard output is closed.
    """
    if sys.stdout is None:  # as after `>&-` in a shell
        raise OutputError(
            "can't write the output: standard output is closed; redirect it to a file, or to /dev/null"
        )


@contextmanager
def printed_by_click() -> Iterator[None]:
    """Ends the command if output of click or of another package can't be written.

    Raises:
        Exit: The pipe is closed, which is no failure.
        ClickException: The write failed, such as on a full disk.
    """
    try:
        yield
    except OSError as error:
        if not (_is_of_click(error) or _is_broken()):
            raise
        discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise click.exceptions.Exit(0) from error
        raise click.ClickException(_message(error)) from error


def _is_of_click(error: OSError) -> bool:
    """Whether click was writing. A failed write of a long text leaves no data for :func:`_is_broken`."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__") == "click.utils"


def _is_broken() -> bool:
    """Whether standard output still has data that it can't write."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _give_up(error: OSError) -> None:
    global _has_no_reader
    _has_no_reader = isinstance(error, BrokenPipeError)
    discard(sys.stdout)
    if not isinstance(error, BrokenPipeError):
        raise OutputError(_message(error)) from error


def _message(error: OSError) -> str:
    return f"can't write the output: {error.strerror}"
