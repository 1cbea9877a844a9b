"""The user's configuration of the command line."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

from leasehold_client.errors import UsageError

DEFAULT_COORDINATOR: Final = "127.0.0.1:7400"

SOCKET_VARIABLE: Final = "LEASEHOLD_SOCKET"
"""Names the socket of this host's worker."""

FILE_LIMIT_BYTES: Final = 1_000_000
"""What a settings file may have."""


def config_path() -> Path:
    """Where the file is, if there is one."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "leasehold/cli.toml"


def configured_coordinator() -> str:
    """Address of the coordinator as the file has it, HOST:PORT. Without a file, the default.

    Raises:
        UsageError: The file can't be read, or breaks a rule; the text says which.
    """
    path = config_path()
    try:
        return _coordinator_of(_content(path).decode())
    except FileNotFoundError:
        return DEFAULT_COORDINATOR
    except OSError as error:
        raise UsageError(
            f"the configuration {path} can't be read: {error.strerror}; make it a readable file, or remove it"
        ) from error
    except (ValueError, RecursionError) as error:  # also of what is not UTF-8 or not TOML
        raise UsageError(
            f"the configuration {path} is not valid: {error}; its only key is coordinator = 'HOST:PORT'"
        ) from error


def _coordinator_of(text: str) -> str:
    """The only key of the file, or the default.

    Raises:
        ValueError: The text is not TOML, or breaks a rule.
    """
    import tomllib  # late: without a file there is nothing to read

    settings = tomllib.loads(text)
    for key, value in settings.items():
        if key != "coordinator" or not isinstance(value, str):
            raise ValueError(f"{key} = {value!r}"[:100])
    return str(settings.get("coordinator", DEFAULT_COORDINATOR))


def _content(path: Path) -> bytes:
    """The content of a settings file.

    Raises:
        OSError: It can't be read, is no regular file, or is too large. A pipe or a device may never end.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        data = file.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {FILE_LIMIT_BYTES} bytes, which is the limit")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def parse_address(text: str) -> str:
    """Checks an address of a coordinator, and returns it.

    Raises:
        UsageError: It is not HOST:PORT.
    """
    host, _, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not _is_port(port):
        raise UsageError(
            f"{text!r} is not the address of a coordinator: write HOST:PORT, such as {DEFAULT_COORDINATOR}"
        )
    return f"{host}:{port}"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 65_536
