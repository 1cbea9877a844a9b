"""Causes and remedies of failed TLS handshakes. gRPC reports a failure as text only."""

from pathlib import Path
from typing import Final

from leasehold_client.config import INSECURE_SCHEME, UNIX_SCHEME
from leasehold_client.errors import NO_CONNECTION

_OTHER_AUTHORITY: Final = (
    "its certificate is not from the authority in ca.pem: another coordinator listens there, or its keys "
    "were made anew; join again with a token of `leasehold token create --replace`, or, for a coordinator on "
    "loopback, copy ca.pem and the token from its state directory, and name their directory with "
    "LEASEHOLD_CREDENTIALS"
)
_CAUSES: Final = {
    "unable to get local issuer certificate": _OTHER_AUTHORITY,
    "self signed certificate": _OTHER_AUTHORITY,
    "certificate has expired": (
        "its certificate has expired{when}, or this host's clock is ahead: compare both clocks, and restart "
        "the coordinator"
    ),
    "certificate is not yet valid": (
        "its certificate is not valid yet{when}: this host's clock is behind, or the coordinator's was ahead "
        "at its start; compare both clocks"
    ),
    "Hostname Verification Check failed": (
        "its certificate does not name that host: use the address of --listen, the host's name, or a name "
        "of the coordinator's setting server_names"
    ),
    "WRONG_VERSION_NUMBER": (
        "the server does not speak TLS: correct the port, or write --coordinator insecure:{address} if the "
        "coordinator runs with --insecure"
    ),
}
_CLOSED: Final = ("Socket closed", "Connection reset by peer")
"""gRPC's texts if a server with TLS ends a connection without TLS or without a certificate."""


def explain(details: str, address: str) -> str | None:
    """A sentence about a failed handshake. Blocks for up to 4 s if dates are wrong.

    Args:
        details: gRPC's text about a failed call.
        address: HOST:PORT of the call.

    Returns:
        What happened, why, and what to do. None: the text is about something else.
    """
    if not details.startswith(NO_CONNECTION):
        return None  # a coordinator answered, perhaps with a text of its own
    for text, cause in _CAUSES.items():
        if text in details:
            when = _validity(address) if "{when}" in cause else ""
            return f"TLS with {address} failed: {cause.format(address=address, when=when)}"
    return None


def _validity(address: str) -> str:
    from leasehold_client.coordinator.server_certificate import validity_text  # late: imports cryptography

    return validity_text(address)


def _problem(certificate: Path) -> str | None:
    from leasehold_client.coordinator.own_certificate import certificate_problem  # late: imports cryptography

    return certificate_problem(certificate)


def explain_closed(details: str, address: str, certificate: Path | None) -> str | None:
    """A sentence about a connection that the server ended during the handshake.

    Args:
        details: gRPC's text about a failed call.
        address: The address of the call.
        certificate: The file with the client's certificate. None: the client has presented none of a file.

    Returns:
        What happened, why, and what to do. None: the text is about something else.
    """
    if not details.startswith(NO_CONNECTION) or not any(text in details for text in _CLOSED):
        return None
    if address.startswith(UNIX_SCHEME):
        return None
    if not address.startswith(INSECURE_SCHEME):
        if certificate is not None and (problem := _problem(certificate)) is not None:
            return f"{address} ended the TLS handshake: {problem}"
        return (
            f"{address} ended the TLS handshake, as a coordinator does that requires a client certificate of "
            "its own authority: on the coordinator's host, leave out --coordinator and LEASEHOLD_COORDINATOR "
            "so that its socket is used, or name its socket by --coordinator unix:PATH; elsewhere, "
            "`leasehold login --token -` with a token of `leasehold token create --user NAME` gets one, "
            "unless the coordinator was just stopped"
        )
    secure = address.removeprefix(INSECURE_SCHEME)
    return (
        f"{secure} ended a connection without TLS, as a coordinator does that has TLS: write --coordinator "
        f"{secure}"
    )
