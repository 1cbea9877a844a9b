"""Entry points that serve an application: for plain threads, trio and asyncio."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from leasehold_client.config import SOCKET_VARIABLE
from leasehold_client.kernel.loops import AsyncioLoop, AwaitedKernel, TrioLoop
from leasehold_client.kernel.protocols import (
    AsyncCheckpointableKernel,
    CheckpointableKernel,
    KernelFacts,
)
from leasehold_client.kernel.session import ServedKernel
from leasehold_client.local.worker import NoWorkerError

WAIT_S: Final = 30.0
"""Default of the longest wait for a worker."""

RESTORE_WAIT_S: Final = 3600.0
"""Default of the longest wait for a restore."""

RESTORE_VARIABLE: Final = "LEASEHOLD_RESTORE"
"""Environment variable that the worker sets for a program that it is about to restore."""

C = TypeVar("C")


def serve(
    kernel: CheckpointableKernel[C],
    facts: KernelFacts[C],
    *,
    socket: str | Path | None = None,
    required: bool = True,
    wait_s: float = WAIT_S,
    restore_wait_s: float = RESTORE_WAIT_S,
) -> ServedKernel[C]:
    """Serves an application to the worker of its workload, in a separate thread.

    Returns once the application may start: after its restore, or if there is nothing to restore. From then on
    the worker may call ``kernel`` at any time until the returned object is closed. A workload has one
    application.

    Args:
        kernel: The application.
        facts: Identity and checkpoint format of the application.
        socket: The worker's socket. None: LEASEHOLD_SOCKET, which programs of workloads have.
        required: Whether a missing worker raises an error. Otherwise the application starts without a worker,
            and is served once a worker answers. A program that the worker starts for a restore always
            requires the worker.
        wait_s: Longest wait for the worker.
        restore_wait_s: Longest wait for a restore that the worker has announced.

    Raises:
        LeaseholdError: The worker refuses the application, or its restore failed.
        NoWorkerError: No worker answers, and ``required`` is set.
    """
    served = ServedKernel(kernel, facts, _path(socket, required), announced=_is_announced())
    try:
        served.wait_begun(wait_s, restore_wait_s, required=required)
    except BaseException:
        served.close()
        raise
    return served


@asynccontextmanager
async def serve_trio(
    kernel: AsyncCheckpointableKernel[C],
    facts: KernelFacts[C],
    *,
    socket: str | Path | None = None,
    required: bool = True,
    wait_s: float = WAIT_S,
    restore_wait_s: float = RESTORE_WAIT_S,
) -> AsyncIterator[ServedKernel[C]]:
    """As :func:`serve`, while the context lasts, with methods that run as trio system tasks.

    The end of the context cancels a running method.
    """
    import trio

    path = _path(socket, required)
    loop = TrioLoop()
    served = ServedKernel(AwaitedKernel(kernel, loop), facts, path, announced=_is_announced())
    wait = partial(served.wait_begun, wait_s, restore_wait_s, required=required)
    try:
        await trio.to_thread.run_sync(wait, abandon_on_cancel=True)
        yield served
    finally:
        loop.cancel()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(served.close)


@asynccontextmanager
async def serve_asyncio(
    kernel: AsyncCheckpointableKernel[C],
    facts: KernelFacts[C],
    *,
    socket: str | Path | None = None,
    required: bool = True,
    wait_s: float = WAIT_S,
    restore_wait_s: float = RESTORE_WAIT_S,
) -> AsyncIterator[ServedKernel[C]]:
    """As :func:`serve`, while the context lasts, with methods that run in the asyncio loop.

    The end of the context cancels a running method.
    """
    path = _path(socket, required)
    loop = AsyncioLoop()
    served = ServedKernel(AwaitedKernel(kernel, loop), facts, path, announced=_is_announced())
    wait = partial(served.wait_begun, wait_s, restore_wait_s, required=required)
    try:
        await asyncio.to_thread(wait)
        yield served
    finally:
        loop.cancel()
        await asyncio.shield(asyncio.to_thread(served.close))


def _is_announced() -> bool:
    """Whether the worker started this program for a restore."""
    return bool(os.environ.get(RESTORE_VARIABLE))


def _path(socket: str | Path | None, required: bool) -> str | Path | None:
    path = socket or os.environ.get(SOCKET_VARIABLE)
    if path is None and (required or _is_announced()):
        raise NoWorkerError(
            f"{SOCKET_VARIABLE} is not set, so this process belongs to no workload: start it with `leasehold "
            "run` or `leasehold exec`, serve within `local.claim()`, or pass required=False"
        )
    return path
