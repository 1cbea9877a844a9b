"""Exit codes of the ``leasehold`` command, and the lines that go with an error."""

import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from leasehold_client.display.terminal_text import echo_error, one_line
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError, WaitTimeoutError

EXIT_FAILED: Final = 1
"""The operation failed or was refused."""

EXIT_USAGE: Final = 2
"""An option, a name, a pair or a configuration file is invalid. The coordinator may be who says so."""

EXIT_NO_COORDINATOR: Final = 3
EXIT_WAIT_TIMEOUT: Final = 4
"""The wait for a command or workload timed out, or its worker is out of contact."""

EXIT_INTERRUPTED: Final = 130
"""A shell reports this code for a program that SIGINT ended."""


def is_usage(error: LeaseholdError) -> bool:
    """Whether an error is a usage error, also by the coordinator (INVALID_ARGUMENT)."""
    is_refused = error.code is not None and error.code.name == "INVALID_ARGUMENT"
    return is_refused or isinstance(error, UsageError)


def fail(error: LeaseholdError) -> NoReturn:
    """Prints an error as one line and exits with the code of its type."""
    echo_error(error_line(error.message, error.reason))
    match error:
        case NoCoordinatorError():
            sys.exit(EXIT_NO_COORDINATOR)
        case WaitTimeoutError():
            sys.exit(EXIT_WAIT_TIMEOUT)
        case _ if is_usage(error):
            sys.exit(EXIT_USAGE)
        case _:
            sys.exit(EXIT_FAILED)


def not_utf8(error: UnicodeEncodeError) -> UsageError:
    """The refusal of an argument that no message can hold."""
    return UsageError(
        f"the argument {error.object!r} is not valid UTF-8: write text, or put the bytes into a file"
    )


def error_line(message: str, reason: str) -> str:
    """Formats an error as one line, followed by the reason unless that is empty."""
    return f"leasehold: {one_line(message)}{f' ({reason})' if reason else ''}"


def echo_failure(lines: Sequence[str]) -> None:
    """Prints a failure, whose first line names the program."""
    first, *others = lines
    echo_error(f"leasehold: {first}", *others)


def raise_all(refusals: Sequence[LeaseholdError]) -> None:
    """Prints all refusals but the last one, and raises the last one. Empty: nothing was refused."""
    for refusal in refusals[:-1]:
        echo_error(error_line(refusal.message, refusal.reason))
    if refusals:
        raise refusals[-1]


def interrupted(remainder: str = "") -> NoReturn:
    """Prints what continues, and exits like a program that SIGINT ended. Empty: nothing continues."""
    echo_error(f"leasehold: interrupted; {remainder}" if remainder else "leasehold: interrupted")
    sys.exit(EXIT_INTERRUPTED)
