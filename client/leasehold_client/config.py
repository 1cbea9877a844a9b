"""The settings file of the command line, and addresses of coordinators."""

import errno
import os
import re
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from leasehold_client.errors import UsageError

DEFAULT_COORDINATOR: Final = "127.0.0.1:7400"

SYSTEM_SOCKET: Final = Path("/run/leasehold/coordinator/coordinator.sock")
"""The socket of a coordinator for all users of its host. Only root can create its directory."""

UNIX_SCHEME: Final = "unix:"
"""Beginning of an address that is the path of a coordinator's socket."""

INSECURE_SCHEME: Final = "insecure:"
"""Beginning of an address without TLS, for a coordinator that was started with --insecure."""

COORDINATOR_VARIABLE: Final = "LEASEHOLD_COORDINATOR"
"""Environment variable with the address of the coordinator, unless an argument names one."""

CREDENTIALS_VARIABLE: Final = "LEASEHOLD_CREDENTIALS"
"""Environment variable with the directory of ``ca.pem`` and ``client.token``."""

ISSUED_VARIABLE: Final = "LEASEHOLD_TOKEN_FILE"
"""Environment variable with the file of a token of an OpenID Connect issuer."""

SOCKET_VARIABLE: Final = "LEASEHOLD_SOCKET"
"""Environment variable with the path of the worker's socket."""

SOCKET_PATH_LIMIT_BYTES: Final = 107
"""Longest path of a Unix socket on Linux (unix(7))."""

SHOWN_LIMIT: Final = 100
"""Characters of an invalid address in a message."""

_HOST: Final = re.compile(r"[\w.-]{1,253}")
"""A name of a host, or an IPv4 address."""

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of a peer, as SO_PEERCRED has them (unix(7))."""

FILE_LIMIT_BYTES: Final = 1_000_000
"""Largest settings file."""


def config_path() -> Path:
    """Path of the settings file, which need not exist.

    Raises:
        FileNotFoundError: This user has no home directory, and so no settings and no contexts.
    """
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:
        what = "this user has no home directory: set HOME or XDG_CONFIG_HOME"
        raise FileNotFoundError(errno.ENOENT, what) from None
    return Path(base) / "leasehold/cli.toml"


def state_directory() -> Path:
    """The default state directory of this user's coordinators."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    except RuntimeError:
        raise UsageError("this user has no home directory: set HOME or XDG_STATE_HOME") from None
    return Path(base) / "leasehold"


def credentials_directory() -> Path:
    """Directory of ``ca.pem`` and ``client.token`` for coordinators."""
    return Path(os.environ.get(CREDENTIALS_VARIABLE) or state_directory())


def default_coordinator() -> str:
    """The socket of this user's coordinator, or of the host's, if it answers, or else the default port.

    Without credentials for the port, the host's socket is meant too while its coordinator restarts.
    """
    paths = [SYSTEM_SOCKET]
    with suppress(UsageError):  # no home directory
        paths.insert(0, state_directory() / "coordinator.sock")
    for path in paths:
        try:
            require_trusted(str(path))
        except OSError:
            continue
        return f"{UNIX_SCHEME}{path}"
    with suppress(UsageError, OSError):  # no home directory, or an unreadable one
        if SYSTEM_SOCKET.parent.is_dir() and not (credentials_directory() / "ca.pem").exists():
            return f"{UNIX_SCHEME}{SYSTEM_SOCKET}"
    return DEFAULT_COORDINATOR


def require_trusted(path: str) -> None:
    """Refuses the socket of another user, who would read each request.

    Raises:
        UsageError: The server's process belongs neither to this user, nor to root, nor to the user to whom
            root gave the directory of SYSTEM_SOCKET.
        OSError: Nobody listens there.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        probe.connect(path)
        data = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    if uid not in (0, os.geteuid()) and not (path == str(SYSTEM_SOCKET) and uid == _system_user()):
        raise UsageError(
            f"the socket {path} is served by the Unix user {uid}, and not by root or this user: name another "
            "coordinator with --coordinator"
        )


def _system_user() -> int | None:
    """The owner of the directory of SYSTEM_SOCKET. None: others could replace the socket there."""
    found = SYSTEM_SOCKET.parent.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid if is_private else None


def configured_coordinator() -> str:
    """Address of the coordinator, from the settings file or the default.

    Raises:
        UsageError: The file is unreadable or invalid.
    """
    return coordinator_in_file() or default_coordinator()


def coordinator_in_file() -> str:
    """Address of the coordinator in the settings file. Empty: there is none.

    Raises:
        UsageError: The file is unreadable or invalid.
    """
    try:
        path = config_path()
        address = _coordinator_of(read_settings_file(path).decode("utf-8-sig"))
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(
            f"the configuration {path} can't be read: {error.strerror}; make it a readable file or remove it"
        ) from error
    except (ValueError, RecursionError) as error:  # includes invalid UTF-8 and invalid TOML
        raise UsageError(
            f"the configuration {path} is not valid: {error}; its only key is coordinator = 'HOST:PORT'"
        ) from error
    try:
        return parse_address(address) if address else ""
    except UsageError as error:
        raise UsageError(f"the configuration {path} is not valid: {error.message}") from None


def _coordinator_of(text: str) -> str:
    """The value of the file's only key. Empty: there is none.

    Raises:
        ValueError: The text is not TOML, or has another key, another type or an empty value.
    """
    import tomllib  # late: most users have no file

    settings = tomllib.loads(text)
    for key, value in settings.items():
        if key != "coordinator" or not isinstance(value, str) or not value:
            raise ValueError(f"{key} = {value!r}"[:100])
    return str(settings.get("coordinator", ""))


def read_settings_file(path: Path) -> bytes:
    """The content of a settings file.

    Raises:
        OSError: The file is unreadable, too large, or not a regular file: a pipe or a device may never end.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        data = file.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"it exceeds the limit of {FILE_LIMIT_BYTES} bytes")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def parse_address(text: str) -> str:
    """Validates and returns the address of a coordinator.

    Raises:
        UsageError: The text is none of HOST:PORT, insecure:HOST:PORT and unix:PATH.
    """
    if text.startswith(f"{UNIX_SCHEME}/"):
        path = text.removeprefix(UNIX_SCHEME)
        if not path.isprintable() or len(path.encode()) > SOCKET_PATH_LIMIT_BYTES:
            raise UsageError(
                f"invalid coordinator address {_cut(text)!r}: the path of a socket has printable characters, "
                f"and {SOCKET_PATH_LIMIT_BYTES} bytes at most"
            )
        return text
    scheme = INSECURE_SCHEME if text.strip().startswith(INSECURE_SCHEME) else ""
    host, _, port = text.strip().removeprefix(scheme).rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (_is_address(host[1:-1]) if bracketed else _HOST.fullmatch(host)) or not _is_port(port):
        raise UsageError(
            f"invalid coordinator address {_cut(text)!r}: write HOST:PORT, such as {DEFAULT_COORDINATOR}, "
            f"{INSECURE_SCHEME}HOST:PORT without TLS, or {UNIX_SCHEME}/PATH of a socket"
        )
    return f"{scheme}{host}:{port}"


def _is_address(text: str) -> bool:
    """Whether a text is an IPv6 address."""
    import ipaddress  # late: few addresses are of IPv6

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_LIMIT else f"{text[:SHOWN_LIMIT]}…"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) < 65_536
