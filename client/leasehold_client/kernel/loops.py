"""Adapters for applications with coroutines, whose methods run in an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar, TypeVarTuple, final

from leasehold_client.kernel.protocols import AsyncCheckpointableKernel, Health

C = TypeVar("C")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Loop(Protocol):
    """Runs coroutines in an event loop."""

    def run(self, method: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
        """Runs a method in the loop and waits for its result. Called from another thread."""
        ...


@final
class AwaitedKernel(Generic[C]):
    """An application with coroutines, as a :class:`CheckpointableKernel`."""

    def __init__(self, kernel: AsyncCheckpointableKernel[C], loop: Loop) -> None:
        self._kernel = kernel
        self._loop = loop

    def can_checkpoint(self) -> tuple[bool, str]:
        """Calls the coroutine of this name."""
        return self._loop.run(self._kernel.can_checkpoint)

    def checkpoint_size_estimate(self) -> int | None:
        """Calls the coroutine of this name."""
        return self._loop.run(self._kernel.checkpoint_size_estimate)

    def prepare(self) -> None:
        """Calls the coroutine of this name."""
        self._loop.run(self._kernel.prepare)

    def is_quiescent(self) -> bool:
        """Calls the coroutine of this name."""
        return self._loop.run(self._kernel.is_quiescent)

    def checkpoint(self) -> C:
        """Calls the coroutine of this name."""
        return self._loop.run(self._kernel.checkpoint)

    def cancel(self) -> None:
        """Calls the coroutine of this name."""
        self._loop.run(self._kernel.cancel)

    def restore(self, checkpoint: C) -> None:
        """Calls the coroutine of this name."""
        self._loop.run(self._kernel.restore, checkpoint)

    def health(self) -> Health:
        """Calls the coroutine of this name."""
        return self._loop.run(self._kernel.health)


@final
class AsyncioLoop:
    """The running asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: Future[object] | None = None

    def run(self, method: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
        """Runs a method in the loop and waits for its result."""

        async def call() -> T:
            return await method(*arguments)

        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        self._running = future  # type: ignore[assignment] # only to cancel it
        return future.result()

    def cancel(self) -> None:
        """Cancels the running method, if any."""
        if self._running is not None:
            self._running.cancel()


@final
class TrioLoop:
    """The current trio run."""

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._scope: trio.CancelScope | None = None

    def run(self, method: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
        """Runs a method in the loop and waits for its result."""

        async def call() -> T:
            with self._trio.CancelScope() as scope:
                self._scope = scope
                return await method(*arguments)
            raise RuntimeError("the application is no longer served")

        return self._trio.from_thread.run(call, trio_token=self._token)

    def cancel(self) -> None:
        """Cancels the running method, if any. Called in trio's thread."""
        if self._scope is not None:
            self._scope.cancel()
