"""Pages of what is held in memory: workers and GPUs."""

import asyncio
from collections.abc import Iterable
from typing import Final, TypeVar, final

from google.protobuf.message import Message

from leasehold_coordinator.lists.filters import Filter, matches
from leasehold_coordinator.lists.pages import PAGE_LIMIT_BYTES, Page, PageRequest, page_within

M = TypeVar("M", bound=Message)

TURN_LIMIT: Final = 250
"""Entries that are looked at in one turn of the event loop. A GPU takes about 10 us."""


@final
class MemoryLists:
    """Makes pages, one after the other, so that many large lists leave the event loop to others."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def page(
        self,
        items: Iterable[M],
        page: PageRequest[M],
        wanted: Filter[M],
        *,
        is_sorted: bool,
        limit_bytes: int = PAGE_LIMIT_BYTES,
    ) -> Page[M]:
        """A page of a list.

        Args:
            items: The entries of the list. Each is made when it is its turn.
            page: The page.
            wanted: The filter.
            is_sorted: Whether the entries come in the order of the list. Later entries are not built.
            limit_bytes: Bytes that fit into the answer.
        """
        order, after = page.order, None if page.after is None else page.order.rank(page.after)
        found: list[tuple[tuple[object, ...], M]] = []
        async with self._turn:
            for count, item in enumerate(items, 1):
                if count % TURN_LIMIT == 0:
                    found = _first(found, page.size)
                    await asyncio.sleep(0)
                if not matches(wanted, item):
                    continue
                rank = order.rank(order.position(item))
                if after is None or after < rank:
                    found.append((rank, item))
                if is_sorted and len(found) > page.size:
                    break
        listed = [item for _, item in _first(found, page.size)]
        fitting = page_within(listed, page.size, limit_bytes)
        return Page(fitting, order.position(fitting[-1]) if len(fitting) < len(listed) else None)


def _first(found: list[tuple[tuple[object, ...], M]], size: int) -> list[tuple[tuple[object, ...], M]]:
    """The entries of a page, and one more if there is one."""
    return sorted(found, key=lambda one: one[0])[: size + 1]
