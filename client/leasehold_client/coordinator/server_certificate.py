"""The validity of a server's certificate, which gRPC's texts about failed handshakes leave out."""

import socket
import ssl
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from leasehold_client.contexts import span_text

CONNECT_TIMEOUT_S: Final = 2.0


def validity_text(address: str) -> str:
    """How far the certificate of a server is from its validity, such as `` 3 days ago``.

    Args:
        address: HOST:PORT. Nothing but a TLS handshake is sent there.

    Returns:
        The text, with a space before it. Empty: the server does not answer, or its certificate is valid.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent and nothing is believed but the dates
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")) as secure,
        ):
            der = secure.getpeercert(binary_form=True)
        certificate = x509.load_der_x509_certificate(der or b"")
    except (OSError, ValueError):
        return ""
    return distance_text(certificate)


def distance_text(certificate: x509.Certificate) -> str:
    """How far a certificate is from its validity, with a space before the text. Empty: it is valid."""
    now = datetime.now(UTC)
    if (late_s := (now - certificate.not_valid_after_utc).total_seconds()) > 0:
        return f" {span_text(late_s)} ago"
    if (early_s := (certificate.not_valid_before_utc - now).total_seconds()) > 0:
        return f" for another {span_text(early_s)}"
    return ""
