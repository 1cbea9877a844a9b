"""The worker's own credential: one file, so that key and certificate are replaced together."""

import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from leasehold_worker.errors import StartError
from leasehold_worker.files.file_replacement import replace_file

NAME: Final = "enrolment.json"
SIZE_LIMIT_BYTES: Final = 262_144


class Enrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a worker's enrolment. Keys and certificates are PEM."""

    identity: str = ""
    """The identity of the certificate, ``worker/NAME``. Empty: the worker has not joined yet."""
    coordinator: str = ""
    """HOST:PORT of the coordinator's listener for workers."""
    key: str = ""
    """The private key."""
    certificate: str = ""
    """The client certificate."""
    authorities: str = ""
    """The certificates by which the coordinator is verified."""
    renew_s: float = 0.0
    """When the certificate is due to be renewed, in seconds of the Unix epoch."""
    next_key: str = ""
    """The key of a join or a renewal whose answer is not here yet. The same key gets the same answer."""
    next_ticket: str = ""
    """SHA-256 of the join token for ``next_key``, in hexadecimal. Empty: the key is for a renewal."""
    ticket_digest: str = ""
    """SHA-256 of the join token by which the worker joined last, in hexadecimal."""

    @property
    def name(self) -> str:
        """The name of the identity. Empty: none yet."""
        return self.identity.partition("/")[2]


def read_enrolment(directory: Path, owner_uid: int | None = None) -> Enrolment | None:
    """The enrolment in a state directory. None: there is none.

    Args:
        directory: The state directory.
        owner_uid: The worker's user. None: that of this process.

    Raises:
        StartError: The file is damaged, or others could read it.
        OSError: The file can't be read.
    """
    path = directory / NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    owner_uid = os.geteuid() if owner_uid is None else owner_uid
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid != owner_uid and not found.st_mode & 0o077:
            raise StartError(
                f"{path} belongs to user {found.st_uid}, and the worker is user {owner_uid}: if the worker "
                f"was that user before, `chown {owner_uid} {path}`; otherwise delete it, and join again with "
                "a token of `leasehold token create --replace`"
            )
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner_uid or found.st_mode & 0o077:
            raise StartError(
                f"{path} is not a file of the worker's user with mode 0600: others may have its key; delete "
                "it, and join again with a token of `leasehold token create --replace`"
            )
        data = file.read(SIZE_LIMIT_BYTES)
    try:
        return msgspec.json.decode(data, type=Enrolment)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartError(
            f"{path} is damaged ({error}): delete it, and join again with a token of `leasehold token create "
            "--replace`"
        ) from error


def write_enrolment(directory: Path, enrolment: Enrolment) -> None:
    """Replaces the enrolment. It is on disk before this returns, whole or not at all.

    Raises:
        OSError: The file can't be written.
    """
    replace_file(directory / NAME, msgspec.json.encode(enrolment))
