"""Calls on the image directory: in threads, with a deadline, and bounded in number.

The volume of the image directory may be a network volume, and its accesses hang while its server is away. A
thread with such an access can't be interrupted. So a deadline or a cancellation abandons the thread, and the
operation of the caller is rolled back. The thread ends once the volume answers. What the thread still does
then has to be harmless:

* A call that only reads is harmless.
* A call that creates something gets ``undo``, which deletes the result that nobody receives.
* A call that deletes does not begin its first deletion; see :func:`delete_in_volume`.
"""

import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.files.folder_trees import discard_tree
from leasehold_worker.threads import run_in_thread

CALL_TIMEOUT_S: Final = 20.0
"""Time for a call that reads, or that creates a file or a folder."""

DELETE_TIMEOUT_S: Final = 120.0
"""Time for a call that may delete whole images."""

CALLS_AT_ONCE: Final = 16
"""Threads of these calls at once, including those that hang. Further calls wait until their deadline."""

_limiter: Final[trio.lowlevel.RunVar[trio.CapacityLimiter]] = trio.lowlevel.RunVar("volume calls")
"""One per run of trio: a thread that outlives its run never gives its place back."""

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")


async def call_volume(
    function: Callable[[*Arguments], Answer],
    *arguments: *Arguments,
    timeout_s: float | None = None,
    undo: Callable[[Answer], object] | None = None,
) -> Answer:
    """Calls a function that accesses the image directory, in a thread.

    A cancellation takes effect at once, and abandons the thread.

    Args:
        function: The call. It is harmless if it ends later; see above.
        arguments: Its arguments.
        timeout_s: Time for the answer. None: :data:`CALL_TIMEOUT_S`.
        undo: Receives an answer that came too late for the caller. It blocks.

    Raises:
        OperationError: STORAGE_UNAVAILABLE: there is no answer in time.
        Exception: Whatever the function raises.
    """
    limit_s = CALL_TIMEOUT_S if timeout_s is None else timeout_s
    handover = threading.Lock()
    answers: list[Answer] = []
    is_abandoned = is_received = False

    def call() -> Answer:
        answer = function(*arguments)
        with handover:
            if not is_abandoned:
                answers.append(answer)
                return answer
        if undo is not None:
            undo(answer)
        return answer  # which nobody receives

    try:
        with trio.move_on_after(limit_s):
            answer = await run_in_thread(call, abandon_on_cancel=True, limiter=_threads())
            is_received = True
            return answer
    finally:
        if not is_received:
            with handover:
                is_abandoned = True
            if undo is not None:
                for late in answers:  # the cancellation came between the end of the call and its return
                    trio.lowlevel.start_thread_soon(partial(undo, late), _ignore)
    raise _no_answer(limit_s)


async def delete_in_volume(delete: Callable[[Callable[[], None]], Answer]) -> Answer:
    """Calls a function that deletes in the image directory, in a thread. It can't be cancelled.

    Args:
        delete: The call. It calls its argument before its first deletion, which ends the deadline: a deletion
            that has begun can't be undone, and is waited for.

    Raises:
        OperationError: STORAGE_UNAVAILABLE: the deletion has not begun in time, and nothing is deleted.
        Exception: Whatever the function raises.
    """
    scope = trio.CancelScope(deadline=trio.current_time() + CALL_TIMEOUT_S)

    def end_deadline() -> bool:
        if scope.cancel_called:  # the caller has given up
            return False
        scope.deadline = math.inf
        return True

    def begin() -> None:
        if not trio.from_thread.run_sync(end_deadline):
            raise _no_answer(CALL_TIMEOUT_S)  # which nobody receives

    with trio.CancelScope(shield=True), scope:
        return await run_in_thread(delete, begin, abandon_on_cancel=True, limiter=_threads())
    raise _no_answer(CALL_TIMEOUT_S)


async def discard_in_time(folder: Path) -> None:
    """Removes a folder of the image directory and its content. It can't be cancelled.

    If the volume does not answer in time, the removal goes on, and the caller continues. Entries that can't
    be removed stay until the worker's next start.
    """
    with trio.CancelScope(shield=True), trio.move_on_after(CALL_TIMEOUT_S):
        await run_in_thread(discard_tree, folder, abandon_on_cancel=True, limiter=_threads())


def _threads() -> trio.CapacityLimiter:
    """The places of all calls in this run of trio."""
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(CALLS_AT_ONCE)
        _limiter.set(limiter)
        return limiter


def _no_answer(limit_s: float) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        f"the image directory did not answer within {limit_s:g} s: check its volume, and try again",
    )


def _ignore(_: object) -> None:
    """Ignores the outcome of a thread."""
