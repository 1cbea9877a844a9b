"""``leasehold coordinator``: the coordinator's command line."""

import asyncio
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from leasehold_coordinator import __version__
from leasehold_coordinator.config import LOG_LEVELS, CoordinatorConfig, load_config
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.log_bounds import LineBound
from leasehold_coordinator.log_format import SafeFormatter

DESCRIPTOR_LIMIT: Final = 65_536
"""Files and connections that the coordinator opens at most. Each worker and each client has a connection."""


@click.command(name="coordinator")
@click.version_option(__version__)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_LISTEN",
    help="Address to serve on; port 0 takes a free one.  [default: 127.0.0.1:7400]",
)
@click.option(
    "--database",
    metavar="PATH",
    envvar="LEASEHOLD_DATABASE",
    help="SQLite file of the store.  [default: leasehold/coordinator.sqlite3 in the user's state directory]",
)
@click.option(
    "--load-interval",
    "load_interval_s",
    type=float,
    metavar="SECONDS",
    help="Time between two loads of a worker.  [default: 5]",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="LEASEHOLD_COORDINATOR_CONFIG",
    help="TOML file with these settings.  [default: /etc/leasehold/coordinator.toml, if it exists]",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    help="How much to log, to standard error.  [default: info]",
)
def command(
    listen: str | None,
    database: str | None,
    load_interval_s: float | None,
    config_path: Path | None,
    log_level: str | None,
) -> None:
    """Run the coordinator, to which workers connect and clients talk.

    It prints one line to standard output once it serves. It can be stopped at any time: commands are
    stored before they are answered, and workers come back by themselves.
    """
    try:
        config = load_config(
            config_path,
            listen=listen,
            database=database,
            load_interval_s=load_interval_s,
            log_level=log_level,
        )
        _run(config)
    except StartError as error:
        click.echo(f"leasehold coordinator: {error}", err=True)
        sys.exit(2)


def _run(config: CoordinatorConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the server listens: without a traceback
    # Imported late: `--help` needs no gRPC.
    import uvloop

    from leasehold_coordinator.server import serve

    _raise_descriptor_limit()
    os.umask(0o077)  # the store has what workloads were given as secrets
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter())
    handler.addFilter(LineBound())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)

    def announce(address: str) -> None:
        click.echo(f"leasehold coordinator listening on {address}")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, announce))


def _raise_descriptor_limit() -> None:
    """Raises the soft limit, often 1024, within the hard limit. One host could take up so few connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTOR_LIMIT if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTOR_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
