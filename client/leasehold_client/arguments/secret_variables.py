"""Secret environment variables of ``leasehold run``: ``NAME``, or ``NAME=@FILE``.

A value on the command line would be visible to all users of the host.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Final

from leasehold_client.errors import UsageError

LIMIT_BYTES: Final = 65_536
"""Size of a value."""


def secret_variables(texts: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with their values, from this environment or from files.

    The last line end of a file is not part of the value.

    Raises:
        UsageError: A variable is invalid or missing, or its file can't be read; the text has no value.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not name or (equals and not source.startswith("@")):
            raise UsageError(
                f"invalid secret variable {name!r}: write NAME, which this environment has, or NAME=@FILE"
            )
        if name in found:
            raise UsageError(f"the secret variable {name} is given twice: give it once")
        if source == "@":
            raise UsageError(f"{text!r} names no file: write {name}=@FILE")
        if equals:
            found[name] = _content(name, source[1:])
        elif name in environment:
            found[name] = environment[name]
        else:
            raise UsageError(
                f"the variable {name} is not set in this environment: set it, or write {name}=@FILE"
            )
    return found


def _content(name: str, path: str) -> str:
    what = f"{path} of the secret variable {name}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(f"{what} is not a regular file: give another")
            content = file.read(LIMIT_BYTES + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"{what} can't be read ({why}): give another") from None
    if len(content) > LIMIT_BYTES:
        raise UsageError(f"{what} is larger than {LIMIT_BYTES} bytes: shorten it")
    return text.removesuffix("\n").removesuffix("\r")
