"""``leasehold install`` and ``leasehold uninstall``: the daemons as services of systemd."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import fail
from leasehold_client.cli.names import complete_files
from leasehold_client.cli.parameter_types import not_empty
from leasehold_client.config import read_settings_file
from leasehold_client.display.standard_output import echo, echo_lines
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from leasehold_client.installation.services import Service
    from leasehold_client.installation.steps import Step

TOKEN_LIMIT: Final = 65_536
JOURNAL_TIMEOUT_S: Final = 60.0
JOURNAL_LIMIT_BYTES: Final = 16 << 20

_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")

_dry_run = click.option("--dry-run", is_flag=True, help="Print the steps and the unit, and do nothing.")
_user = click.option(
    "--user",
    callback=not_empty,
    metavar="USER",
    help="Unix user of the daemon, which is created if missing. An installed unit keeps its own user.",
)
_purge = click.option(
    "--purge",
    is_flag=True,
    help="Remove settings, state, keys and the Unix user too. Nothing brings them back.",
)


@click.group()
def install() -> None:
    """Install the coordinator or the worker as a service of systemd.

    The steps are the Unix user, the settings, the unit and the start, now and at each boot.

    The service runs the program with which it is installed. An installation may be repeated, such as after
    an upgrade: settings and state are kept.
    """


@install.command(
    "coordinator", epilog=examples("leasehold install coordinator --listen 0.0.0.0:7400 --dry-run")
)
@click.option("--listen", metavar="HOST:PORT", help="Address for clients, in new settings.")
@click.option("--worker-listen", metavar="HOST:PORT", help="Address for workers, in new settings.")
@_user
@_dry_run
def install_coordinator(
    listen: str | None, worker_listen: str | None, user: str | None, dry_run: bool
) -> None:
    """Install the coordinator."""
    _install("coordinator", user, {"listen": listen, "worker_listen": worker_listen}, None, dry_run=dry_run)


@install.command("worker", epilog=examples("leasehold install worker --join-file gpu-07.token"))
@click.option(
    "--join-file",
    callback=not_empty,
    shell_complete=complete_files,
    metavar="FILE",
    help="Join by the token in this file; - reads it from standard input.",
)
@click.option(
    "--run-as", metavar="USER|same-name", help="Unix user of workloads, or those of their owners' names."
)
@_user
@_dry_run
def install_worker(join_file: str | None, run_as: str | None, user: str | None, dry_run: bool) -> None:
    """Install the worker."""
    _install("worker", user, {"run_as": run_as}, join_file, dry_run=dry_run)


@click.command(epilog=examples("leasehold uninstall worker --dry-run"))
@click.argument("name", type=click.Choice(["coordinator", "worker"]))
@_user
@_purge
@_dry_run
def uninstall(name: str, user: str | None, purge: bool, dry_run: bool) -> None:
    """Remove the service of the coordinator or the worker.

    Settings, state and the Unix user stay, unless --purge is given.

    Workloads of a worker run on. With --purge, a worker with workloads that have not ended is kept. A
    coordinator with the state of such a worker in its state directory is kept too.
    """
    from leasehold_client.installation.steps import Step, kept, uninstall_steps

    try:
        service = _service(name, user)
        steps = uninstall_steps(service, purge=purge)
        if purge and name == "worker":
            look = partial(_require_no_workloads, _state_directory(service))
            steps[:0] = [Step("look for workloads in the worker's journal", look)] if steps else []
        if purge and name == "coordinator" and service.state_directory.exists():
            look = partial(_require_no_inner_workloads, service.state_directory)
            steps.insert(0, Step(f"look for workloads of a worker in {service.state_directory}", look))
        _carry_out(steps, dry_run=dry_run)
    except LeaseholdError as error:
        fail(error)
    if not purge and (left := kept(service)):
        echo(f"kept: {', '.join(left)} (--purge removes them)")


def _install(
    name: str, user: str | None, settings: dict[str, str | None], join_file: str | None, *, dry_run: bool
) -> None:
    from leasehold_client.installation.program import service_program, unit_template
    from leasehold_client.installation.services import unit_text
    from leasehold_client.installation.steps import install_steps

    try:
        service = _service(name, user)
        chosen = {key: _printable(key, value) for key, value in settings.items() if value is not None}
        token = _token(join_file) if join_file is not None else None
        program = service_program()
        unit = unit_text(unit_template(service.unit), program, service.user)
        steps = install_steps(service, program, unit, chosen, token)
        _carry_out(steps, dry_run=dry_run)
    except LeaseholdError as error:
        fail(error)
    if dry_run:
        echo_lines(f"\n{service.unit_path}:\n{unit.rstrip()}")


def _service(name: str, user: str | None) -> Service:
    from leasehold_client.installation.services import DEFAULT_USERS, Service
    from leasehold_client.installation.steps import installed_user

    user = user or installed_user(Service(name, "").unit_path)
    if user is not None and (not _USER.fullmatch(user) or user == "root"):
        raise UsageError(f"{user!r} is no user for a daemon: give the name of a Unix user other than root")
    return Service(name, user or DEFAULT_USERS[name])


def _printable(key: str, value: str) -> str:
    if not value.isprintable() or not value:
        raise UsageError(f"--{key.replace('_', '-')} {value!r} is no value: leave it out, or give one")
    return value


def _token(join_file: str) -> str:
    try:
        if join_file == "-":
            return sys.stdin.buffer.readline(TOKEN_LIMIT).decode("ascii", "replace")
        descriptor = os.open(join_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="ascii", errors="replace") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(
                    f"{join_file} is not a regular file: write the join token into one, or use "
                    "`--join-file -`"
                )
            return file.read(TOKEN_LIMIT)
    except OSError as error:
        raise UsageError(f"the join token in {join_file} can't be read: {error.strerror}") from error


def _carry_out(steps: Sequence[Step], *, dry_run: bool) -> None:
    from leasehold_client.installation.steps import do_all, require_host

    if dry_run:
        for step in steps:
            echo(f"would {step.text}")
    else:
        require_host()
        do_all(steps, echo)
    if not steps:
        echo("there is nothing to do")


def _state_directory(service: Service) -> Path:
    """The state directory in the settings of a service, or else its own."""
    try:
        found = tomllib.loads(read_settings_file(service.settings_path).decode()).get("state_dir")
    except FileNotFoundError:
        found = None
    except (OSError, ValueError, RecursionError) as error:
        raise LeaseholdError(
            f"{service.settings_path} can't be read, so the worker's state directory is unknown: repair it"
        ) from error
    return Path(found) if isinstance(found, str) and found else service.state_directory


def _require_no_inner_workloads(state_directory: Path) -> None:
    """Refuses a purge of a coordinator while its directory has the state of a worker with workloads.

    By default, the state directory of a user's worker is inside that of the user's coordinator.

    Raises:
        LeaseholdError: A workload has not ended, or a journal can't be read.
    """
    for folder in sorted({path.parent for path in state_directory.rglob("journal.sqlite3*")}):
        _require_no_workloads(folder)


def _require_no_workloads(state_directory: Path) -> None:
    """Refuses a purge while a worker's journal has workloads: only its state leads to suspended ones.

    Processes of ``exec``, claimed and adopted ones are in no control group of the unit, and stopped and
    checkpointed workloads have no process.

    Raises:
        LeaseholdError: A workload has not ended, or the journal can't be read.
    """
    if not any(state_directory.glob("journal.sqlite3*")):
        return  # the worker has never served
    from leasehold.v1.workload_pb2 import WorkloadState

    from leasehold_client.coordinator.workload_watch import ENDED
    from leasehold_client.support.bounded_run import run_bounded

    module = "leasehold_worker.diagnostics.journal_summary"
    command = [sys.executable, "-P", "-m", module, str(state_directory)]
    try:
        _, output = run_bounded(command, JOURNAL_TIMEOUT_S, JOURNAL_LIMIT_BYTES, owner_of=state_directory)
        known = json.loads(output)["workloads"]
        found = [one["workload_id"] for one in known if WorkloadState.Value(one["state"]) not in ENDED]
    except (LeaseholdError, OSError, ValueError) as error:
        raise LeaseholdError(
            f"the worker's journal in {state_directory} was not read, so its workloads are unknown "
            f"({error}): use the `leasehold` that runs the worker, repair the journal, or, if no workload is "
            "left, remove the directory"
        ) from error
    if found:
        raise LeaseholdError(
            f"{len(found)} workloads of the worker have not ended, such as {found[0]}: end them by "
            "`leasehold stop` or `leasehold release` (an uninstalled worker must be installed again for "
            "that), or leave out --purge"
        )
