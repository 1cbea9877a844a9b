"""The coordinator as a daemon: its settings, its log, its umask and its loop."""

import asyncio
import logging
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import click
import uvloop

from leasehold_coordinator.errors import StartError
from leasehold_coordinator.log_bounds import LineBound
from leasehold_coordinator.log_context import ContextFilter
from leasehold_coordinator.log_format import LogFormatter
from leasehold_coordinator.server.config import CoordinatorConfig, load_config
from leasehold_coordinator.server.server import serve

DESCRIPTOR_LIMIT: Final = 65_536
"""Files and connections that the coordinator opens at most. Each worker and each client has a connection."""


def run(config_path: Path | None, **flags: object) -> None:
    """Serves until it is stopped. Exits with 2 where it can't start, after one line that says why.

    Args:
        config_path: The settings file. None: the system's, if there is one.
        flags: Settings by name, which go before those of the file; None for those that were not given.
    """
    try:
        _serve(load_config(config_path, **flags))
    except StartError as error:
        click.echo(f"leasehold coordinator: {error}", err=True)
        sys.exit(2)


def _serve(config: CoordinatorConfig) -> None:
    _raise_descriptor_limit()
    os.umask(0o077)  # the store has what workloads were given as secrets
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    handler.addFilter(LineBound())
    handler.addFilter(ContextFilter())
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
