"""The pace of requests of each address. Anybody can send requests, and each takes time of the event loop."""

import asyncio
from typing import Final, final

REQUESTS_PER_S: Final = 200.0
BURST_S: Final = 2.0
"""An address that was idle may use its rate of so many seconds at once."""

ADDRESS_LIMIT: Final = 4_096
"""Addresses that are counted apart. All further addresses share one pace."""

_OTHERS: Final = "others"


@final
class RequestPace:
    """The recent requests of each address. Requests above the rate wait, at most one on each connection."""

    def __init__(self) -> None:
        self._due_s: dict[str, float] = {}
        """By address: when its next request is due if all requests came at the rate."""

    async def wait(self, address: str, requests: float = 1.0) -> None:
        """Counts a request, and waits until the rate permits it.

        Args:
            address: The host of the browser.
            requests: The cost of the request, in requests.
        """
        now = asyncio.get_running_loop().time()
        if address not in self._due_s and len(self._due_s) >= ADDRESS_LIMIT:
            self._due_s = {one: due_s for one, due_s in self._due_s.items() if due_s > now - BURST_S}
            if len(self._due_s) >= ADDRESS_LIMIT:
                address = _OTHERS
        due_s = max(self._due_s.get(address, 0.0), now - BURST_S) + requests / REQUESTS_PER_S
        self._due_s[address] = due_s
        if due_s > now:
            await asyncio.sleep(due_s - now)
