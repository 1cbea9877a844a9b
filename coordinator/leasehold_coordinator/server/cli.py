"""``leasehold coordinator``: the coordinator's command line."""

import gc
import os
import signal
from pathlib import Path
from typing import Final

import click

from leasehold_coordinator import __version__
from leasehold_coordinator.server import tls_versions

GARBAGE_OBJECTS: Final = 10_000
"""Allocations between two garbage collections, instead of Python's 700. A session has hundreds of long-lived
objects, which frequent collections would scan again during thousands of hellos."""

EPILOG: Final = """\b
Examples:
  leasehold coordinator
  leasehold coordinator --listen 0.0.0.0:7400 --worker-listen 0.0.0.0:7401
"""


@click.command(name="coordinator", epilog=EPILOG)
@click.version_option(__version__)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_LISTEN",
    help="Address for clients; port 0 takes a free one.  [default: 127.0.0.1:7400]",
)
@click.option(
    "--worker-listen",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_WORKER_LISTEN",
    help="Address for workers; port 0 takes a free one.  [default: 127.0.0.1:7401]",
)
@click.option(
    "--join-listen",
    metavar="HOST:PORT",
    help="Address for enrolment.  [default: port 7402 beside a listener off loopback, or else none]",
)
@click.option(
    "--health-listen",
    metavar="HOST:PORT",
    help="Address for health checks (grpc.health.v1) without TLS and identity.  [default: none]",
)
@click.option(
    "--metrics-listen",
    metavar="HOST:PORT",
    help=(
        "Address for metrics (OpenMetrics) under /metrics; off loopback with TLS and client certificates, or "
        "insecure:HOST:PORT.  [default: none]"
    ),
)
@click.option(
    "--web",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_WEB",
    help="Address for browsers: the web page, with TLS off loopback.  [default: none]",
)
@click.option(
    "--database",
    metavar="PATH",
    envvar="LEASEHOLD_DATABASE",
    help="SQLite file of the store.  [default: coordinator.sqlite3 in the state directory]",
)
@click.option(
    "--socket",
    metavar="PATH",
    help="Socket for clients of this host.  [default: the store's path with the suffix .sock]",
)
@click.option(
    "--state-dir",
    metavar="DIRECTORY",
    envvar="LEASEHOLD_COORDINATOR_STATE_DIR",
    help="Directory of keys, tokens and the store.  [default: ~/.local/state/leasehold]",
)
@click.option(
    "--insecure",
    is_flag=True,
    default=None,
    help="Serve clients and workers without TLS. Anybody on the network path can steal their tokens.",
)
@click.option(
    "--store-restored",
    is_flag=True,
    default=None,
    help="The store is an older copy: accept later sessions of workers and certificates issued since.",
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
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much to log, to standard error.  [default: info]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    help="Format of the log on standard error.  [default: text]",
)
def command(
    listen: str | None,
    worker_listen: str | None,
    join_listen: str | None,
    health_listen: str | None,
    metrics_listen: str | None,
    web: str | None,
    database: str | None,
    socket: str | None,
    state_dir: str | None,
    insecure: bool | None,
    store_restored: bool | None,
    load_interval_s: float | None,
    config_path: Path | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run the coordinator, the server for workers and clients.

    The coordinator prints one line to standard output once it serves. It can be stopped at any time:
    commands are stored before they are answered, and workers reconnect by themselves.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C before the server listens
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC logs each connection that a peer ends oddly
    tls_versions.require_tls_1_3()
    gc.disable()  # imports make no garbage, and collections take a tenth of the start
    from leasehold_coordinator.server import (
        daemon,  # imported late, which keeps `leasehold coordinator --help` fast
    )

    gc.freeze()  # later collections skip the objects of modules
    gc.set_threshold(GARBAGE_OBJECTS)
    gc.enable()
    daemon.run(
        config_path,
        listen=listen,
        worker_listen=worker_listen,
        join_listen=join_listen,
        health_listen=health_listen,
        metrics_listen=metrics_listen,
        web=web,
        database=database,
        socket=socket,
        state_dir=state_dir,
        insecure=insecure,
        store_restored=store_restored,
        load_interval_s=load_interval_s,
        log_level=log_level,
        log_format=log_format,
    )
