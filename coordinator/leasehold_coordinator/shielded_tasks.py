"""Work that is finished even if its caller is cancelled.

A change has three steps: write the store, update memory, publish to watchers. gRPC cancels a handler at any
point once its peer has disconnected. A cancellation between the steps would leave half of a change.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from leasehold_coordinator.errors import FleetError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_UNDER_WAY: Final[set[asyncio.Task[Any]]] = set()
"""Strong references: the event loop holds tasks only weakly."""

SETTLE_TIMEOUT_S: Final = 10.0


def start(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Starts work in the background. The work must end by itself. A caller may await it, with a shield."""
    task = _begun(work)
    task.add_done_callback(_end_unheard)
    return task


def _begun(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    task = asyncio.get_running_loop().create_task(work)
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    return task


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits the work. If the caller is cancelled, the work continues in the background."""
    task = _begun(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_end_unheard)
        raise


def _end_unheard(task: asyncio.Task[Any]) -> None:
    """Handles the end of work without a caller: a refusal is dropped, and a defect is logged."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, FleetError):
        logger.error("background work failed", exc_info=error)


async def settle() -> None:
    """Waits at most 10 s for work under way, which must not outlive the store."""
    if _UNDER_WAY:
        await asyncio.wait(_UNDER_WAY, timeout=SETTLE_TIMEOUT_S)
