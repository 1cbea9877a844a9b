"""Work that is finished even when whoever asked for it goes away.

A change is a write to the store, one to memory and word to those who watch. gRPC cancels a handler whose
peer is gone wherever it stands: between these three, the coordinator would hold half of a change.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_UNDER_WAY: Final[set[asyncio.Task[Any]]] = set()
"""The event loop itself holds tasks weakly."""

SETTLE_TIMEOUT_S: Final = 10.0


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Does the work to its end. A caller that is cancelled stops waiting, and the work goes on."""
    task = asyncio.get_running_loop().create_task(work)
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    return await asyncio.shield(task)


async def settle() -> None:
    """Waits for the work that is under way, 10 s at most, so that none outlives the store."""
    if _UNDER_WAY:
        await asyncio.wait(_UNDER_WAY, timeout=SETTLE_TIMEOUT_S)
