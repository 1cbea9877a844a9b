"""The files of limits.conf(5), and the limits of this host's processes.

The files count only if they are root's, and are read anew for each start: an edit acts without a restart.
"""

import errno
import grp
import logging
import os
import resource
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.files.file_descriptors import STARTED_WITH
from leasehold_worker.files.regular_files import open_regular
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.process_files import read_status
from leasehold_worker.host.user_limits import (
    UNLIMITED,
    HostLimits,
    Limit,
    LimitLine,
    encode,
    parse_lines,
    resolve,
)
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

FOLDER = Path("/etc/security")
FILES_LIMIT: Final = 100
FILE_LIMIT_BYTES: Final = 262_144

TIMEOUT_S: Final = 10.0
"""Timeout of the files, and of the host's directory of groups (NSS), which may ask a server."""

CAP_SYS_RESOURCE: Final = 24
EVERY_ID: Final = ["0", "0", "4294967295"]
"""The map of user ids of a process that is in no user namespace of its own."""

_FIRST: Final = Path("/proc/1/limits")
_LABEL_LENGTH: Final = 25
_readers: Final = trio.CapacityLimiter(4)


class LoginLimits(NamedTuple):
    """The limits of a user's programs.

    Attributes:
        encoded: As :func:`leasehold_worker.host.user_limits.encode`. Empty: those of the worker.
        differences: Where they differ from the files.
    """

    encoded: str
    differences: list[str]


async def login_limits(account: Account | None) -> LoginLimits:
    """The limits of a Unix user's programs, looked up now. None: those of the worker's user.

    The worker's log has each problem of the files once.

    Raises:
        OperationError: PERMISSION_OR_OS: the host does not tell them.
    """
    if account is None:
        await trio.lowlevel.checkpoint()
        return LoginLimits("", [])
    try:
        with trio.fail_after(TIMEOUT_S):
            return await run_in_thread(_look_up, account, abandon_on_cancel=True, limiter=_readers)
    except (trio.TooSlowError, OSError) as error:
        why = str(error) or f"no answer within {TIMEOUT_S:g} s"
        raise OperationError(
            errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
            f"the limits of the Unix user {account.name!r} can't be looked up ({why}): check {FOLDER}, /proc "
            "and the host's directory of groups",
        ) from None


def _look_up(account: Account) -> LoginLimits:
    lines, problems = read_lines()
    own = [_limit(resource.getrlimit(number)) for number in range(resource.RLIMIT_RTTIME + 1)]
    own[resource.RLIMIT_NOFILE] = _limit((STARTED_WITH, own[resource.RLIMIT_NOFILE][1]))
    try:
        first = _first_limits()
    except OSError as error:
        first = own
        problems.append(
            f"{_FIRST} can't be read ({error.strerror}): without a line in {FOLDER}, programs of other "
            "users have the worker's limits; mount /proc without hidepid"
        )
    most_descriptors = int(Path("/proc/sys/fs/nr_open").read_text(encoding="ascii"))
    host = HostLimits(own, first, _may_raise(), most_descriptors)
    limits, differences = resolve(lines, account, _gid_of, host)
    for text in (*problems, *differences):
        _tell(text)
    return LoginLimits(encode(limits), differences)


@lru_cache(maxsize=1000)
def _tell(text: str) -> None:
    """Logs a text once."""
    logger.warning("%s", text)


def read_lines() -> tuple[list[LimitLine], list[str]]:
    """The lines of all files in the order of pam_limits, and the problems of the files."""
    more, lines, problems = FOLDER / "limits.d", list[LimitLine](), list[str]()
    try:
        names = sorted(name for name in os.listdir(more) if name.endswith(".conf") and name[0] != ".")
    except FileNotFoundError:
        names = []
    except OSError as error:
        names = []
        problems.append(f"{more} can't be read ({error.strerror}) and was ignored: permit it")
    if len(names) > FILES_LIMIT:
        problems.append(f"{more} has more than {FILES_LIMIT} files, and the others were ignored: merge them")
    for path in (FOLDER / "limits.conf", *(more / name for name in names[:FILES_LIMIT])):
        try:
            text = _read(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} was ignored ({error.strerror}): make it a regular file of root's (0644)")
            continue
        found, wrong = parse_lines(text, str(path))
        lines += found
        problems += wrong
    return lines, problems


def _read(path: Path) -> str:
    """The content of a file that only root can change. A link of root's may lead to it.

    Raises:
        OSError: It can't be read, or others could have written it, or it is too large.
    """
    with open_regular(Path(os.path.realpath(path))) as descriptor:
        found = os.fstat(descriptor)
        if found.st_uid != 0 or found.st_mode & 0o022:
            raise OSError(errno.EPERM, "other users than root may change it")
        content = os.read(descriptor, FILE_LIMIT_BYTES + 1)
    if len(content) > FILE_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {FILE_LIMIT_BYTES} bytes")
    return content.decode(errors="replace")


def _first_limits() -> list[Limit]:
    """The limits of pid 1. The kernel lists the resources in the order of their numbers."""
    rows = _FIRST.read_text(encoding="ascii").splitlines()[1:]
    values = (row[_LABEL_LENGTH:].split()[:2] for row in rows)
    return [_limit(UNLIMITED if value == "unlimited" else int(value) for value in pair) for pair in values]


def _limit(values: Iterable[int]) -> Limit:
    soft, hard = (UNLIMITED if value == resource.RLIM_INFINITY else value for value in values)
    return soft, hard


def _may_raise() -> bool:
    """Whether the kernel lets the worker raise a hard limit. The capability counts in no user namespace."""
    held = int(read_status(os.getpid()).get("CapEff", "0"), 16)
    ids = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    return bool(held >> CAP_SYS_RESOURCE & 1) and ids == EVERY_ID


def _gid_of(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        return None
