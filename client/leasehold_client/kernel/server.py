"""How a program serves its kernel: in plain threads, trio or asyncio."""

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
"""How long a worker may take to know the kernel."""

RESTORE_WAIT_S: Final = 3600.0
"""How long a restore may take."""

RESTORE_VARIABLE: Final = "LEASEHOLD_RESTORE"
"""Set by the worker where it starts a program that it is about to restore."""

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
    """Serves a kernel to the worker of the workload that this process belongs to, in a thread of its own.

    Returns once the application may begin: it was restored, or there is nothing to restore. From then on the
    worker may call the kernel at any time, until what is returned is closed. A workload has one kernel.

    Args:
        kernel: The kernel.
        facts: Which one it is.
        socket: The worker's socket. None: LEASEHOLD_SOCKET, which the programs of workloads have.
        required: Raises where there is no worker. Else the application begins without, and is not served
            until one answers. A program that was started to be restored never begins without.
        wait_s: How long the worker may take to know it.
        restore_wait_s: How long a restore that the worker has announced may take.

    Raises:
        LeaseholdError: It is refused, or was to be restored and could not be; or NoWorkerError.
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
    """As :func:`serve`, for as long as the context lasts, with methods that run on trio.

    They run as system tasks. At the end of the context the one that runs is cancelled.
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
    """As :func:`serve`, for as long as the context lasts, with methods that run in asyncio's loop.

    At the end of the context the one that runs is cancelled.
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
    """Whether the worker started this program to restore it."""
    return bool(os.environ.get(RESTORE_VARIABLE))


def _path(socket: str | Path | None, required: bool) -> str | Path | None:
    path = socket or os.environ.get(SOCKET_VARIABLE)
    if path is None and (required or _is_announced()):
        raise NoWorkerError(
            f"{SOCKET_VARIABLE} is not set, so this process belongs to no workload: start it with `leasehold "
            "run` or `leasehold exec`, serve within `local.claim()`, or say required=False"
        )
    return path
