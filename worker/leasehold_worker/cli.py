"""``leasehold worker``: the agent's command line."""

import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import click
import trio

from leasehold_worker import __version__
from leasehold_worker.agent import run_agent
from leasehold_worker.config import WorkerConfig, load_config
from leasehold_worker.errors import StartError
from leasehold_worker.log_format import LogFormatter
from leasehold_worker.private_directories import PASSABLE, PRIVATE, UMASK, require_private
from leasehold_worker.state_directory import open_state_directory

logger = logging.getLogger(__name__)

IMAGE_DIRECTORY_TIMEOUT_S: Final = 10.0
"""How long the volume of the image directory may take to answer at the start."""


@click.command(name="worker")
@click.version_option(__version__)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    envvar="LEASEHOLD_COORDINATOR",
    help="Coordinator to connect to.  [default: 127.0.0.1:7400]",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    envvar="LEASEHOLD_STATE_DIR",
    help="Directory for this worker's id and its workloads' output.",
)
@click.option("--name", envvar="LEASEHOLD_WORKER_NAME", help="What to call it.  [default: the host's name]")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="Where this host's processes ask for GPUs.  [default: worker.sock in the state directory]",
)
@click.option(
    "--stop-workloads",
    type=click.Choice(["leave", "park", "stop"]),
    help="What happens to the workloads when the worker is stopped: they go on, are parked, or are stopped.  "
    "[default: leave]",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="LEASEHOLD_WORKER_CONFIG",
    help="TOML file with these settings and labels.  [default: /etc/leasehold/worker.toml, if it exists]",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much to log, to standard error.  [default: info]",
)
def command(
    coordinator: str | None,
    state_dir: Path | None,
    name: str | None,
    socket: Path | None,
    stop_workloads: str | None,
    config_path: Path | None,
    log_level: str | None,
) -> None:
    """Run the worker agent of a GPU host.

    It leases this host's GPUs to workloads, and suspends, restores and moves them on the coordinator's
    command. It keeps trying when the coordinator is away. Its workloads outlive it: a worker that is started
    again on the same state directory finds them, and ends what was under way as it finds it.
    """
    try:
        config = load_config(
            config_path,
            coordinator=coordinator,
            state_dir=state_dir,
            name=name,
            socket=socket,
            stop_workloads=stop_workloads,
            log_level=log_level,
        )
        _serve(config)
    except StartError as error:
        click.echo(f"leasehold worker: {error}", err=True)
        sys.exit(2)


def _serve(config: WorkerConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    os.umask(UMASK)
    # The default place of the socket is reached by users whom the socket lets in.
    mode = PASSABLE if config.socket_path.parent == config.state_dir else PRIVATE
    with open_state_directory(config.state_dir, mode) as state_directory:
        if config.image_dir is not None:
            _require_image_directory(config.image_dir)
        refusals: list[StartError] = []
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the agent listens: without a traceback
        try:
            trio.run(run_agent, config, state_directory, strict_exception_groups=True)
        except* StartError as group:
            refusals += _leaves(group)
        if refusals:
            raise refusals[0]


def _require_image_directory(path: Path, within_s: float = IMAGE_DIRECTORY_TIMEOUT_S) -> None:
    """Refuses images that another user could replace: a restored program runs as the worker's user.

    Raises:
        StartError: It is another user's, or its volume does not answer.
    """
    outcome = queue.SimpleQueue[StartError | None]()

    def look() -> None:
        try:
            _require_own_images(path)
        except StartError as error:
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=look, name="image-directory", daemon=True).start()
    try:
        refusal = outcome.get(timeout=within_s)
    except queue.Empty:
        raise StartError(
            f"the image directory {path} does not answer within {within_s:g} s: look at its volume, or start "
            "without the setting image_dir"
        ) from None
    if refusal is not None:
        raise refusal


def _require_own_images(path: Path) -> None:
    try:
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        require_private(path, "image directory", may_be_roots=True)
    except OSError as error:  # a volume that is not there now may be there later
        logger.warning("the image directory %s can't be looked at: %s", path, error.strerror)


def _leaves(group: BaseExceptionGroup[StartError]) -> list[StartError]:
    """The errors of a group and of those in it."""
    inner = ([error] if isinstance(error, StartError) else _leaves(error) for error in group.exceptions)
    return [error for errors in inner for error in errors]
