"""The callers of the web page that this process serves: each of their calls carries a secret of the login."""

import hashlib
import secrets
from collections.abc import Callable
from typing import Final, final

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.local_tokens import SCHEME

SECRET_BYTES: Final = 32


@final
class WebCallers:
    """The callers that are logged in. The secrets never leave this process."""

    def __init__(self) -> None:
        self._callers: dict[bytes, Caller] = {}

    def add(self, caller: Caller) -> tuple[str, Callable[[], None]]:
        """Adds a caller.

        Returns:
            The ``authorization`` header of its calls, and a function that ends its login.
        """
        header = SCHEME + secrets.token_urlsafe(SECRET_BYTES)
        key = _digest(header)
        self._callers[key] = caller

        def leave() -> None:
            self._callers.pop(key, None)

        return header, leave

    def find(self, header: str) -> Caller | None:
        """The caller with this header. None: nobody is logged in with it."""
        return self._callers.get(_digest(header))


def _digest(header: str) -> bytes:
    """A digest, since a comparison of secrets in a dictionary could tell by its time how far they match."""
    return hashlib.sha256(header.encode()).digest()
