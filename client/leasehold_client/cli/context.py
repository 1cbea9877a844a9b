"""``leasehold context``: which coordinator verbs call, and with which certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import fail
from leasehold_client.cli.names import complete_contexts
from leasehold_client.cli.parameter_types import GivenPath, not_empty
from leasehold_client.cli.verb import output_option, warn_of_settings
from leasehold_client.contexts import Context, locked_contexts, read_contexts, span_text
from leasehold_client.display.standard_output import echo_done
from leasehold_client.errors import LeaseholdError, UsageError
from leasehold_client.private_files import replace_file

Arguments = ParamSpec("Arguments")


@click.group()
def context() -> None:
    """List, choose, export and delete contexts, which `leasehold login` makes."""


def _told(function: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Turns an error into one line and an exit code."""

    @wraps(function)
    def call(*positional: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            function(*positional, **named)
        except LeaseholdError as error:
            fail(error)

    return call


@context.command("list", epilog=examples("leasehold context list"))
@output_option
@_told
def list_contexts(output: str) -> None:
    """List the contexts. A star marks the current one."""
    from google.protobuf.timestamp_pb2 import Timestamp

    from leasehold_client.display.documents import echo_document
    from leasehold_client.display.tables import Column, echo_table
    from leasehold_client.messages import ago_text

    contexts = read_contexts()
    warn_of_settings(contexts.current)
    if output != "table":
        shown = ("name", "identity", "coordinator", "expire_s", "renew_s")
        listed = [{key: getattr(one, key) for key in shown} for one in contexts.by_name.values()]
        echo_document({"current": contexts.current, "contexts": listed}, output)
        return

    def expiry(one: Context) -> str:
        return ago_text(Timestamp(seconds=int(one.expire_s))) if one.certificate else "-"

    columns: Sequence[Column[Context]] = (
        Column("CURRENT", lambda one: "*" if one.name == contexts.current else ""),
        Column("NAME", lambda one: one.name, shrinks=True),
        Column("IDENTITY", lambda one: one.identity, shrinks=True),
        Column("COORDINATOR", lambda one: one.coordinator or "-", drop=1, shrinks=True),
        Column("EXPIRES", expiry),
    )
    echo_table(columns, contexts.by_name.values())


@context.command(epilog=examples("leasehold context use alice", "leasehold context use -"))
@click.argument("name", metavar="NAME|-", callback=not_empty, shell_complete=complete_contexts)
@_told
def use(name: str) -> None:
    """Make a context the current one; - means none."""
    with locked_contexts() as write:
        contexts = read_contexts()
        if name == "-":
            write(replace(contexts, current=""))
            echo_done("no context is current")
            warn_of_settings("")
            return
        chosen = contexts.get(name)
        chosen.require_valid()
        write(replace(contexts, current=name))
    echo_done(f"{name}: {chosen.identity} at {chosen.coordinator}")
    warn_of_settings(name)


@context.command(epilog=examples("leasehold context export prometheus /etc/prometheus/leasehold"))
@click.argument("name", shell_complete=complete_contexts)
@click.argument("directory", type=GivenPath(file_okay=False, path_type=Path))
@_told
def export(name: str, directory: Path) -> None:
    """Write certificate, key and authorities to PEM files, for a program that is no client of Leasehold.

    A certificate that is due is renewed first. Nothing renews the files: run the verb each day.
    """
    from leasehold_client.coordinator.renewing_channel import RenewedContext, context_credentials

    RenewedContext(read_contexts().get(name)).present()
    with locked_contexts():  # another export waits
        chosen = read_contexts().get(name)
        context_credentials(chosen)  # refuses damaged ones
        parts = {"ca.pem": chosen.authorities, "client.key": chosen.key, "client.pem": chosen.certificate}
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            for file, text in parts.items():
                replace_file(directory / file, text.encode())
        except OSError as error:
            raise UsageError(
                f"PEM files can't be written to {directory}: {error.strerror}; name a directory of yours"
            ) from error
    expiry = span_text(chosen.expire_s - time.time())
    echo_done(f"{name}: wrote {', '.join(parts)} to {directory}; the certificate expires in {expiry}")


@context.command(epilog=examples("leasehold context delete alice"))
@click.argument("name", shell_complete=complete_contexts)
@_told
def delete(name: str) -> None:
    """Delete a context with its key. Its certificate stays valid until an admin revokes it."""
    with locked_contexts() as write:
        contexts = read_contexts()
        contexts.get(name)
        left = {key: one for key, one in contexts.by_name.items() if key != name}
        was_current = contexts.current == name
        write(replace(contexts, by_name=left, current="" if was_current else contexts.current))
    echo_done(f"{name}: deleted{'; no context is current now' if was_current else ''}")
