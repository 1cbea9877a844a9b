"""``leasehold access``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.verb import output_option, verb
from leasehold_client.display.standard_output import echo
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.access_service_pb2 import RoleBinding

    from leasehold_client.coordinator.client import Client

ROLES: Final = ("viewer", "user", "operator", "admin", "on_behalf_of")

_role_argument = click.argument("role", type=click.Choice(ROLES), metavar="ROLE")
_identity_argument = click.argument("identity", metavar="IDENTITY")
_users_option = click.option(
    "--users",
    default="",
    metavar="PATTERN",
    help="For on_behalf_of: the users for whom the service may act, such as 'user/*'.",
)


@click.group()
def access() -> None:
    """Give roles to users and services, and take them away."""


@access.command(
    epilog=examples(
        "leasehold access grant user user/alice",
        "leasehold access grant on_behalf_of service/batch --users 'user/*'",
    )
)
@_role_argument
@_identity_argument
@_users_option
@output_option
@verb
def grant(client: Client, role: str, identity: str, users: str, output: str) -> None:
    """Give a role to an identity. The role is effective at once.

    ROLE is viewer, user, operator, admin or on_behalf_of. IDENTITY is local/LOGIN for a Unix user of the
    coordinator's host, user/NAME or service/NAME.
    """
    from leasehold_client.display.documents import echo_message

    _require_fitting_users(role, users)
    binding = client.grant(role, identity, users=users)
    if output != "table":
        echo_message(binding, output)
    else:
        echo(f"{_text(binding)}: granted by {binding.granted_by}")


@access.command(epilog=examples("leasehold access revoke user user/alice"))
@_role_argument
@_identity_argument
@_users_option
@verb
def revoke(client: Client, role: str, identity: str, users: str) -> None:
    """Take a role from an identity. Its watches end at once if they are no longer permitted."""
    _require_fitting_users(role, users)
    client.revoke(role, identity, users=users)
    echo(f"{identity} {role}{f' for {users}' if users else ''}: revoked")


@access.command(name="list", epilog=examples("leasehold access list"))
@output_option
@verb
def list_bindings(client: Client, output: str) -> None:
    """List all role bindings. root and the coordinator's Unix user are admins without one."""
    from leasehold_client.display.documents import echo_document, to_dict
    from leasehold_client.display.record_tables import BINDING_COLUMNS
    from leasehold_client.display.tables import echo_table

    bindings = client.bindings()
    if output != "table":
        echo_document({"bindings": [to_dict(binding) for binding in bindings]}, output)
    else:
        echo_table(BINDING_COLUMNS, bindings)


def _require_fitting_users(role: str, users: str) -> None:
    """Refuses on_behalf_of without a pattern of users, and a pattern with another role."""
    if role == "on_behalf_of" and not users:
        raise UsageError(
            "on_behalf_of needs the users for whom the service acts: add --users PATTERN, such as "
            "--users 'user/*'"
        )
    if role != "on_behalf_of" and users:
        raise UsageError(f"--users is only for the role on_behalf_of, and not for {role}: leave it out")


def _text(binding: RoleBinding) -> str:
    from leasehold_client.display.record_tables import role_text

    return f"{binding.identity} {role_text(binding)}"
