"""The worker's gRPC channel: its settings and credentials."""

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import grpc

from leasehold_worker.files.enrolment_file import Enrolment

FILES: Final = ("ca.pem", "worker.token")
CERTIFICATE_FILES: Final = ("worker.pem", "worker.key")
"""A client certificate and its key, which take the place of the token if they exist."""
INSECURE_SCHEME: Final = "insecure:"
"""Beginning of an address without TLS, for a coordinator that was started with --insecure."""
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_TOKEN: Final = re.compile(r"[\x21-\x7e]{32,512}")
FILE_LIMIT_BYTES: Final = 65_536

KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
CONNECT_TIMEOUT_MS: Final = 10_000

OPTIONS: Final[list[tuple[str, int]]] = [
    # Both sides ping: a partition can be one way.
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # The timeout of a ping. With gRPC's default, a frozen peer is detected only after 60 s.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Bandwidth probing lets a sender buffer 4 MB for a receiver that stalls.
    ("grpc.http2.bdp_probe", 0),
    # Frames are about 1 KB.
    ("grpc.max_receive_message_length", 262_144),
    ("grpc.max_send_message_length", 262_144),
    # The channel's own back-off was 17 s late after an outage of 30 s.
    ("grpc.initial_reconnect_backoff_ms", 500),
    # The timeout of one connection attempt. Handshakes of thousands of workers take seconds after an outage.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Each worker has its own connection, also where several live in one process.
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(coordinator: str, directory: Path) -> grpc.Channel:
    """A channel, which connects when it is first used. The server is verified before it gets a credential.

    The credential is the client certificate in the directory, or else the token. Without TLS, whoever listens
    at the address gets the token.

    Args:
        coordinator: HOST:PORT of the coordinator's listener for workers, or insecure:HOST:PORT without TLS.
        directory: Directory of the coordinator's certificate and of the token.

    Raises:
        OSError: A file can't be read, or does not hold what it should.
    """
    authority_path, token_path = (directory / name for name in FILES)
    chain_path, key_path = (directory / name for name in CERTIFICATE_FILES)
    if key_path.exists() and not coordinator.startswith(INSECURE_SCHEME):
        return grpc.secure_channel(
            coordinator,
            grpc.ssl_channel_credentials(_authority(authority_path), _read(key_path), _read(chain_path)),
            options=OPTIONS,
        )
    token = _read(token_path).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(token):
        raise OSError(errno.EINVAL, "it holds no token", str(token_path))
    if coordinator.startswith(INSECURE_SCHEME):
        channel = grpc.insecure_channel(coordinator.removeprefix(INSECURE_SCHEME), options=OPTIONS)
        return grpc.intercept_channel(channel, _TokenInterceptor(token))
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(_authority(authority_path)), grpc.access_token_call_credentials(token)
    )
    return grpc.secure_channel(coordinator, credentials, options=OPTIONS)


def open_enrolled_channel(coordinator: str, enrolment: Enrolment) -> grpc.Channel:
    """A channel with the worker's own client certificate, which connects when it is first used.

    Args:
        coordinator: HOST:PORT of the coordinator's listener for workers.
        enrolment: The worker's certificate, and those by which it verifies the coordinator.
    """
    texts = enrolment.authorities, enrolment.key, enrolment.certificate
    credentials = grpc.ssl_channel_credentials(*(text.encode() for text in texts))
    return grpc.secure_channel(coordinator, credentials, options=OPTIONS)


def _authority(path: Path) -> bytes:
    certificate = _read(path)
    if _CERTIFICATE not in certificate:  # without any, gRPC would trust the authorities of the system
        raise OSError(errno.EINVAL, "it holds no certificate", str(path))
    return certificate


class _CallDetails(NamedTuple):
    """The attributes of a call that gRPC reads (grpc.ClientCallDetails)."""

    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


@final
class _TokenInterceptor(grpc.StreamStreamClientInterceptor):
    """Sends the token with a session. gRPC's own call credentials need TLS."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: object
    ) -> Any:
        """Opens a stream with the token."""
        found = client_call_details
        details = _CallDetails(
            found.method,
            found.timeout,
            (*(found.metadata or ()), self._header),
            found.credentials,
            found.wait_for_ready,
            found.compression,
        )
        return continuation(details, request)


def _read(path: Path) -> bytes:
    """The content of a file, which may be a link: mounted secrets are."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(FILE_LIMIT_BYTES)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
