"""The conversion of long answers to JSON, in slices.

A thousand commands take 60 ms, in which the event loop of a coordinator with a page would serve nobody else.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Final, final
from weakref import WeakValueDictionary

from google.protobuf.message import Message

from leasehold_web.documents import Document, document

SLICE_S: Final = 0.002
"""How long messages are converted without a rest. A single message may take longer."""

REST: Final = 2.0
"""The rest after a slice, as a multiple of its time. So answers of one caller take a third of the time."""


@final
class Conversions:
    """The conversions under way. Each caller has one at a time, in all of its sessions."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By caller."""

    async def documents(self, caller: str, messages: Iterable[Message]) -> list[Document]:
        """Messages as JSON."""
        found: list[Document] = []
        turn = self._turns.setdefault(caller, asyncio.Lock())
        async with turn:
            began_s = time.monotonic()
            for message in messages:
                found.append(document(message))
                if (took_s := time.monotonic() - began_s) >= SLICE_S:
                    await asyncio.sleep(REST * took_s)
                    began_s = time.monotonic()
        return found
