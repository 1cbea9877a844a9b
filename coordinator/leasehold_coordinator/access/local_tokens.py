"""The bearer tokens of the loopback listeners: two files that only their owner can read.

Every user of a host reaches its loopback address. Whoever reads a token's file is the coordinator's Unix user
or root, and so proves to be one of them. All coordinators of a user share the files.
"""

import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leasehold_coordinator.errors import StartError

CLIENT_FILE: Final = "client.token"
WORKER_FILE: Final = "worker.token"
TOKEN_BYTES: Final = 32
SCHEME: Final = "Bearer "


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """The tokens of one Unix user.

    Attributes:
        client: The token of clients.
        worker: The token of workers.
    """

    client: str
    worker: str


def is_bearer(authorization: str, token: str) -> bool:
    """Whether a value of the ``authorization`` header carries a token. Takes the same time for any token."""
    return hmac.compare_digest(authorization.encode(), (SCHEME + token).encode())


def open_tokens(directory: Path) -> LocalTokens:
    """Reads the tokens, and creates missing ones.

    Raises:
        StartError: A file can't be created or read, or others can read or replace it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own_directory(directory)
        return LocalTokens(_open_token(directory / CLIENT_FILE), _open_token(directory / WORKER_FILE))
    except OSError as error:
        raise StartError(
            f"can't create or read the tokens in {directory}: {error.strerror}; choose another directory with "
            "--state-dir"
        ) from error


def _require_own_directory(directory: Path) -> None:
    found = directory.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise StartError(
            f"other users may change {directory}, where the tokens are: make it yours with mode 0700, or choose "
            "another with --state-dir"
        )


def _open_token(path: Path) -> str:
    _create(path)
    with open(path, opener=_open_without_links, encoding="ascii", errors="replace") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StartError(f"{path} is not a file of yours with mode 0600: delete it, a new one is made")
        token = file.read(256).strip()
    if len(token) < TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise StartError(f"{path} holds no token: delete it, a new one is made")
    return token


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _create(path: Path) -> None:
    """Creates a token's file, unless it exists. Others never see it half written, or empty after a crash."""
    if path.is_symlink() or path.exists():
        return
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(new, path)
        except FileExistsError:
            return  # another coordinator of this user was first
    finally:
        new.unlink()
