"""The agent as a daemon: its settings, its log, its umask and its state directory."""

import logging
import os
import queue
import stat
import sys
import threading
from pathlib import Path
from typing import Final

import click
import trio

from leasehold_worker import __version__
from leasehold_worker.agent.agent import run_agent
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.agent.config_file import load_config
from leasehold_worker.errors import StartError
from leasehold_worker.files.private_directories import (
    PASSABLE,
    PRIVATE,
    UMASK,
    make_user_folders,
    require_private,
)
from leasehold_worker.files.state_directory import StateDirectory, open_state_directory
from leasehold_worker.files.workload_files import USER_FOLDERS
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.capabilities import give_up_unneeded
from leasehold_worker.log_context import ContextFilter
from leasehold_worker.log_format import formatter_of, printable
from leasehold_worker.session.enrolment import TICKET_LIMIT, read_ticket, ticket_name
from leasehold_worker.session.enrolment import join as enrol
from leasehold_worker.tracing import open_tracing

logger = logging.getLogger(__name__)

IMAGE_DIRECTORY_TIMEOUT_S: Final = 10.0
"""Timeout of the image directory's volume at the start."""


def run(
    config_path: Path | None,
    join: str | None,
    join_file: Path | None,
    *,
    join_only: bool = False,
    **flags: object,
) -> None:
    """Runs the agent until it is stopped. A failed start exits with 2 after one line with the reason.

    Args:
        config_path: The settings file. None: the system's, if there is one.
        join: A join token, or ``-`` for standard input. None: not given.
        join_file: A file with a join token. None: not given.
        join_only: Whether to end after the join.
        flags: Settings by name, which override those of the file; None for those that were not given.
    """
    try:
        text = _join_token(join, join_file)
        ticket = read_ticket(text) if text is not None else None
        if join_only and ticket is None:
            raise StartError("--join-only needs a join token: give it by --join or --join-file")
        name = ticket_name(ticket) if ticket is not None else ""
        config = load_config(config_path, name, **flags)
        _prepare(config)
        # The default socket is in the state directory. Its users must be able to pass through.
        # So must the Unix users of workloads, to their folders.
        is_passed = config.socket_path.parent == config.state_dir or bool(config.run_as)
        mode = PASSABLE if is_passed else PRIVATE
        with open_state_directory(config.state_dir, mode) as state_directory:
            if ticket is not None:
                gpu_uuids = [gpu.uuid for gpu in Inventory(config.gpus).gpus]
                enrol(ticket, state_directory, config.name, gpu_uuids)
                if join_only:
                    return
                config = load_config(config_path, name, **flags)
            _serve(config, state_directory)
    except StartError as error:
        click.echo(printable(f"leasehold worker: {error}"), err=True)
        sys.exit(2)


def _join_token(join: str | None, join_file: Path | None) -> str | None:
    """The join token of the options. None: there is none.

    Raises:
        StartError: The token can't be read, or is given twice.
    """
    if join is not None and join_file is not None:
        raise StartError("--join and --join-file are both given: give one of them")
    try:
        if join == "-":
            return sys.stdin.readline(TICKET_LIMIT)
        if join_file is not None:
            descriptor = os.open(join_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, encoding="ascii", errors="replace") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise StartError(
                        f"{join_file} is not a regular file: write the join token into one, or use `--join -`"
                    )
                return file.read(TICKET_LIMIT)
    except OSError as error:
        raise StartError(f"the join token can't be read ({error.strerror}): give it another way") from error
    if join is not None:
        click.echo(
            "leasehold worker: warning: other users of this host can see a token in an argument: use "
            "`--join -` or --join-file",
            err=True,
        )
    return join


def _prepare(config: WorkerConfig) -> None:
    """Sets the log, the umask and the capabilities of the process."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(config.log_format))
    handler.addFilter(ContextFilter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    open_tracing("leasehold-worker", __version__)
    os.umask(UMASK)
    give_up_unneeded(
        config.state_dir / USER_FOLDERS,
        has_run_as=bool(config.run_as),
        has_socket_group=bool(config.socket_group),
    )


def _serve(config: WorkerConfig, state_directory: StateDirectory) -> None:
    if config.run_as:
        make_user_folders(state_directory.workloads_path.with_name(USER_FOLDERS))
    if config.image_dir is not None:
        _require_image_directory(config.image_dir)
    refusals: list[StartError] = []
    try:
        trio.run(run_agent, config, state_directory, strict_exception_groups=True)
    except* StartError as group:
        refusals += _leaves(group)
    if refusals:
        raise refusals[0]


def _require_image_directory(path: Path, within_s: float = IMAGE_DIRECTORY_TIMEOUT_S) -> None:
    """Refuses an image directory that another user could replace: restored programs run as the worker's user.

    Raises:
        StartError: The directory is another user's, or its volume does not answer.
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
            f"the image directory {path} did not answer within {within_s:g} s: check its "
            "volume, or start without the setting image_dir"
        ) from None
    if refusal is not None:
        raise refusal


def _require_own_images(path: Path) -> None:
    try:
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        require_private(path, "image directory", may_be_roots=True)
    except OSError as error:  # the volume may be mounted later
        # Path.exists and Path.is_dir raise the errors of a volume that refuses the worker.
        if os.path.exists(path) and not os.path.isdir(path):
            raise StartError(
                f"the image directory {path} is not a directory: give another with the setting image_dir"
            ) from error
        logger.warning("the image directory %s can't be checked: %s", path, error.strerror)


def _leaves(group: BaseExceptionGroup[StartError]) -> list[StartError]:
    """The errors of a group and of its nested groups."""
    inner = ([error] if isinstance(error, StartError) else _leaves(error) for error in group.exceptions)
    return [error for errors in inner for error in errors]
