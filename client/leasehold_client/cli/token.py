"""``leasehold token``: join tokens of workers, users and services."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.parameter_types import Number, Seconds, SingleOption
from leasehold_client.cli.verb import WEEK_S, output_option, verb
from leasehold_client.display.standard_output import echo
from leasehold_client.errors import LeaseholdError, OutputError, UsageError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client


@click.group()
def token() -> None:
    """Create, list and delete join tokens of workers, users and services."""


@token.command(
    "create",
    epilog=examples(
        "leasehold token create --worker gpu-07 > gpu-07.token",
        "leasehold token create --worker 'gpu-*' --uses 16 --ttl 30m > gpus.token",
        "leasehold token create --user alice",
    ),
)
@click.option(
    "--worker",
    cls=SingleOption,
    metavar="NAME",
    help="For the worker NAME. A pattern such as 'gpu-*' is for several.",
)
@click.option("--user", cls=SingleOption, metavar="NAME", help="For the user NAME.")
@click.option(
    "--service", cls=SingleOption, metavar="NAME", help="For the program NAME, such as a batch system."
)
@click.option(
    "--ttl",
    "ttl_s",
    type=Seconds(1, WEEK_S),
    default=3600,
    metavar="SECONDS",
    help="Time until the token expires, such as 30m.  [default: 1h]",
)
@click.option(
    "--uses",
    type=Number(1, 256),
    default=1,
    show_default=True,
    help="Joins by a token for a pattern.",
)
@click.option("--replace", is_flag=True, help="NAME may join again, and its older certificates are revoked.")
@output_option
@verb
def create(
    client: Client,
    worker: str | None,
    user: str | None,
    service: str | None,
    ttl_s: float,
    uses: int,
    replace: bool,
    output: str,
) -> None:
    """Create a join token, and print it.

    The printed word is a secret. Whoever has it can join once, under NAME. Give it to `leasehold worker
    --join -` or to `leasehold login --token -` on standard input.
    """
    given = {"worker": worker, "user": user, "service": service}
    named = [f"{kind}/{name}" for kind, name in given.items() if name is not None]
    if len(named) != 1:
        raise UsageError("name one identity: give one of --worker, --user and --service")
    created = client.enrolment.create_join_token(named[0], ttl_s=ttl_s, uses=uses, replace=replace)
    try:
        if output != "table":
            from leasehold_client.display.documents import echo_message

            is_read = echo_message(created, output)
        else:
            is_read = echo(created.ticket)
        if not is_read:
            raise OutputError("can't write the output: the pipe is closed")
    except OutputError as error:
        token_id = created.join_token.join_token_id
        raise LeaseholdError(
            f"{error.message}; the join token {token_id} was created, and its secret is not known any more: "
            f"delete it by `leasehold token delete {token_id}`, and create another one"
        ) from error


@token.command("list", epilog=examples("leasehold token list"))
@output_option
@verb
def list_tokens(client: Client, output: str) -> None:
    """List the join tokens that have not expired. Their secrets are not known any more."""
    tokens = client.enrolment.join_tokens()
    if output != "table":
        from leasehold_client.display.documents import echo_document, to_dict

        echo_document({"join_tokens": [to_dict(one) for one in tokens]}, output)
        return
    from leasehold_client.display.record_tables import JOIN_TOKEN_COLUMNS
    from leasehold_client.display.tables import echo_table

    echo_table(JOIN_TOKEN_COLUMNS, tokens)


@token.command("delete", epilog=examples("leasehold token delete t-5c1e0f"))
@click.argument("join_token_id", metavar="ID")
@output_option
@verb
def delete(client: Client, join_token_id: str, output: str) -> None:
    """Delete a join token. Certificates that were issued for it stay valid."""
    deleted = client.enrolment.delete_join_token(join_token_id)
    if output != "table":
        from leasehold_client.display.documents import echo_message

        echo_message(deleted, output)
    else:
        echo(f"{deleted.join_token_id}: deleted")
