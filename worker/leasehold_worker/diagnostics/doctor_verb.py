"""The options of ``leasehold doctor``. Its help imports only the options of ``leasehold worker``."""

import math
import signal
import sys
from pathlib import Path
from typing import Final

import click

from leasehold_worker.agent.cli import GivenPath

TIMEOUT_S: Final = 30.0
"""On a host with many GPUs and no persistence mode, the first NVML call and cuInit take many seconds."""

EPILOG: Final = """\b
Examples:
  leasehold doctor
  leasehold doctor --host
"""


def _refuse_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuses NaN, which every range of click permits."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a time: write seconds, such as 30", ctx, param)
    return value


@click.command(name="doctor", epilog=EPILOG)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_WORKER_COORDINATOR",
    help="Coordinator's address for workers.",
)
@click.option(
    "--credentials",
    type=GivenPath(path_type=Path),
    envvar="LEASEHOLD_CREDENTIALS",
    help="Directory of ca.pem and worker.token.",
)
@click.option(
    "--state-dir",
    type=GivenPath(path_type=Path),
    envvar="LEASEHOLD_STATE_DIR",
    help="The worker's state directory.",
)
@click.option(
    "--config",
    "config_path",
    type=GivenPath(path_type=Path),
    envvar="LEASEHOLD_WORKER_CONFIG",
    help="The worker's TOML file.  [default: /etc/leasehold/worker.toml, if it exists]",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    callback=_refuse_nan,
    default=TIMEOUT_S,
    show_default=True,
    help="Timeout of each check.",
)
@click.option(
    "--host",
    "with_host",
    is_flag=True,
    help="Check the installed service too: its unit, user, socket, certificate, disk, clock and limits.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)
def command(
    coordinator: str | None,
    credentials: Path | None,
    state_dir: Path | None,
    config_path: Path | None,
    timeout_s: float,
    with_host: bool,
    output: str,
) -> None:
    """Check this GPU host: every precondition, each ok or with its remedy.

    The command changes nothing, and a worker may run meanwhile. It exits with 1 if a check failed; warnings
    are not failures.

    With --host, a finding about the service ends with the command that mends it. Run it as root, or as the
    worker's user.
    """
    # Safe: the doctor changes nothing, and its children end with it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from leasehold_worker.diagnostics import doctor  # late: see above
    from leasehold_worker.errors import StartError

    settings = {"coordinator": coordinator, "credentials": credentials, "state_dir": state_dir}
    try:
        doctor.run(config_path, settings, timeout_s, output, with_host=with_host)
    except StartError as error:  # there are no default settings
        click.echo(f"leasehold doctor: {error}", err=True)
        sys.exit(2)
