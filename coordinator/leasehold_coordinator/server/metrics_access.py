"""Access to metrics off loopback, for users and services with a client certificate and a role."""

import ssl
from collections.abc import Callable
from typing import Final, final

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.peer_certificates import parse_peer_certificate
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.fleet.client_certificates import ClientCertificates

KINDS: Final = (Kind.USER, Kind.SERVICE)


@final
class MetricsAccess:
    """Decides about connections whose certificate TLS has verified.

    Args:
        certificates: The client certificates.
        role: The role of an identity, by its bindings.
    """

    def __init__(self, certificates: ClientCertificates, role: Callable[[Identity], Role]) -> None:
        self._certificates = certificates
        self._role = role

    def refusal(self, der: bytes, address: str) -> str | None:
        """Why a connection is refused. None: it is not.

        Args:
            der: The certificate that the connection presents.
            address: The host of the peer.
        """
        pem = ssl.DER_cert_to_PEM_cert(der).encode()
        try:
            found = parse_peer_certificate(pem, self._certificates.trust_domain)
        except ValueError as error:
            return str(error)
        if found.identity.kind not in KINDS:
            return f"the certificate is of {found.identity}, and metrics are for users and services"
        if self._certificates.find(pem, found) is None and not self._certificates.is_external:
            return f"the coordinator's store does not know certificate {found.serial} of {found.identity}"
        refused = self._certificates.refusal(
            Caller(found.identity, address, serial=found.serial, expire_time=found.not_after)
        )
        if refused is not None:
            return refused.message
        if self._role(found.identity) < Role.VIEWER:
            return (
                f"{found.identity} has no role: ask an admin for `leasehold access grant viewer "
                f"{found.identity}`"
            )
        return None
