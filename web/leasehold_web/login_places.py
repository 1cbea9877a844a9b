"""The bound on logins under way, so that slow logins of one browser don't keep out others."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, final

from leasehold_web.entries import LoginRefusedError

LOGIN_LIMIT: Final = 16
"""Most logins under way. A further one waits."""

LOGINS_PER_ADDRESS: Final = 4
"""Most logins of one address, with those that wait. A further one is refused."""

LOGIN_LIMIT_S: Final = 5.0
"""Longest time of a login."""

WAIT_LIMIT_S: Final = 10.0
"""Longest wait for a place. Meanwhile each of the slowest logins has given its place back."""


@final
class LoginPlaces:
    """The logins under way."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(LOGIN_LIMIT)
        self._of_address: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, address: str) -> AsyncIterator[None]:
        """The context of a login. A cancelled login gives its place back.

        Args:
            address: The host of the browser.

        Raises:
            LoginRefusedError: The address has too many logins under way, or the time has passed.
        """
        if self._of_address[address] >= LOGINS_PER_ADDRESS:
            raise LoginRefusedError(
                f"{LOGINS_PER_ADDRESS} logins of {address} are under way: try again in a moment"
            )
        self._of_address[address] += 1
        try:
            async with asyncio.timeout(WAIT_LIMIT_S) as limit, self._places:
                limit.reschedule(asyncio.get_running_loop().time() + LOGIN_LIMIT_S)
                yield
        except TimeoutError:
            raise LoginRefusedError("the login took too long, or too many are under way: try again") from None
        finally:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]
