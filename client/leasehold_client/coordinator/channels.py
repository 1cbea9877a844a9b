"""Channels to a coordinator: its socket, or TLS with a token."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc

from leasehold_client.config import CREDENTIALS_VARIABLE, UNIX_SCHEME, credentials_directory
from leasehold_client.errors import NoCoordinatorError, UsageError

FILES: Final = ("ca.pem", "client.token")
FILE_LIMIT_BYTES: Final = 65_536


def open_channel(address: str, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """A channel that connects when it is first used.

    Args:
        address: HOST:PORT of a coordinator, or unix:PATH of its socket.
        options: Settings of gRPC.

    Raises:
        NoCoordinatorError: There are no credentials yet. A coordinator creates them at its first start.
        UsageError: The credentials can't be read.
    """
    if address.startswith(UNIX_SCHEME):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, read_credentials(address), options=options)


def read_credentials(address: str) -> grpc.ChannelCredentials:
    """The credentials for a coordinator: the server is verified, and then gets the token.

    Raises:
        NoCoordinatorError: There are none yet.
        UsageError: They can't be read.
    """
    directory = credentials_directory()
    certificate, token = (_read(directory / name, address) for name in FILES)
    return grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(certificate),
        grpc.access_token_call_credentials(token.decode("ascii", "replace").strip()),
    )


def _read(path: Path, address: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(
                    f"{path} is not a regular file: name another directory with {CREDENTIALS_VARIABLE}"
                )
            return file.read(FILE_LIMIT_BYTES)
    except FileNotFoundError:
        raise NoCoordinatorError(
            f"there are no credentials for {address}, because {path} is missing: start a coordinator as this "
            f"user, or name the directory of its {path.name} with {CREDENTIALS_VARIABLE}",
            code=grpc.StatusCode.UNAVAILABLE,
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}; call as the coordinator's user, or name another "
            f"directory with {CREDENTIALS_VARIABLE}"
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
