"""The versions of TLS that the coordinator speaks: 1.3 and no other."""

import os
from typing import Final

CIPHER_VARIABLE: Final = "GRPC_SSL_CIPHER_SUITES"
NO_TLS_1_2: Final = "ECDHE-PSK-AES128-CBC-SHA"
"""A cipher suite of TLS 1.2 that needs a pre-shared key, which nobody has. gRPC's Python API has no minimum
version (grpc/grpc#37305), and this setting does not affect the suites of TLS 1.3."""


def require_tls_1_3() -> None:
    """Sets the cipher suites of this process. gRPC reads them when it is imported, so this comes first."""
    os.environ[CIPHER_VARIABLE] = NO_TLS_1_2
