"""One session of ``leasehold top``: the first contact, the screen, and the end."""

import asyncio
import signal
import time
import traceback
from pathlib import Path
from typing import Final

from leasehold_client.aio.client import AsyncClient
from leasehold_client.errors import LeaseholdError
from leasehold_client.top.app import TopApp
from leasehold_client.top.contact import Contact

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)

_END_LIMIT_S: Final = 5
"""How long the end after a signal may take. Then SIGALRM ends the process."""


async def show(address: str, context: str | None, on_behalf_of: str, caller: str) -> int:
    """Shows the fleet until the user quits. Returns the exit code.

    A signal that ends the process restores the terminal first.

    Args:
        address: Address of the coordinator.
        context: Name of a context. None: none.
        on_behalf_of: The user for whom a service acts. Empty: the caller itself.
        caller: The calling user, for cordons.

    Raises:
        LeaseholdError: The coordinator does not answer, or refuses the caller, before the screen is shown. Or
            the page ended by a defect.
    """
    contact = Contact(time.monotonic)
    ended_by = 0
    async with AsyncClient(address, contact.failed, context, on_behalf_of) as client:
        contact.answered(await client.who_am_i())
        app = TopApp(client, contact, caller)

        loop = asyncio.get_running_loop()

        def end(number: int, frame: object) -> None:
            nonlocal ended_by
            ended_by = 128 + number
            signal.alarm(_END_LIMIT_S)  # a terminal that is gone may block the loop for good
            loop.call_soon_threadsafe(app.exit)

        for one in _ENDING:
            signal.signal(one, end)
        await app.run_async(mouse=False)
        signal.alarm(0)
        if app.failure is not None:
            raise _described(app.failure) from app.failure
        return ended_by or app.return_code or 0


def _described(failure: BaseException) -> LeaseholdError:
    """The defect that ended the page, in one line with its place."""
    if isinstance(failure, LeaseholdError):
        return failure
    places = traceback.extract_tb(failure.__traceback__)
    place = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return LeaseholdError(
        f"top ended by a defect of its own ({type(failure).__name__}{place}: {failure}): start it again, and "
        "report this line. Commands that were stored continue: `leasehold get commands` shows them"
    )
