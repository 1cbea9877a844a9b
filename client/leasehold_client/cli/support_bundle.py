"""``leasehold support-bundle``: one archive for a bug report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import click

from leasehold_client import interrupts
from leasehold_client.byte_sizes import size_text
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import EXIT_FAILED, fail, interrupted
from leasehold_client.cli.parameter_types import GivenPath, Seconds, refuse_empty
from leasehold_client.cli.verb import context_option, coordinator_option
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, UsageError

TIMEOUT_S: Final = 30.0


@click.command(name="support-bundle", epilog=examples("leasehold support-bundle bug.tar.gz"))
@click.argument("file", type=GivenPath(path_type=Path))
@click.option("--dry-run", is_flag=True, help="List the members, and write nothing.")
@click.option("--yes", is_flag=True, help="Write without a question.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=Seconds(0.001, 600),
    default=TIMEOUT_S,
    show_default=True,
    help="Timeout of each part.",
)
@coordinator_option
@context_option
def support_bundle(
    file: Path, dry_run: bool, yes: bool, timeout_s: float, coordinator: str | None, context: str | None
) -> None:
    """Write an archive for a bug report to FILE, a new file that only you may read.

    The archive has versions, settings, findings of `leasehold doctor`, logs, summaries of the worker's
    journal and the coordinator's store, and lists of the fleet. It has no environment variables, keys and
    labels, and no programs of workloads. All members are listed before the archive is written.

    Run it as root on a host with a service. A part that fails or hangs is noted in the archive.
    """
    interrupts.raise_in_call()
    refuse_empty(click.get_current_context())
    try:
        _write(file, coordinator, context, timeout_s, dry_run=dry_run, yes=yes)
    except LeaseholdError as error:
        fail(error)
    except KeyboardInterrupt:
        interrupted("nothing was written")


def _write(
    file: Path, coordinator: str | None, context: str | None, timeout_s: float, *, dry_run: bool, yes: bool
) -> None:
    from leasehold_client.support.archive import with_manifest, write_archive
    from leasehold_client.support.fleet_parts import fleet_parts
    from leasehold_client.support.host_parts import host_parts
    from leasehold_client.support.members import collect

    if not dry_run:
        if os.path.lexists(file):
            raise UsageError(f"{file} exists, and is kept: name a new file")
        if not os.access(file.parent, os.W_OK):
            why = "may not be written by this user" if file.parent.is_dir() else "is no directory"
            raise UsageError(f"{file} can't be written: {file.parent} {why}; name another file")
        if not yes and not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask whether to write: give --yes, or --dry-run")
    bundle = collect([*host_parts(timeout_s), *fleet_parts(coordinator, context)], timeout_s)
    members = with_manifest(bundle)
    for member in members:
        echo(f"{member.name:<24}  {size_text(len(member.content)):>10}  {member.what}")
    for name, why in bundle.notes.items():
        echo(f"{name:<24}  {'missing':>10}  {why}")
    if dry_run:
        return
    if not yes and not click.confirm(f"Write {file}?", err=True):
        echo_error("leasehold: nothing was written")
        sys.exit(EXIT_FAILED)
    try:
        size = write_archive(file, members)
    except OSError as error:
        raise LeaseholdError(f"{file} can't be written: {error.strerror}; name another file") from error
    echo(f"{file}: {len(members)} members, {size_text(size)}; read it before you send it")
