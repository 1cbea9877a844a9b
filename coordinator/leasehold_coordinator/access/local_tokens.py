"""The bearer tokens of a Unix user's coordinators: two files that only their owner can read.

Whoever reads a token's file is the coordinator's Unix user or root, so a token gives nothing that its reader
lacks.
"""

import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leasehold_coordinator.access.private_files import create_file, read_file
from leasehold_coordinator.errors import StartError

CLIENT_FILE: Final = "client.token"
WORKER_FILE: Final = "worker.token"
TOKEN_BYTES: Final = 32
SCHEME: Final = "Bearer "
"""The scheme of the ``authorization`` header, in any case (RFC 9110, section 11.1)."""


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """The tokens of one Unix user.

    Attributes:
        client: The token of clients.
        worker: The token of workers.
    """

    client: str
    worker: str


def bearer_token(authorization: str) -> str | None:
    """The token of a value of the ``authorization`` header. None: its scheme is another."""
    scheme, token = authorization[: len(SCHEME)], authorization[len(SCHEME) :]
    return token if scheme.lower() == SCHEME.lower() else None


def is_bearer(authorization: str, token: str) -> bool:
    """Whether a value of the ``authorization`` header carries a token. Takes the same time for any token."""
    carried = bearer_token(authorization)
    return carried is not None and hmac.compare_digest(carried.encode(), token.encode())


def open_tokens(directory: Path) -> LocalTokens:
    """Reads the tokens, and creates missing ones.

    Raises:
        StartError: Others can read or replace a file, or a file holds no token.
        OSError: A file can't be created or read.
    """
    return LocalTokens(_open_token(directory / CLIENT_FILE), _open_token(directory / WORKER_FILE))


def _open_token(path: Path) -> str:
    if not path.exists():
        create_file(path, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
    token = read_file(path, is_secret=True).decode("ascii", "replace").strip()
    if len(token) < TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise StartError(f"{path} holds no token: delete it, and a new one is made")
    return token
