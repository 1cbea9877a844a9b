"""The text of an error of the system, for people."""

import os


def error_text(error: Exception) -> str:
    """The cause and the file, if any, without the number: ``No such file or directory: '/nowhere'``."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    name = error.filename
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    return error.strerror if name is None else f"{error.strerror}: {name!r}"
