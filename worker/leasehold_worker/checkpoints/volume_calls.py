"""Calls on the image directory: in threads, with a deadline, and bounded in number or by their commands.

The volume of the image directory may be a network volume, and its accesses hang while its server is away. A
thread with such an access can't be interrupted. So a deadline or a cancellation abandons the thread, and the
operation of the caller is rolled back. The thread ends once the volume answers. What the thread still does
then has to be harmless:

* A call that only reads is harmless.
* A call that creates something gets ``undo``, which deletes the result that nobody receives.
* A call that deletes does not begin its first deletion; see :func:`delete_in_volume`.
* A long call does not go on with its next piece, and does not make its result final; see
  :func:`long_volume_call`.
"""

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.files.folder_trees import discard_tree
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

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


@final
class LongCall:
    """A long call as its thread sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self._is_final = False

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the result."""
        return self._is_given_up

    def check(self) -> None:
        """Called before each piece.

        Raises:
            GivenUpError: Nobody waits for the result.
        """
        if self._is_given_up:
            raise GivenUpError

    def commit(self) -> None:
        """Called before the first step that makes the result final. The caller waits for it from then on.

        Raises:
            GivenUpError: Nobody waits for the result.
        """
        with self._lock:
            self.check()
            self._is_final = True

    def give_up(self) -> bool:
        """Ends the call at its next piece. False: its result is final, or becomes so."""
        with self._lock:
            self._is_given_up = not self._is_final
            return self._is_given_up


class GivenUpError(Exception):
    """Ends the thread of a long call that was given up. Nobody receives it."""


async def long_volume_call(function: Callable[[LongCall], Answer]) -> Answer:
    """Calls a function that reads or writes many bytes of the image directory, in a thread.

    It has no deadline of its own: the timeout of the command cancels it. A cancellation abandons the thread
    at once. Only a result that is final by then is waited for, and returned.

    Args:
        function: The call. It is harmless if it ends later, and reports its steps to its argument.

    Raises:
        Exception: Whatever the function raises.
    """
    call = LongCall()
    scope = trio.CancelScope(shield=True)
    answers: list[Answer] = []
    failures: list[Exception] = []

    async def give_up_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            if call.give_up():
                scope.cancel()

    # A place of its own: a long call delays no short one.
    limiter = trio.CapacityLimiter(1)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up_when_cancelled)
            with scope:
                try:
                    answers.append(
                        await run_in_thread(function, call, abandon_on_cancel=True, limiter=limiter)
                    )
                except Exception as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                    failures.append(error)
            nursery.cancel_scope.cancel()
    except* trio.Cancelled:
        pass  # raised again below, unless there is a result
    if failures:
        raise failures[0]
    if not answers:
        await trio.lowlevel.checkpoint_if_cancelled()
    return answers[0]


async def end_in_time(end: Callable[[], object]) -> None:
    """Calls a function that removes or closes something in the image directory, in a thread.

    It can't be cancelled. If the volume does not answer in time, the call goes on, and the caller continues.
    An error of the volume is logged: what has been written or read before stays valid.
    """
    # A place of its own: calls that hang could use up the common ones, and nobody repeats a removal.
    limiter = trio.CapacityLimiter(1)
    with trio.CancelScope(shield=True), trio.move_on_after(CALL_TIMEOUT_S):
        try:
            await run_in_thread(end, abandon_on_cancel=True, limiter=limiter)
        except OSError as error:
            logger.warning("the image directory could not be cleaned up: %s", error)


async def discard_in_time(folder: Path) -> None:
    """Removes a folder of the image directory and its content, as :func:`end_in_time`.

    Entries that can't be removed stay until the worker's next start.
    """
    await end_in_time(partial(discard_tree, folder))


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
