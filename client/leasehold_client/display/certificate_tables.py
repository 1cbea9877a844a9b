"""Tables of authorities, client certificates and blocked identities."""

from collections.abc import Container, Sequence
from typing import Final

from leasehold.v1.certificate_service_pb2 import Authority, Block, Certificate, CertificateState

from leasehold_client.display.tables import Column
from leasehold_client.messages import age_text, ago_text, enum_name


def certificate_columns(blocked: Container[str]) -> Sequence[Column[Certificate]]:
    """Columns of client certificates.

    Args:
        blocked: The blocked identities.
    """

    def state(one: Certificate) -> str:
        text = enum_name(CertificateState.Name, one.state, "CERTIFICATE_STATE_")
        return f"{text},blocked" if one.identity in blocked else text

    return (
        Column("SERIAL", lambda one: one.serial),
        Column("IDENTITY", lambda one: one.identity, shrinks=True),
        Column("STATE", state),
        Column("EXPIRES", lambda one: ago_text(one.expire_time)),
        Column("CALLS", lambda one: str(one.call_count), drop=2),
        Column("RENEWS", lambda one: one.predecessor or "-", drop=1),
    )


AUTHORITY_COLUMNS: Final[Sequence[Column[Authority]]] = (
    Column("AUTHORITY", lambda one: one.serial),
    Column("SIGNS", lambda one: _signs(one)),
    Column("EXPIRES", lambda one: ago_text(one.expire_time)),
    Column("VALID", lambda one: str(one.valid_certificate_count), drop=1),
    Column("WAITING FOR", lambda one: _waiting(one), shrinks=True),
)


def _signs(authority: Authority) -> str:
    """The kinds of certificates that the authority signs at present."""
    signed = [
        *(["clients"] if authority.signs_clients else []),
        *(["server"] if authority.signs_server else []),
    ]
    return ",".join(signed) or "-"


def _waiting(authority: Authority) -> str:
    """The identities that do not trust the authority yet."""
    more = authority.waiting_count - len(authority.waiting)
    return ",".join([*authority.waiting, *([f"{more} more"] if more > 0 else [])]) or "-"


BLOCK_COLUMNS: Final[Sequence[Column[Block]]] = (
    Column("BLOCKED", lambda one: one.identity, shrinks=True),
    Column("SINCE", lambda one: age_text(one.block_time)),
    Column("BY", lambda one: one.blocked_by or "-", drop=1),
)
