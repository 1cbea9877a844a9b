"""Client certificates for tests: issued by the authority, and recorded in the store."""

import asyncio
import datetime
from pathlib import Path
from typing import NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from leasehold_coordinator.access.authority import Authority
from leasehold_coordinator.access.certificates import ClientCertificate
from leasehold_coordinator.access.identities import parse_identity
from leasehold_coordinator.server.transport import open_state
from leasehold_coordinator.storage.rows import Row, certificate_row
from leasehold_coordinator.storage.store import Store

from tests.channels import Options


class Holder(NamedTuple):
    """A client certificate with its key, as PEM, and the certificates of the authority."""

    issued: ClientCertificate
    key: bytes
    chain: bytes
    roots: bytes

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel."""
        return grpc.ssl_channel_credentials(self.roots, self.key, self.chain)

    def open_channel(self, address: str, options: Options = ()) -> grpc.Channel:
        """A channel that presents the certificate, on a connection of its own."""
        own = [("grpc.use_local_subchannel_pool", 1), *options]
        return grpc.secure_channel(address, self.credentials(), options=own)

    def write(self, directory: Path, stem: str) -> None:
        """Writes the files of a directory of credentials: ``client`` or ``worker`` is the stem."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "ca.pem").write_bytes(self.roots)
        for suffix, content in (("key", self.key), ("pem", self.chain)):
            path = directory / f"{stem}.{suffix}"
            path.touch(0o600)
            path.write_bytes(content)


def issue(
    authority: Authority, identity: str, predecessor: str = "", life: datetime.timedelta | None = None
) -> Holder:
    """Issues a certificate that no store knows."""
    key = ec.generate_private_key(ec.SECP256R1())
    issued = authority.issue_client(key.public_key(), parse_identity(identity), predecessor, life)
    chain = x509.load_der_x509_certificate(issued.der).public_bytes(serialization.Encoding.PEM)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Holder(issued, pem, chain, authority.pem)


def enrol(database: Path, state: Path, *identities: str) -> list[Holder]:
    """Issues and records certificates. No coordinator may serve the store now."""
    authority = open_state(state)[0].newest
    holders = [issue(authority, identity) for identity in identities]
    record(database, *holders)
    return holders


def record(database: Path, *holders: Holder) -> None:
    """Records certificates in a store that no coordinator serves now."""
    write_rows(database, *(certificate_row(holder.issued) for holder in holders))


def write_rows(database: Path, *rows: Row) -> None:
    """Writes to a store that no coordinator serves now."""

    async def write() -> None:
        store = Store.open(str(database))
        try:
            await store.write(*rows)
        finally:
            store.close()

    asyncio.run(write())
