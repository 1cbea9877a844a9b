"""The TLS of servers of the standard library that ask for client certificates."""

import os
import ssl
from typing import Final

FILE_NAME: Final = "leasehold-server-certificate"


def mutual_context(
    key: bytes, chain: bytes, client_ca: bytes, verify_mode: ssl.VerifyMode = ssl.CERT_REQUIRED
) -> ssl.SSLContext:
    """A context of a server that asks for client certificates.

    Args:
        key: The server's private key, as PEM.
        chain: The server's certificate and intermediate certificates, as PEM.
        client_ca: The authorities of clients, as PEM.
        verify_mode: Whether a connection without a client certificate is refused.

    Raises:
        OSError: OpenSSL refuses the certificate, such as an RSA key of 1,024 bits. Or no file can be opened.
        ValueError: The certificate of an authority is invalid.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection presents its certificate
    # The standard library reads a key from a file only. This one is in memory, and has no path for others.
    descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
    try:
        os.write(descriptor, key + b"\n" + chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    # Text between certificates may be of any encoding. The standard library accepts ASCII only.
    context.load_verify_locations(cadata=client_ca.decode("ascii", "ignore"))
    context.verify_mode = verify_mode
    return context
