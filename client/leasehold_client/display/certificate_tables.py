"""Tables of authorities, client certificates and blocked identities."""

from collections.abc import Container, Iterable

from leasehold.v1.certificate_service_pb2 import Authority, Block, Certificate, CertificateState

from leasehold_client.display.tables import echo_table
from leasehold_client.messages import enum_name, time_text


def echo_certificates(certificates: Iterable[Certificate], blocked: Container[str]) -> None:
    """Prints a table of client certificates.

    Args:
        certificates: The certificates.
        blocked: The blocked identities.
    """
    echo_table(
        ["SERIAL", "IDENTITY", "STATE", "EXPIRES", "CALLS", "RENEWS"],
        [
            [
                one.serial,
                one.identity,
                enum_name(CertificateState.Name, one.state, "CERTIFICATE_STATE_")
                + (",blocked" if one.identity in blocked else ""),
                time_text(one.expire_time),
                str(one.call_count),
                one.predecessor or "-",
            ]
            for one in certificates
        ],
    )


def echo_authorities(authorities: Iterable[Authority]) -> None:
    """Prints a table of the coordinator's authorities."""
    echo_table(
        ["AUTHORITY", "SIGNS", "EXPIRES", "VALID", "WAITING FOR"],
        [
            [
                one.serial,
                ",".join(
                    [*(["clients"] if one.signs_clients else []), *(["server"] if one.signs_server else [])]
                )
                or "-",
                time_text(one.expire_time),
                str(one.valid_certificate_count),
                _waiting(one),
            ]
            for one in authorities
        ],
    )


def _waiting(authority: Authority) -> str:
    """The identities that do not trust the authority yet."""
    more = authority.waiting_count - len(authority.waiting)
    return ",".join([*authority.waiting, *([f"{more} more"] if more > 0 else [])]) or "-"


def echo_blocks(blocks: Iterable[Block]) -> None:
    """Prints a table of blocked identities."""
    echo_table(
        ["BLOCKED", "SINCE", "BY"],
        [[one.identity, time_text(one.block_time), one.blocked_by or "-"] for one in blocks],
    )
