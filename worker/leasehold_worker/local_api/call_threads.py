"""The threads in which gRPC serves calls, and the bounded end of a server.

``ThreadPoolExecutor`` starts a thread only when a call needs one. If the host has no thread left, ``submit``
raises, and gRPC's serving thread ends with that error: the server then serves no call until a restart. Its
threads also keep the process alive until each of them has ended.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar, final

import grpc
import trio

from leasehold_worker.errors import StartError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.01

STARTED: Final = 16
"""Threads that are started at once, and serve calls if the host has none left later."""

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


@final
class CallThreads:
    """Threads that serve calls. Some are started at once, and others when calls need them.

    A call waits for a free thread if no further one may or can be started. The process does not wait for the
    threads at its end.

    Args:
        count: Most threads.
        name: Prefix of their names.

    Raises:
        StartError: The host has too few threads left.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._free = 0
        """Threads without a call, less the calls that wait."""
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(min(count, STARTED)):
                self._start()
        except RuntimeError as error:
            self.end()
            raise StartError(
                f"can't start {min(count, STARTED)} threads for calls ({error}): raise the limits of "
                "processes of the worker's user (ulimit -u) and of its control group (TasksMax)"
            ) from error

    @property
    def live(self) -> bool:
        """Whether a thread lives."""
        return any(thread.is_alive() for thread in self._threads)

    def submit(
        self, fn: Callable[Arguments, Answer], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Answer]:
        """Has a free thread call a function, in the order of the submits."""
        future = Future[Answer]()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - raised where the result is read
                    future.set_exception(error)

        with self._lock:
            self._free -= 1
        self._calls.put(call)
        self.fill()
        return future

    def fill(self) -> None:
        """Starts threads for calls that wait. Without any left on the host, they wait for a free one."""
        with self._lock, suppress(RuntimeError):
            while self._free < 0 and len(self._threads) < self._count:
                self._start()

    def end(self) -> None:
        """Ends each thread after the calls that were submitted before. Returns at once."""
        for _ in self._threads:
            self._calls.put(None)

    def _start(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._free += 1

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # with what it refers to
            with self._lock:
                self._free += 1


async def stop_server(server: grpc.Server, threads: CallThreads, grace_s: float) -> None:
    """Stops a server and its threads, in three times the grace at most, even under cancellation.

    No thread of trio is needed. Calls that are left end with the process.

    Args:
        server: The server.
        threads: Its threads.
        grace_s: Time for calls to end by themselves.
    """
    with trio.CancelScope(shield=True), trio.move_on_after(3 * grace_s) as scope:
        try:
            stopped = server.stop(grace_s)
        except RuntimeError as error:  # gRPC starts a thread for the grace
            logger.warning("calls are not cancelled before the end: %s", error)
        else:
            with trio.move_on_after(2 * grace_s):
                while not stopped.is_set():  # noqa: ASYNC110 - gRPC tells only threads
                    await trio.sleep(POLL_INTERVAL_S)
        threads.end()
        while threads.live:  # noqa: ASYNC110 - nothing else tells
            await trio.sleep(POLL_INTERVAL_S)
    if scope.cancelled_caught:
        logger.warning("calls are left at the end of a server, and end with the process")
