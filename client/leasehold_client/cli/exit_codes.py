"""How the ``leasehold`` command ends: one line of text, and a code that scripts can rely on."""

import sys
from typing import Final, NoReturn

from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import (
    LeaseholdError,
    NoCoordinatorError,
    NotYetError,
    StillOpenError,
    UsageError,
)

EXIT_FAILED: Final = 1
"""The operation failed, or was refused."""

EXIT_USAGE: Final = 2
"""An option, a name, a pair or a configuration is wrong."""

EXIT_NO_COORDINATOR: Final = 3
EXIT_STILL_OPEN: Final = 4
"""A command has not ended, or a workload is not ready, in the time that it was waited for, or its worker is
out of contact."""

EXIT_INTERRUPTED: Final = 130
"""What a shell says of a program that SIGINT ended."""


def fail(error: LeaseholdError) -> NoReturn:
    """Prints an error as one line, and exits with its code."""
    echo_error(error_line(error.message, error.reason))
    match error:
        case NoCoordinatorError():
            sys.exit(EXIT_NO_COORDINATOR)
        case StillOpenError() | NotYetError():
            sys.exit(EXIT_STILL_OPEN)
        case UsageError():
            sys.exit(EXIT_USAGE)
        case _:
            sys.exit(EXIT_FAILED)


def error_line(message: str, reason: str) -> str:
    """An error as one line, with its reason where there is one."""
    return f"leasehold: {' '.join(message.split())}{f' ({reason})' if reason else ''}"


def interrupted(what_goes_on: str) -> NoReturn:
    """Says what goes on without us, and exits as a program that Ctrl-C ended."""
    echo_error(f"leasehold: interrupted; {what_goes_on}")
    sys.exit(EXIT_INTERRUPTED)
