"""Driver calls with deadlines, made by helper processes that are kept warm.

A running call is never cancelled: killing the caller in the middle can leave the target out of step with the
driver (criu pull request 2547). A cancellation is delivered after the call, or after its deadline, whichever
comes first. A helper whose call expired is killed and never used again.
"""

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, final

import msgspec
import trio

from leasehold_worker import metrics
from leasehold_worker.change import Change
from leasehold_worker.driver.helper_protocol import (
    PROTOCOL_ENCODER,
    DriverCall,
    Greeting,
    Reply,
    Request,
)
from leasehold_worker.host.shared_libraries import LoadedLibrary

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
"""Loading libcuda and cuInit take up to 3 s on a host with eight GPUs."""

RETURN_TIMEOUT_S: Final = 0.02
"""Wait of a call for a busy helper before another one is started."""

REAP_TIMEOUT_S: Final = 2.0
"""Time for a killed helper to end. It may be stuck in the kernel, and is then abandoned."""

CALL_FLOOR_S: Final = 30.0
"""Least deadline of any call. Those that read or unlock take milliseconds; in containers 7 s were seen."""

HELPER_LIMIT: Final = 96
"""Limit of helpers, and so of calls, at once. It suffices for all commands and plans that run at once. So
calls that hang in one workload block no other."""

WARM_LIMIT: Final = 8
"""Helpers that are never ended for idleness."""

IDLE_LIMIT_S: Final = 60.0
"""Idle time after which the others end: starting one takes seconds on a host with many GPUs."""

REPLY_LIMIT_BYTES: Final = 65536


class DriverCallUnansweredError(Exception):
    """A driver call did not return, so its effect is unknown.

    Attributes:
        expired: The deadline passed. Otherwise the helper died.
    """

    def __init__(self, message: str, *, expired: bool) -> None:
        super().__init__(message)
        self.expired = expired


class DriverUnavailableError(Exception):
    """There is no usable driver; the text has the reason.

    Attributes:
        helper: The helper whose cuInit did not return. It was killed, and may hang in the kernel.
    """

    def __init__(self, message: str, helper: "_Helper | None" = None) -> None:
        super().__init__(message)
        self.helper = helper


@final
class _Helper:
    """One helper process, with at most one running call."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("a driver helper needs both its pipes")
        self._process = process
        self._requests = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
        self._replies = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        process.stdin.close()
        process.stdout.close()
        self._received = b""
        self.idle_since = 0.0

    @property
    def lives(self) -> bool:
        """Whether the helper is alive."""
        return self._process.poll() is None

    async def read_line(self) -> bytes:
        while b"\n" not in self._received:
            more = await self._replies.receive_some(REPLY_LIMIT_BYTES)
            if not more:
                raise EOFError("the driver helper ended")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line

    async def ask(self, request: Request) -> Reply:
        try:
            await self._requests.send_all(PROTOCOL_ENCODER.encode(request) + b"\n")
            return msgspec.json.decode(await self.read_line(), type=Reply)
        except (trio.BrokenResourceError, EOFError) as error:
            raise DriverCallUnansweredError(
                f"the driver helper ended during {request.call} of process {request.pid}", expired=False
            ) from error

    async def close(self) -> None:
        """Ends the process at once and reaps it, in bounded time even under cancellation."""
        with trio.CancelScope(shield=True):
            await self._requests.aclose()
            await self._replies.aclose()
            self._process.send_signal(signal.SIGKILL)
            with trio.move_on_after(REAP_TIMEOUT_S) as scope:
                while self._process.poll() is None:  # noqa: ASYNC110 - nothing else tells
                    await trio.sleep(0.005)
        if scope.cancelled_caught:
            logger.error("driver helper %d survives SIGKILL: it is stuck in the kernel", self._process.pid)


async def _start_helper() -> tuple[_Helper, Greeting]:
    # Without -P, Python would import from the worker's working directory, which may be another user's.
    # Started from the main thread, not from one of trio's: the kernel ends the helper with the thread
    # that started it. The worker's own mask would hide GPUs from the driver that a map must name.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - see above
            [sys.executable, "-P", "-m", "leasehold_worker.driver.helper", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(error) from error
    try:
        helper = _Helper(process)
    except OSError as error:
        with process:  # which closes its pipes and reaps it
            process.kill()
        raise _not_started(error) from error
    try:
        with trio.fail_after(START_TIMEOUT_S):
            greeting = msgspec.json.decode(await helper.read_line(), type=Greeting)
            metrics.HELPER_STARTS.inc()
            return helper, greeting
    except BaseException as error:
        await helper.close()
        if isinstance(error, trio.TooSlowError):
            raise DriverUnavailableError(
                f"cuInit did not return within {START_TIMEOUT_S:g} s", helper
            ) from error
        if isinstance(error, EOFError):
            raise DriverUnavailableError("the driver helper ended: see the worker's log") from error
        raise


def _not_started(error: OSError) -> DriverUnavailableError:
    return DriverUnavailableError(f"no driver helper can be started ({error.strerror}): try again later")


@final
class Driver:
    """The driver's checkpoint API, reached through helper processes. Made by :func:`open_driver`."""

    def __init__(self, call_floor_s: float = CALL_FLOOR_S) -> None:
        self.call_floor_s = call_floor_s
        """Shortest deadline of any call."""
        self._idle: deque[_Helper] = deque()
        self._returned = Change()
        """Notifies that a helper has become idle."""
        self._started: set[_Helper] = set()
        self._limit = trio.CapacityLimiter(HELPER_LIMIT)
        self._pid_locks: dict[int, trio.Lock] = {}
        self.cuda_version: int | None = None
        """CUDA version of the driver: 13000 is 13.0. None without a driver."""
        self.libcuda: LoadedLibrary | None = None
        """The user-mode driver that the helpers call. None without one."""
        self.bindings_version = ""
        """Version of cuda-bindings."""
        self.unavailable_reason: str | None = None
        """Why no call can succeed. None: calls can."""
        self._late_helper: _Helper | None = None
        """The helper of the last probe, if its cuInit did not return."""

    @property
    def has_stuck_probe(self) -> bool:
        """Whether the helper of the last probe hangs in the kernel."""
        return self._late_helper is not None and self._late_helper.lives

    @property
    def helpers(self) -> tuple[int, int]:
        """Numbers of idle and of busy helpers."""
        return len(self._idle), len(self._started) - len(self._idle)

    async def probe(self) -> None:
        """Starts a helper, and checks for a driver. Sets :attr:`unavailable_reason`.

        A helper whose cuInit failed is ended: a later cuInit can succeed, and to such a helper the driver
        reports CUDA processes as processes without CUDA.
        """
        async with self._limit:
            try:
                helper, greeting = await _start_helper()
            except DriverUnavailableError as error:
                self.unavailable_reason, self._late_helper = str(error), error.helper
                return
            self.cuda_version = greeting.cuda_version
            self.libcuda = greeting.libcuda
            self.bindings_version = greeting.bindings_version
            if greeting.init_result != 0:
                self.unavailable_reason = f"cuInit: {greeting.init_result_name}"
                await helper.close()
                return
            self.unavailable_reason = None
            self._started.add(helper)
            helper.idle_since = trio.current_time()
            self._idle.append(helper)
            self._returned.notify()

    async def call(self, request: Request, extra_s: float = 0.0) -> Reply:
        """Makes one call. Calls on the same pid wait for each other.

        A cancellation waits for a running call or for its deadline.

        Args:
            request: The call.
            extra_s: Time beyond the floor, without the wait for a helper.

        Raises:
            DriverCallUnansweredError: The deadline passed and the helper was killed, or it died by itself.
            DriverUnavailableError: There is no driver.
        """
        lock = self._pid_locks.setdefault(request.pid, trio.Lock())
        try:
            async with lock, self._limit:
                return await self._call_now(request, self.call_floor_s + extra_s)
        finally:
            if not lock.locked() and self._pid_locks.get(request.pid) is lock:
                del self._pid_locks[request.pid]

    async def _call_now(self, request: Request, timeout_s: float) -> Reply:
        helper = await self._take_helper()
        healthy = expired = False
        try:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + timeout_s) as scope:
                reply = await helper.ask(request)
                healthy = True
            if scope.cancelled_caught:
                expired = True
                raise DriverCallUnansweredError(
                    f"{request.call} of process {request.pid} did not return within {timeout_s:g} s",
                    expired=True,
                )
            return reply
        finally:
            if healthy:
                helper.idle_since = trio.current_time()
                self._idle.append(helper)
                self._returned.notify()
                await self._trim()
            else:
                metrics.HELPER_LOSSES.labels("expired" if expired else "died").inc()
                self._started.discard(helper)
                await helper.close()

    async def _trim(self) -> None:
        """Ends the helper with the longest idle time, if there are too many and it was idle for long."""
        longest = self._idle[0]
        if len(self._idle) > WARM_LIMIT and trio.current_time() - longest.idle_since > IDLE_LIMIT_S:
            self._idle.popleft()
            self._started.discard(longest)
            await longest.close()

    async def _take_helper(self) -> _Helper:
        """A warm helper, or a new one if none becomes idle soon: most calls are shorter than a start."""
        with trio.move_on_after(RETURN_TIMEOUT_S):
            while self._started and not self._idle:
                await self._returned.wait()
        while self._idle:
            helper = self._idle.pop()
            if helper.lives:
                return helper
            self._started.discard(helper)
            await helper.close()
        if self.unavailable_reason is not None:
            raise DriverUnavailableError(self.unavailable_reason)
        helper, greeting = await _start_helper()
        self._started.add(helper)
        if greeting.init_result != 0:
            self._started.discard(helper)
            await helper.close()
            raise DriverUnavailableError(f"cuInit: {greeting.init_result_name}")
        return helper

    async def close(self) -> None:
        """Ends every helper. No call runs any more."""
        while self._started:
            await self._started.pop().close()
        self._idle.clear()


@asynccontextmanager
async def open_driver(call_floor_s: float = CALL_FLOOR_S) -> AsyncIterator[Driver]:
    """Opens the driver, and ends its helpers at the end of the context."""
    driver = Driver(call_floor_s)
    try:
        await driver.probe()
        yield driver
    finally:
        await driver.close()


__all__ = [
    "Driver",
    "DriverCall",
    "DriverCallUnansweredError",
    "DriverUnavailableError",
    "Request",
    "open_driver",
]
