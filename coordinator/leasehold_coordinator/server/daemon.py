"""The coordinator as a daemon: settings, log, umask and event loop."""

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

from leasehold_coordinator import __version__
from leasehold_coordinator.access.local_tokens import CLIENT_FILE
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.log_bounds import LineBound
from leasehold_coordinator.log_context import ContextFilter
from leasehold_coordinator.log_format import formatter_of, printable
from leasehold_coordinator.server.channel_options import (
    CLIENT_CONNECTIONS,
    DESCRIPTORS,
    WORKER_CONNECTIONS,
    scaled,
)
from leasehold_coordinator.server.config import CoordinatorConfig, is_loopback, load_config
from leasehold_coordinator.server.listeners import Addresses
from leasehold_coordinator.server.server import serve
from leasehold_coordinator.tracing import open_tracing

logger = logging.getLogger(__name__)

_FEW_FILES: Final = (
    "this process may have few open files: at most %d workers and %d clients can connect; raise the hard "
    "limit of open files to %d (ulimit -n, LimitNOFILE)"
)
DESCRIPTOR_LIMIT: Final = 65_536
"""Most open files and connections of the coordinator. Each worker and each client has a connection."""


def run(config_path: Path | None, **flags: object) -> None:
    """Serves until the process is stopped. If the start fails, prints the reason and exits with 2.

    Args:
        config_path: The settings file. None: the system's file, if it exists.
        flags: Settings by name, which override the file. None: not given.
    """
    try:
        _serve(load_config(config_path, **flags))
    except StartError as error:
        click.echo(printable(f"leasehold coordinator: {error}"), err=True)
        sys.exit(2)


def _serve(config: CoordinatorConfig) -> None:
    _raise_descriptor_limit()
    os.umask(0o077)  # the store holds environment variables of workloads, which may be secrets
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(config.log_format))
    handler.addFilter(LineBound())
    handler.addFilter(ContextFilter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Anybody could fill the log with malformed headers: gRPC writes tracebacks with their content.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)

    open_tracing("leasehold-coordinator", __version__)

    def announce(addresses: Addresses) -> None:
        clients, workers, web = addresses
        click.echo(f"leasehold coordinator listening on {clients} for clients, {workers} for workers")
        if web:
            click.echo(_HOW_TO_BROWSE.format(url=web, token=Path(config.state_dir) / CLIENT_FILE))
        if config.join_address:
            click.echo(_how_to_join(clients, workers, config.socket_option))
        if (most := scaled(WORKER_CONNECTIONS)) < WORKER_CONNECTIONS:
            logger.warning(_FEW_FILES, most, scaled(CLIENT_CONNECTIONS), DESCRIPTORS)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, announce))


_HOW_TO_BROWSE: Final = "  web page on {url}: log in with the content of {token}"

_JOINS: Final = "  other hosts need client certificates, which they get for join tokens:"
_WORKER_JOINS: Final = (
    "  a worker: `{create} --worker NAME` here, then `leasehold worker --join -` on its host"
)
_PERSON_JOINS: Final = (
    "  a person: `{create} --user NAME` here, then `leasehold login --token -` on their host"
)
_NOBODY_JOINS: Final = "  no other host can join: name an address off loopback by --listen or --worker-listen"


def _how_to_join(clients: str, workers: str, socket_option: str) -> str:
    """How others join. A listener on loopback asks for no certificate, so there are no tokens for it."""
    create = f"leasehold token create {socket_option}".rstrip()
    listeners = {workers: _WORKER_JOINS, clients: _PERSON_JOINS}
    lines = [
        line.format(create=create)
        for address, line in listeners.items()
        if not is_loopback(address.rpartition(":")[0])
    ]
    return "\n".join([_JOINS, *lines]) if lines else _NOBODY_JOINS


def _raise_descriptor_limit() -> None:
    """Raises the soft limit within the hard limit. One host could use up the usual soft limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTOR_LIMIT if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTOR_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
