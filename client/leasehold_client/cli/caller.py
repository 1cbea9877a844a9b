"""The user who calls a verb, as other people read it."""

import getpass
import socket


def caller() -> str:
    """The calling user as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
