"""Facts of processes of any user, read beside the worker's loop and with a deadline.

Every user can make the reader of a process wait for ever: a page of the environment that lies on a file
system which does not answer is enough, and so is a root directory there. Then a thread is left behind. Each
user has a few threads, so that nobody's processes hold up the reading of another user's.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.processes import user_id

READ_TIMEOUT_S: Final = 10.0
LONG_READ_TIMEOUT_S: Final = 120.0
"""For all memory and all descriptors of large processes."""

USER_READERS: Final = 4
"""Threads at once that read processes of one user, those included that hang."""

_readers: Final[dict[int | None, trio.CapacityLimiter]] = {}
"""By user id. Users without a thread are left out."""

Answer = TypeVar("Answer")


async def read_process(pid: int, read: Callable[[], Answer], timeout_s: float | None = None) -> Answer:
    """Reads facts of a process, and of others that belong to it, in a thread.

    Args:
        pid: The process, whose user has the thread.
        read: Reads them. It may block.
        timeout_s: How long that may take. None: READ_TIMEOUT_S.

    Raises:
        OperationError: TARGET_NOT_RUNNABLE: they can't be read in time.
    """
    limit_s = READ_TIMEOUT_S if timeout_s is None else timeout_s
    uid = user_id(pid)
    limiter = _readers.setdefault(uid, trio.CapacityLimiter(USER_READERS))
    try:
        with trio.move_on_after(limit_s):
            return await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=limiter)
    finally:
        if not limiter.borrowed_tokens and not limiter.statistics().tasks_waiting:
            _readers.pop(uid, None)
    raise OperationError(
        errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
        f"process {pid} can't be read within {limit_s:g} s: it may be stuck in the kernel: try again, "
        "or end it",
        {"pid": str(pid)},
    )
