"""``leasehold context``: which coordinator verbs call, and with which certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec

import click

from leasehold_client.cli.exit_codes import fail
from leasehold_client.cli.verb import output_option
from leasehold_client.contexts import locked_contexts, read_contexts
from leasehold_client.display.standard_output import echo
from leasehold_client.errors import LeaseholdError

Arguments = ParamSpec("Arguments")


@click.group()
def context() -> None:
    """List, choose and delete contexts, which `leasehold login` makes."""


def _told(function: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Turns an error into one line and an exit code."""

    @wraps(function)
    def call(*positional: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            function(*positional, **named)
        except LeaseholdError as error:
            fail(error)

    return call


@context.command("list")
@output_option
@_told
def list_contexts(output: str) -> None:
    """List the contexts. A star marks the current one."""
    from leasehold_client.display.documents import echo_json
    from leasehold_client.display.tables import echo_table
    from leasehold_client.messages import seconds_text

    contexts = read_contexts()
    if output == "json":
        shown = ("name", "identity", "coordinator", "expire_s", "renew_s")
        listed = [{key: getattr(one, key) for key in shown} for one in contexts.by_name.values()]
        echo_json({"current": contexts.current, "contexts": listed})
        return
    echo_table(
        ["CURRENT", "NAME", "IDENTITY", "COORDINATOR", "EXPIRES"],
        [
            [
                "*" if one.name == contexts.current else "",
                one.name,
                one.identity,
                one.coordinator or "-",
                seconds_text(one.expire_s) if one.certificate else "-",
            ]
            for one in contexts.by_name.values()
        ],
    )


@context.command()
@click.argument("name", metavar="NAME|-")
@_told
def use(name: str) -> None:
    """Make a context the current one; - means none."""
    with locked_contexts() as write:
        contexts = read_contexts()
        if name == "-":
            write(replace(contexts, current=""))
            return
        chosen = contexts.get(name)
        chosen.require_valid()
        write(replace(contexts, current=name))
    echo(f"{name}: {chosen.identity} at {chosen.coordinator}")


@context.command()
@click.argument("name")
@_told
def delete(name: str) -> None:
    """Delete a context with its key. Its certificate stays valid until an admin revokes it."""
    with locked_contexts() as write:
        contexts = read_contexts()
        contexts.get(name)
        left = {key: one for key, one in contexts.by_name.items() if key != name}
        write(replace(contexts, by_name=left, current="" if contexts.current == name else contexts.current))
    echo(f"{name}: deleted")
