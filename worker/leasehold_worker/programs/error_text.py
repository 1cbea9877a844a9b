"""The text of an error of the system, for people."""


def error_text(error: Exception) -> str:
    """The cause and the file, if any, without the number: ``No such file or directory: '/nowhere'``."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename!r}"
