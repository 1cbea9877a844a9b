"""The CAs of a state directory: one, or two during a rotation. One file has their certificates, oldest first.

The newest CA signs client certificates. The oldest signs the server's certificate until everybody trusts the
newest. Each change of the files leaves a state that a start can read, also after a crash.
"""

import datetime
import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from leasehold_coordinator.access.authority import (
    CERTIFICATE_FILE,
    DEFAULT_RULES,
    KEY_FILE,
    NEXT_KEY_FILE,
    Authority,
    IssueRules,
    ServerCertificate,
    create_authority,
    load_key,
    no_authority,
    open_authority,
    serial_text,
)
from leasehold_coordinator.access.certificates import ClientCertificate
from leasehold_coordinator.access.identities import Identity
from leasehold_coordinator.access.private_files import read_file, replace_file

logger = logging.getLogger(__name__)


@final
class Authorities:
    """The CAs of one coordinator. gRPC's threads read them.

    Args:
        directory: The state directory.
        members: The CAs, the oldest first.
    """

    def __init__(self, directory: Path, members: tuple[Authority, ...]) -> None:
        self._directory = directory
        self.members = members
        self.is_newest_served = False
        """Whether the newest CA signs the server's certificate."""
        self.version = 0
        """Counts the changes, after each of which listeners need other certificates."""

    @property
    def newest(self) -> Authority:
        """The CA that signs client certificates."""
        return self.members[-1]

    @property
    def server(self) -> Authority:
        """The CA that signs the server's certificate."""
        members = self.members
        return members[-1] if self.is_newest_served else members[0]

    @property
    def rules(self) -> IssueRules:
        """How the CAs issue certificates."""
        return self.newest.rules

    @property
    def serials(self) -> frozenset[str]:
        """The serial numbers of all CAs."""
        return frozenset(member.serial for member in self.members)

    def issuer_of(self, certificate: x509.Certificate) -> Authority | None:
        """The trusted CA that has signed a certificate."""
        for authority in self.members:
            with suppress(ValueError, TypeError, InvalidSignature):
                certificate.verify_directly_issued_by(authority.certificate)
                return authority
        return None

    @property
    def pem(self) -> bytes:
        """The certificates of all CAs, as PEM."""
        return b"".join(member.pem for member in self.members)

    @property
    def der(self) -> list[bytes]:
        """The certificates of all CAs, as DER."""
        return [member.certificate.public_bytes(Encoding.DER) for member in self.members]

    def issue_server(self, names: Collection[str]) -> ServerCertificate:
        """Issues a certificate for the server with a new key, as :meth:`Authority.issue_server`."""
        return self.server.issue_server(names)

    def issue_client(
        self, public_key: ec.EllipticCurvePublicKey, identity: Identity, predecessor: str = ""
    ) -> ClientCertificate:
        """Issues a client certificate, as :meth:`Authority.issue_client`."""
        return self.newest.issue_client(public_key, identity, predecessor)

    def serve_newest(self) -> None:
        """Lets the newest CA sign the server's certificate from now on."""
        self.is_newest_served = True
        self.version += 1

    def add(self) -> Authority:
        """Adds a second CA, which signs from now on. Blocks.

        Raises:
            OSError: A file can't be written. Nothing has changed.
            StartError: Others could read or replace a file.
        """
        key_path = self._directory / NEXT_KEY_FILE
        key_path.unlink(missing_ok=True)
        added = create_authority(key_path, self.rules)
        replace_file(self._directory / CERTIFICATE_FILE, self.pem + added.pem, mode=0o644)
        self.is_newest_served = False
        self.members = (*self.members, added)
        self.version += 1
        return added

    def remove(self, serial: str) -> None:
        """Ends the trust in one of two CAs, and deletes its key. Blocks.

        Raises:
            OSError: A file can't be written.
        """
        (kept,) = (member for member in self.members if member.serial != serial)
        replace_file(self._directory / CERTIFICATE_FILE, kept.pem, mode=0o644)
        next_key = self._directory / NEXT_KEY_FILE
        if kept is self.newest:
            next_key.replace(self._directory / KEY_FILE)
        else:
            next_key.unlink()
        self.members = (kept,)
        self.version += 1


def open_authorities(directory: Path, rules: IssueRules = DEFAULT_RULES) -> Authorities:
    """Reads the CAs, or creates the first. Finishes a change that a crash has interrupted.

    An expired first CA beside a valid second one is retired: an operator has forgotten to do so.

    Args:
        directory: The state directory.
        rules: How the CAs issue certificates.

    Raises:
        StartError: Others can read a key or replace a file, or the files are no CA.
        OSError: A file can't be created or read.
    """
    next_path, path = directory / NEXT_KEY_FILE, directory / CERTIFICATE_FILE
    if not next_path.exists():
        return Authorities(directory, (open_authority(directory, rules),))
    next_key = load_key(next_path)
    certificates: list[x509.Certificate] = []
    try:
        certificates = x509.load_pem_x509_certificates(read_file(path, is_secret=False))
    except FileNotFoundError as error:
        raise no_authority(next_path, ValueError(f"{CERTIFICATE_FILE} is missing")) from error
    except ValueError:  # open_authority has the message
        pass
    now = datetime.datetime.now(datetime.UTC)
    has_second = len(certificates) > 1 and certificates[1].public_key() == next_key.public_key()
    is_second_valid = has_second and (
        certificates[1].not_valid_before_utc <= now < certificates[1].not_valid_after_utc
    )
    if is_second_valid and certificates[0].not_valid_after_utc < now:
        logger.warning(
            "the certificate authority %s has expired and is retired: %s remains",
            serial_text(certificates[0]),
            serial_text(certificates[1]),
        )
        replace_file(path, certificates[1].public_bytes(Encoding.PEM), mode=0o644)
        del certificates[0]
    if certificates and certificates[0].public_key() == next_key.public_key():  # the first was being retired
        next_path.replace(directory / KEY_FILE)
        return Authorities(directory, (open_authority(directory, rules),))
    first = open_authority(directory, rules)
    if not has_second:
        next_path.unlink()  # a rotation was interrupted, or undone
        return Authorities(directory, (first,))
    if not is_second_valid:
        logger.error(
            "the certificate authority %s is not valid now, and not used", serial_text(certificates[1])
        )
        return Authorities(directory, (first,))
    return Authorities(directory, (first, Authority(certificates[1], next_key, rules)))
