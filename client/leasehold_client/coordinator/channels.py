"""Channels to a coordinator: its socket, or its port with a certificate or a token, with or without TLS."""

import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import grpc

from leasehold_client.config import (
    COORDINATOR_VARIABLE,
    CREDENTIALS_VARIABLE,
    INSECURE_SCHEME,
    ISSUED_VARIABLE,
    UNIX_SCHEME,
    credentials_directory,
    require_trusted,
)
from leasehold_client.contexts import Contexts, read_contexts
from leasehold_client.coordinator.header_interceptor import HeaderInterceptor
from leasehold_client.coordinator.pem_checks import has_certificates, key_problem
from leasehold_client.coordinator.socket_access import closed_socket_text
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError

AUTHORITY_FILE: Final = "ca.pem"
CLIENT_FILE: Final = "client.token"
CERTIFICATE_FILES: Final = ("client.pem", "client.key")
"""A client certificate and its key, which take the place of the token if they exist."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]{32,512}")
ISSUED_LIMIT_BYTES: Final = 8_192
"""Longest token of an OpenID Connect issuer that a coordinator accepts."""

_ISSUED_TOKEN: Final = re.compile(r"[A-Za-z0-9_.-]+")
FILE_LIMIT_BYTES: Final = 65_536


class Credentials(NamedTuple):
    """How a coordinator is reached, and how it knows the caller.

    Attributes:
        target: Address for gRPC.
        tls: Credentials of the channel. None: the channel has no TLS.
        token: Returns the bearer token of a call, and may read a file. None: a call has no token.
    """

    target: str
    tls: grpc.ChannelCredentials | None = None
    token: Callable[[], str] | None = None


def find_credentials(address: str) -> Credentials:
    """This user's credentials for a coordinator.

    Args:
        address: HOST:PORT or insecure:HOST:PORT of a coordinator, or unix:PATH of its socket.

    Raises:
        NoCoordinatorError: There are no credentials yet. A coordinator creates them at its first start.
        LeaseholdError: The user may not open the socket.
        UsageError: The credentials can't be read, or are missing and a context has others.
    """
    if address.startswith(UNIX_SCHEME):
        require_no_token(f"the kernel tells who calls through {address}")
        path = address.removeprefix(UNIX_SCHEME)
        _require_server(path)
        return Credentials(f"{UNIX_SCHEME}{quote(path)}")
    directory = credentials_directory()
    is_insecure = address.startswith(INSECURE_SCHEME)
    certificate = b"" if is_insecure else _authority(directory / AUTHORITY_FILE, address)
    if token_file := os.environ.get(ISSUED_VARIABLE):
        return _issued_token(address, certificate, Path(token_file))
    chain_path, key_path = (directory / name for name in CERTIFICATE_FILES)
    if key_path.exists() and not is_insecure:
        pair = _pair(key_path, chain_path, address)
        return Credentials(address, grpc.ssl_channel_credentials(certificate, *pair))
    token = _token(directory / CLIENT_FILE, address)
    if is_insecure:
        return Credentials(address.removeprefix(INSECURE_SCHEME), token=lambda: token)
    return Credentials(address, grpc.ssl_channel_credentials(certificate), lambda: token)


def open_channel(address: str, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    """A channel that connects when it is first used.

    Args:
        address: As of :func:`find_credentials`, which also has the errors.
        options: Settings of gRPC.
    """
    target, tls, token = find_credentials(address)
    if tls is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, tls, options=options)
    if token is None:
        return channel
    return grpc.intercept_channel(channel, HeaderInterceptor("authorization", lambda: f"Bearer {token()}"))


def certificate_file(address: str) -> Path | None:
    """The file with the client certificate of a PKI of others. None: there is none, or a socket needs none.

    Raises:
        UsageError: The directory can't be read.
    """
    if address.startswith(UNIX_SCHEME):
        return None
    path = credentials_directory() / CERTIFICATE_FILES[0]
    try:
        return path if path.exists() else None
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}; name a directory that you may read with "
            f"{CREDENTIALS_VARIABLE}"
        ) from error


def require_no_token(why: str) -> None:
    """Refuses a token of an OpenID Connect issuer beside another credential.

    Raises:
        UsageError: There is one.
    """
    if os.environ.get(ISSUED_VARIABLE):
        raise UsageError(
            f"{why}, and {ISSUED_VARIABLE} names a token: name the listener for OpenID Connect with "
            f"--coordinator, or unset {ISSUED_VARIABLE}"
        )


def _issued_token(address: str, certificate: bytes, path: Path) -> Credentials:
    """A token of an OpenID Connect issuer. Its file is read for each call."""
    if not certificate:
        raise UsageError(
            f"the token in {path} would travel to {address} without TLS: write the address of the listener "
            f"for OpenID Connect, or unset {ISSUED_VARIABLE}"
        )

    def token() -> str:
        try:
            text = _content(path).decode("ascii", "replace").strip()
        except OSError as error:
            raise UsageError(
                f"the token {path} can't be read: {error.strerror}; correct {ISSUED_VARIABLE}"
            ) from error
        if not _ISSUED_TOKEN.fullmatch(text):
            raise UsageError(
                f"{path} holds no token: get one from the OpenID Connect issuer, or unset {ISSUED_VARIABLE}"
            )
        if len(text) > ISSUED_LIMIT_BYTES:
            more = " or more" if len(text) >= FILE_LIMIT_BYTES else ""
            raise UsageError(
                f"the token in {path} has {len(text):,} bytes{more}, and the limit is "
                f"{ISSUED_LIMIT_BYTES:,}: get a token with fewer claims from the OpenID Connect issuer, or "
                f"unset {ISSUED_VARIABLE}"
            )
        return text

    token()  # the first call would tell it later
    return Credentials(address, grpc.ssl_channel_credentials(certificate), token)


def _authority(path: Path, address: str) -> bytes:
    certificate = _read(path, address)
    if not has_certificates(certificate):  # without any, gRPC would trust the authorities of the system
        raise UsageError(f"{path} holds no certificate: copy it from the coordinator's host again")
    return certificate


def _pair(key_path: Path, chain_path: Path, address: str) -> tuple[bytes, bytes]:
    """A key and its certificate."""
    key, chain = _read(key_path, address), _read(chain_path, address)
    if not has_certificates(chain):
        raise UsageError(f"{chain_path} holds no certificate: copy it from its issuer again")
    if problem := key_problem(chain, key):
        raise UsageError(f"the private key {key_path} {problem}")
    return key, chain


def _token(path: Path, address: str) -> str:
    text = _read(path, address).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(text):
        raise UsageError(f"{path} holds no token: copy it from the coordinator again")
    return text


def _require_server(path: str) -> None:
    try:
        require_trusted(path)
    except PermissionError:  # another attempt has the same end
        raise LeaseholdError(closed_socket_text(Path(path))) from None
    except OSError as error:
        raise NoCoordinatorError(
            f"no coordinator answers at {UNIX_SCHEME}{path} ({error.strerror or error}): start one with "
            "`leasehold coordinator`, or name another one with --coordinator or LEASEHOLD_COORDINATOR",
            code=grpc.StatusCode.UNAVAILABLE,
            is_sent=False,
        ) from None


def _read(path: Path, address: str) -> bytes:
    try:
        return _content(path)
    except FileNotFoundError:
        raise _without_credentials(path, address) from None
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}; call as the coordinator's user, or name another "
            f"directory with {CREDENTIALS_VARIABLE}"
        ) from error


def _without_credentials(path: Path, address: str) -> LeaseholdError:
    """The error for a missing file, which a coordinator of this user may still make at its first start."""
    missing = f"there are no credentials for {address}, because {path} is missing"
    contexts = _contexts()
    if (name := contexts.name_for(address)) is not None:
        steps = [f"unset {COORDINATOR_VARIABLE}"] if os.environ.get(COORDINATOR_VARIABLE) == address else []
        steps += [f"leasehold context use {name}"] if name != contexts.current else []
        always = f"by `{'; '.join(steps)}`" if steps else "without the address"
        return UsageError(
            f"{missing}: use the certificate of a context by --context {name}, or for all calls {always}"
        )
    if address.startswith(INSECURE_SCHEME):
        return NoCoordinatorError(
            f"{missing}: start a coordinator as this user, name the directory of its {path.name} with "
            f"{CREDENTIALS_VARIABLE}, or name a coordinator with TLS without `{INSECURE_SCHEME}`",
            code=grpc.StatusCode.UNAVAILABLE,
            is_sent=False,
        )
    current = contexts.by_name.get(contexts.current)
    other = f"; without the address, the context {current.name} is in use" if current else ""
    return NoCoordinatorError(
        f"{missing}: start a coordinator as this user, name the directory of its {path.name} with "
        f"{CREDENTIALS_VARIABLE}, or get a certificate with `leasehold login --token -`{other}",
        code=grpc.StatusCode.UNAVAILABLE,
        is_sent=False,
    )


def _contexts() -> Contexts:
    """This user's contexts."""
    try:
        return read_contexts()
    except UsageError:  # no call needs the file, since none asks for a context
        return Contexts()


def _content(path: Path) -> bytes:
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(FILE_LIMIT_BYTES)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
