"""The agent as a daemon: its settings, its log, its umask and its state directory."""

import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Final

import click
import trio

from leasehold_worker.agent.agent import run_agent
from leasehold_worker.agent.config import WorkerConfig, load_config
from leasehold_worker.errors import StartError
from leasehold_worker.files.private_directories import (
    PASSABLE,
    PRIVATE,
    UMASK,
    make_user_folders,
    require_private,
)
from leasehold_worker.files.state_directory import open_state_directory
from leasehold_worker.files.workload_files import USER_FOLDERS
from leasehold_worker.log_context import ContextFilter
from leasehold_worker.log_format import LogFormatter

logger = logging.getLogger(__name__)

IMAGE_DIRECTORY_TIMEOUT_S: Final = 10.0
"""Timeout of the image directory's volume at the start."""


def run(config_path: Path | None, **flags: object) -> None:
    """Runs the agent until it is stopped. A failed start exits with 2 after one line with the reason.

    Args:
        config_path: The settings file. None: the system's, if there is one.
        flags: Settings by name, which override those of the file; None for those that were not given.
    """
    try:
        _serve(load_config(config_path, **flags))
    except StartError as error:
        click.echo(f"leasehold worker: {error}", err=True)
        sys.exit(2)


def _serve(config: WorkerConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    handler.addFilter(ContextFilter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    os.umask(UMASK)
    # The default socket is in the state directory. Its users must be able to pass through.
    # So must the Unix users of workloads, to their folders.
    is_passed = config.socket_path.parent == config.state_dir or bool(config.run_as)
    mode = PASSABLE if is_passed else PRIVATE
    with open_state_directory(config.state_dir, mode) as state_directory:
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
        logger.warning("the image directory %s can't be checked: %s", path, error.strerror)


def _leaves(group: BaseExceptionGroup[StartError]) -> list[StartError]:
    """The errors of a group and of its nested groups."""
    inner = ([error] if isinstance(error, StartError) else _leaves(error) for error in group.exceptions)
    return [error for errors in inner for error in errors]
