"""``leasehold ca``: client certificates, blocked identities, and the coordinator's authorities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.verb import output_option, verb
from leasehold_client.display.standard_output import echo

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.group()
def ca() -> None:
    """List and revoke client certificates, block identities, and rotate the authority."""


@ca.command("list", epilog=examples("leasehold ca list", "leasehold ca list --all"))
@click.option(
    "--all",
    "include_ended",
    is_flag=True,
    help="Also certificates that are not valid: expired, revoked, or of a retired authority.",
)
@output_option
@verb
def list_certificates(client: Client, include_ended: bool, output: str) -> None:
    """List the authorities, the client certificates, and the blocked identities."""
    authorities = client.certificates.authorities()
    certificates = client.certificates.all(include_ended=include_ended)
    blocks = client.certificates.blocks()
    if output != "table":
        from leasehold_client.display.documents import echo_document, to_dict

        echo_document(
            {
                "authorities": [to_dict(one) for one in authorities],
                "certificates": [to_dict(one) for one in certificates],
                "blocks": [to_dict(one) for one in blocks],
            },
            output,
        )
        return
    from leasehold_client.display import certificate_tables
    from leasehold_client.display.tables import echo_table

    echo_table(certificate_tables.AUTHORITY_COLUMNS, authorities)
    echo("")
    columns = certificate_tables.certificate_columns({one.identity for one in blocks})
    echo_table(columns, certificates)
    if blocks:
        echo("")
        echo_table(certificate_tables.BLOCK_COLUMNS, blocks)


@ca.command("revoke", epilog=examples("leasehold ca revoke user/alice"))
@click.argument("subject", metavar="SERIAL|NAME")
@verb
def revoke(client: Client, subject: str) -> None:
    """Revoke a certificate, or block an identity. Its calls and sessions end within seconds.

    SERIAL is the serial number of a certificate. All certificates that descend from it by renewal are revoked
    too. NAME is an identity such as user/alice or worker/gpu-07, which is blocked with each credential until
    `leasehold ca unblock`.
    """
    if "/" in subject:
        echo(f"{client.certificates.block(subject).identity}: blocked")
        return
    for serial in client.certificates.revoke(subject):
        echo(f"{serial}: revoked")


@ca.command("unblock", epilog=examples("leasehold ca unblock user/alice"))
@click.argument("identity", metavar="NAME")
@verb
def unblock(client: Client, identity: str) -> None:
    """Let a blocked identity call again. Its revoked certificates stay revoked.

    An unblocked worker with a valid certificate connects within a minute. If the CA was rotated while an
    identity was blocked, the identity has to join again.
    """
    client.certificates.unblock(identity)
    kind, _, name = identity.partition("/")
    until = ""
    if kind == "worker":
        until = (
            "; the worker connects within a minute if its certificate is valid (`leasehold ca list`) and the "
            "CA was not rotated meanwhile; else let it join with "
            f"`leasehold token create --worker {name} --replace`"
        )
    echo(f"{identity}: unblocked{until}")


@ca.command("rotate", epilog=examples("leasehold ca rotate"))
@verb
def rotate(client: Client) -> None:
    """Add a second authority, which signs client certificates from now on.

    Both authorities are trusted, and no session ends. Renewals and sessions of workers deliver both. Once
    each holder of a certificate has both, the new one signs the server's certificate. `leasehold ca list`
    names the holders that are behind. `leasehold ca revoke` ends the wait for one of them, and otherwise it
    ends with their certificates. After that, and after the last certificate of the old one has expired,
    `leasehold ca retire SERIAL` ends the trust in the old one.
    """
    added = client.certificates.rotate()
    echo(f"{added.serial}: added; it signs from now on")


@ca.command("retire", epilog=examples("leasehold ca retire 5c1e0f7a"))
@click.argument("serial", metavar="SERIAL")
@click.option("--force", is_flag=True, help="Also if valid certificates are left. Their holders are refused.")
@verb
def retire(client: Client, serial: str, force: bool) -> None:
    """End the trust in one of two authorities, and delete its key."""
    client.certificates.retire(serial, force=force)
    echo(f"{serial}: retired")
