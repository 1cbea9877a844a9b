"""``leasehold worker``: the agent's command line."""

import gc
import os
import signal
from pathlib import Path
from typing import Final, final

import click

from leasehold_worker import __version__

EPILOG: Final = """\b
Examples:
  leasehold worker --name alpha
  leasehold worker --join-file gpu-07.token
"""


@final
class GivenPath(click.Path):
    """A click parameter type: a path. Empty text is none, and not the present directory."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuses empty text."""
        if value == "":
            self.fail("the value is empty: give one, or leave it out", param, ctx)
        return super().convert(value, param, ctx)


@click.command(name="worker", epilog=EPILOG)
@click.version_option(__version__)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_WORKER_COORDINATOR",
    help="Coordinator's address for workers; insecure:HOST:PORT has no TLS.  [default: 127.0.0.1:7401]",
)
@click.option(
    "--credentials",
    type=GivenPath(path_type=Path),
    envvar="LEASEHOLD_CREDENTIALS",
    help="Directory of ca.pem and worker.token.  [default: ~/.local/state/leasehold]",
)
@click.option(
    "--join",
    metavar="TOKEN|-",
    help="Join by a token of `leasehold token create --worker`; - reads it from standard input.",
)
@click.option(
    "--join-file",
    type=GivenPath(path_type=Path),
    help="Join by the token in this file. A token that was used before is not used again.",
)
@click.option("--join-only", is_flag=True, help="Join, and exit.")
@click.option(
    "--state-dir",
    type=GivenPath(path_type=Path),
    envvar="LEASEHOLD_STATE_DIR",
    help="Directory for this worker's id and its workloads' output.",
)
@click.option(
    "--name", envvar="LEASEHOLD_WORKER_NAME", help="Name of this worker.  [default: the host's name]"
)
@click.option(
    "--socket",
    type=GivenPath(path_type=Path),
    help=(
        "Socket on which processes of this host claim GPUs.  [default: worker.sock in the state directory]"
    ),
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
        "Address for metrics (OpenMetrics) under /metrics; off loopback with TLS, or "
        "insecure:HOST:PORT.  [default: none]"
    ),
)
@click.option(
    "--stop-workloads",
    type=click.Choice(["leave", "park", "stop"]),
    help=(
        "Action on the workloads when the worker stops: leave them running, suspend them, or "
        "stop them.  [default: leave]"
    ),
)
@click.option(
    "--config",
    "config_path",
    type=GivenPath(path_type=Path),
    envvar="LEASEHOLD_WORKER_CONFIG",
    help="TOML file with these settings and labels.  [default: /etc/leasehold/worker.toml, if it exists]",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Level of the log on standard error.  [default: info]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    help="Format of the log on standard error.  [default: text]",
)
def command(
    coordinator: str | None,
    credentials: Path | None,
    join: str | None,
    join_file: Path | None,
    join_only: bool,
    state_dir: Path | None,
    name: str | None,
    socket: Path | None,
    health_listen: str | None,
    metrics_listen: str | None,
    stop_workloads: str | None,
    config_path: Path | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run the worker agent of a GPU host.

    The worker leases this host's GPUs to workloads. On the coordinator's command it suspends, restores and
    moves them. Without a coordinator it keeps reconnecting. Workloads outlive the worker. A worker that is
    started again on the same state directory finds them, and settles interrupted commands.
    """
    # Until the agent listens, SIGINT ends it without a traceback.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # failed handshakes are told by the session
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # imports make no garbage, and collections take a tenth of the start
    from leasehold_worker.agent import daemon  # late: `leasehold worker --help` needs nothing of it

    gc.freeze()  # modules stay, so no later collection has to visit their objects
    gc.enable()
    daemon.run(
        config_path,
        join,
        join_file,
        join_only=join_only,
        coordinator=coordinator,
        credentials=credentials,
        state_dir=state_dir,
        name=name,
        socket=socket,
        health_listen=health_listen,
        metrics_listen=metrics_listen,
        stop_workloads=stop_workloads,
        log_level=log_level,
        log_format=log_format,
    )
