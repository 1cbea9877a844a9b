"""The restore of a process tree from its image, behind a launcher that outlives the worker."""

import os
import re
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.checkpoints.volume_calls import call_volume, discard_in_time
from leasehold_worker.criu import criu_pb2, rpc
from leasehold_worker.criu.criu_pb2 import CriuOptions, CriuRequest
from leasehold_worker.criu.installation import CriuFacts, read_errors
from leasehold_worker.criu.rpc import SwrkError
from leasehold_worker.criu.working_directory import ERRORS_FILE, open_directories, working_directory
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import ProcessIdentity, identify, is_zombie
from leasehold_worker.programs.programs import LaunchError, relaunch

RESTORE_TIMEOUT_S: Final = 1800.0

_LOG: Final = "restore.log"
_LOG_LEVEL: Final = 2

_THREAD_FILE: Final = re.compile(r"core-(\d{1,10})\.img")
"""CRIU's file for each thread of an image. A process is its first thread."""


def taken_pids(pids: Iterable[int]) -> list[int]:
    """The pids that are in use now, as a process or a thread."""
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def thread_ids(images: int) -> set[int]:
    """The ids of all threads of an image, which has one file of CRIU for each, by a descriptor of its folder.

    Raises:
        SwrkError: The folder can't be read.
    """
    try:
        names = os.listdir(images)
    except OSError as error:
        raise SwrkError(f"its folder can't be read ({error})") from error
    return {int(found[1]) for name in names if (found := _THREAD_FILE.fullmatch(name))}


def check_pids_free(images: int, pids: Iterable[int]) -> None:
    """Checks that the processes of an image and their threads can have their ids again.

    Raises:
        OperationError: CHECKPOINT_INCOMPATIBLE, an id is in use.
        SwrkError: The image can't be read.
    """
    if taken := taken_pids({*pids, *thread_ids(images)}):
        pid = min(taken)
        if is_zombie(pid):
            why = "is used by a zombie that nobody reaps"
            remedy = "start the container of the worker with an init that reaps zombies (docker run --init)"
        else:
            why, remedy = "is used by another process or thread", "try again when that has ended"
        raise OperationError(
            errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
            f"pid {pid} of the image {why}, and CRIU restores processes and threads with their ids: {remedy}",
            {"pid": str(pid)},
        )


async def restore(
    facts: CriuFacts,
    image: Path,
    root_pid: int,
    pids: Collection[int],
    folder: Path,
    *,
    group: Path | None,
    nursery: trio.Nursery,
    timeout_s: float = RESTORE_TIMEOUT_S,
) -> ProcessIdentity:
    """Restores a process tree under its former pids. The image stays, and members are CHECKPOINTED.

    After a cancellation no process of the tree runs. If the restore was complete by then, the call returns as
    usual.

    Args:
        facts: The CRIU.
        image: A verified image.
        root_pid: The pid of its first process.
        pids: The pids of all its processes.
        folder: Folder of the launcher, without records of the former run.
        group: Control group that the tree runs in. None: the worker's.
        nursery: Runs the task that waits for the launcher.
        timeout_s: Timeout of the restore.

    Returns:
        Identity of the first process: the same pid, with another start time.

    Raises:
        OperationError: CHECKPOINT_INCOMPATIBLE, an id is taken. CRIU_FAILED, or STORAGE_UNAVAILABLE: no
            process of it runs.
    """
    work = working_directory(image, secrets.token_hex(4))
    try:
        # Nobody sweeps the working directory: the launcher has the lock too, by the same descriptor.
        async with open_directories(image, work, is_shared=True) as (images, logs, errors):
            await call_volume(check_pids_free, images, pids)
            return await relaunch(
                folder,
                facts.path,
                _request(images, logs),
                root_pid,
                descriptors=(images, logs),
                # No plugin is there, so none is loaded.
                environment={**os.environ, rpc.PLUGIN_VARIABLE: str(work)},
                errors=errors,
                group=group,
                timeout_s=timeout_s,
                nursery=nursery,
            )
    except (LaunchError, SwrkError) as error:
        said = ""
        with suppress(OperationError):  # the volume does not answer
            said = await call_volume(read_errors, work / _LOG, work / ERRORS_FILE)
        why = f"{error}{': ' if said else ''}{said}"
        raise OperationError(
            errors_pb2.ERROR_REASON_CRIU_FAILED,
            f"CRIU could not restore {image.name} ({why}): none of its processes run, and the "
            "image is unchanged; docs/criu.md lists what a restore needs",
            {"image": image.name},
        ) from error
    finally:
        await discard_in_time(work)


def new_identities(members: Iterable[ProcessIdentity]) -> dict[ProcessIdentity, ProcessIdentity]:
    """The identities of a restored tree's members. Members that have ended since are missing."""
    found = {member: identify(member.pid) for member in members}
    return {member: now for member, now in found.items() if now is not None}


def _request(images: int, logs: int) -> bytes:
    options = CriuOptions(
        images_dir_fd=images,
        work_dir_fd=logs,
        log_level=_LOG_LEVEL,
        log_file=_LOG,
        notify_scripts=True,
        file_locks=True,
        tcp_established=True,
        network_lock=criu_pb2.CRIU_NETWORK_LOCK_SKIP,
        rst_sibling=True,
        manage_cgroups_mode=criu_pb2.CRIU_CGROUP_MODE_UNSPECIFIED,
    )
    return CriuRequest(type=criu_pb2.CRIU_REQUEST_TYPE_RESTORE, opts=options).SerializeToString()
