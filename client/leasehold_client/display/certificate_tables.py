"""Tables of client certificates and blocked identities."""

from collections.abc import Container, Iterable

from leasehold.v1.certificate_service_pb2 import Block, Certificate, CertificateState

from leasehold_client.display.tables import echo_table
from leasehold_client.messages import enum_name, time_text


def echo_certificates(certificates: Iterable[Certificate], blocked: Container[str]) -> None:
    """Prints a table of client certificates.

    Args:
        certificates: The certificates.
        blocked: The blocked identities.
    """
    echo_table(
        ["SERIAL", "IDENTITY", "STATE", "EXPIRES", "RENEWS"],
        [
            [
                one.serial,
                one.identity,
                enum_name(CertificateState.Name, one.state, "CERTIFICATE_STATE_")
                + (",blocked" if one.identity in blocked else ""),
                time_text(one.expire_time),
                one.predecessor or "-",
            ]
            for one in certificates
        ],
    )


def echo_blocks(blocks: Iterable[Block]) -> None:
    """Prints a table of blocked identities."""
    echo_table(
        ["BLOCKED", "SINCE", "BY"],
        [[one.identity, time_text(one.block_time), one.blocked_by or "-"] for one in blocks],
    )
