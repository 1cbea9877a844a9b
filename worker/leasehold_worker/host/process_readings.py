"""Facts of processes of any user, read beside the worker's loop and with a deadline.

Every user can make the reader of a process wait forever: a page of the environment on a file system that
does not answer suffices, and so does a root directory there. Then the thread is abandoned. Each user has a
few threads, so that one user's processes can't block the reading of another user's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import user_id
from leasehold_worker.threads import run_in_thread

READ_TIMEOUT_S: Final = 10.0
LONG_READ_TIMEOUT_S: Final = 120.0
"""Timeout of reading all memory and all descriptors of large processes."""

USER_READERS: Final = 8
"""Threads of one kind at once that read processes of one user, including those that hang."""

READING: Final = "reading"
LONG_READING: Final = "long reading"
SEARCH: Final = "search"
"""Kind of the search for processes with the mark of a workload."""

_readers: Final[dict[tuple[int | None, str], trio.CapacityLimiter]] = {}
"""By user id and kind. Users without a thread are left out."""

Answer = TypeVar("Answer")


@contextmanager
def user_threads(uid: int | None, kind: str, count: int = USER_READERS) -> Iterator[trio.CapacityLimiter]:
    """The threads of one kind that work for a user. A thread that hangs keeps its place."""
    limiter = _readers.setdefault((uid, kind), trio.CapacityLimiter(count))
    try:
        yield limiter
    finally:
        if not limiter.borrowed_tokens and not limiter.statistics().tasks_waiting:
            _readers.pop((uid, kind), None)


async def read_process(pid: int, read: Callable[[], Answer], *, is_long: bool = False) -> Answer:
    """Reads facts of a process, and of others that belong to it, in a thread.

    Args:
        pid: The process, whose user decides the thread.
        read: Reads them. It may block.
        is_long: It reads all memory or all descriptors.

    Raises:
        OperationError: TARGET_NOT_RUNNABLE: the facts can't be read in time.
    """
    limit_s = LONG_READ_TIMEOUT_S if is_long else READ_TIMEOUT_S
    kind = LONG_READING if is_long else READING
    with user_threads(user_id(pid), kind) as limiter, trio.move_on_after(limit_s):
        return await run_in_thread(read, abandon_on_cancel=True, limiter=limiter)
    raise OperationError(
        errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
        f"process {pid} can't be read within {limit_s:g} s, perhaps because it is stuck in "
        "the kernel: try again, or end it",
        {"pid": str(pid)},
    )
