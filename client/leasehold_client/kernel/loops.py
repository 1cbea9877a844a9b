"""Kernels whose methods are coroutines, called from the thread that serves them."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar, TypeVarTuple, final

from leasehold_client.kernel.protocols import AsyncCheckpointableKernel, Health

C = TypeVar("C")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Loop(Protocol):
    """Where coroutines run."""

    def run(self, method: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
        """Runs a method there, and waits for it. In any other thread."""
        ...


@final
class AwaitedKernel(Generic[C]):
    """A kernel of coroutines, as one of plain threads."""

    def __init__(self, kernel: AsyncCheckpointableKernel[C], loop: Loop) -> None:
        self._kernel = kernel
        self._loop = loop

    def can_checkpoint(self) -> tuple[bool, str]:
        """Whether it could save itself now, and why not."""
        return self._loop.run(self._kernel.can_checkpoint)

    def checkpoint_size_estimate(self) -> int:
        """About how many bytes that would be."""
        return self._loop.run(self._kernel.checkpoint_size_estimate)

    def prepare(self) -> None:
        """Asks it to come to rest."""
        self._loop.run(self._kernel.prepare)

    def is_quiescent(self) -> bool:
        """Whether it is at rest."""
        return self._loop.run(self._kernel.is_quiescent)

    def checkpoint(self) -> C:
        """What it is, at rest."""
        return self._loop.run(self._kernel.checkpoint)

    def cancel(self) -> None:
        """Lets it go on."""
        self._loop.run(self._kernel.cancel)

    def restore(self, checkpoint: C) -> None:
        """Makes it what was saved."""
        self._loop.run(self._kernel.restore, checkpoint)

    def health(self) -> Health:
        """How it is."""
        return self._loop.run(self._kernel.health)


@final
class AsyncioLoop:
    """The asyncio loop that runs now."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: Future[object] | None = None

    def run(self, method: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
        """Runs a method there, and waits for it."""

        async def call() -> T:
            return await method(*arguments)

        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        self._running = future  # type: ignore[assignment] # only to cancel it
        return future.result()

    def cancel(self) -> None:
        """Cancels the method that runs, if one does."""
        if self._running is not None:
            self._running.cancel()


@final
class TrioLoop:
    """The run of trio that this is called from."""

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._scope: trio.CancelScope | None = None

    def run(self, method: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
        """Runs a method there, and waits for it."""

        async def call() -> T:
            with self._trio.CancelScope() as scope:
                self._scope = scope
                return await method(*arguments)
            raise RuntimeError("the kernel is not served any more")

        return self._trio.from_thread.run(call, trio_token=self._token)

    def cancel(self) -> None:
        """Cancels the method that runs, if one does. In trio's thread."""
        if self._scope is not None:
            self._scope.cancel()
