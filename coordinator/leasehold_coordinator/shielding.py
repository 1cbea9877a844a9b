"""Work that is finished even when whoever asked for it goes away.

A change is a write to the store, one to memory and word to those who watch. gRPC cancels a handler whose
peer is gone wherever it stands: between these three, the coordinator would hold half of a change.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from leasehold_coordinator.errors import FleetError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_UNDER_WAY: Final[set[asyncio.Task[Any]]] = set()
"""The event loop itself holds tasks weakly."""

SETTLE_TIMEOUT_S: Final = 10.0


def start(work: Coroutine[Any, Any, None]) -> None:
    """Begins work that nobody waits for, and that has an end of its own."""
    _begun(work).add_done_callback(_end_unheard)


def _begun(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    task = asyncio.get_running_loop().create_task(work)
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    return task


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Does the work to its end. A caller that is cancelled stops waiting, and the work goes on."""
    task = _begun(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_end_unheard)
        raise


def _end_unheard(task: asyncio.Task[Any]) -> None:
    """Takes the end of work whose caller has gone: a refusal is nobody's any more, a defect is logged."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, FleetError):
        logger.error("work that nobody waited for has failed", exc_info=error)


async def settle() -> None:
    """Waits for the work that is under way, 10 s at most, so that none outlives the store."""
    if _UNDER_WAY:
        await asyncio.wait(_UNDER_WAY, timeout=SETTLE_TIMEOUT_S)
