"""Causes and remedies of failed TLS handshakes. gRPC reports a failure as text only."""

from typing import Final

_NO_CONNECTION: Final = "failed to connect to all addresses"
"""How gRPC's texts about failed connections begin."""

_OTHER_AUTHORITY: Final = (
    "its certificate is not from the authority in ca.pem: another coordinator listens there, or its keys "
    "were made anew; copy ca.pem and the token from its state directory"
)
_CAUSES: Final = {
    "unable to get local issuer certificate": _OTHER_AUTHORITY,
    "self signed certificate": _OTHER_AUTHORITY,
    "certificate has expired": (
        "its certificate has expired, or this host's clock is ahead: compare both clocks, and restart the "
        "coordinator"
    ),
    "certificate is not yet valid": (
        "its certificate is not valid yet: this host's clock is behind, or the coordinator's was ahead at "
        "its start; compare both clocks"
    ),
    "Hostname Verification Check failed": (
        "its certificate does not name that host: use the address of --listen, the host's name, or a name "
        "of the coordinator's setting server_names"
    ),
    "WRONG_VERSION_NUMBER": "what listens there does not speak TLS: correct the port",
}


def explain(details: str, address: str) -> str | None:
    """A sentence about a failed handshake.

    Args:
        details: gRPC's text about a failed call.
        address: HOST:PORT of the call.

    Returns:
        What happened, why, and what to do. None: the text is about something else.
    """
    if not details.startswith(_NO_CONNECTION):
        return None  # a coordinator answered, perhaps with a text of its own
    for text, cause in _CAUSES.items():
        if text in details:
            return f"TLS with {address} failed: {cause}"
    return None
