"""Pages of lists. Pure."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

from google.protobuf.message import Message
from leasehold.v1 import errors_pb2

from leasehold_coordinator.errors import FleetError, invalid

DEFAULT_PAGE_SIZE: Final = 100
PAGE_SIZE_LIMIT: Final = 1000
PAGE_LIMIT_BYTES: Final = 3_500_000
"""What a page holds at most: gRPC's clients take 4 MiB unless they are told otherwise."""

Item = TypeVar("Item", bound=Message)
Read = TypeVar("Read", bound=Message)

OFFSET_LIMIT: Final = 2**62
"""Far above every list, and a number that every database takes."""


@final
@dataclass(frozen=True, slots=True)
class Page(Generic[Read]):
    """A page of a list in the store.

    Attributes:
        items: The items. None: a row that can't be read, which counts as an item.
        more: Another page begins after it.
    """

    items: Sequence[Read | None]
    more: bool

    @property
    def readable(self) -> list[Read]:
        """The items without those that can't be read."""
        return [item for item in self.items if item is not None]


def page_of(page_size: int, page_token: str) -> tuple[int, int]:
    """The offset and size that a list request asks for.

    Raises:
        FleetError: INVALID_ARGUMENT for the size, INVALID_TOKEN for the token.
    """
    if page_size > PAGE_SIZE_LIMIT:
        raise invalid("page_size", f"page size {page_size} is above {PAGE_SIZE_LIMIT}: ask for less")
    if not page_token:
        return 0, page_size or DEFAULT_PAGE_SIZE
    try:
        offset = int(base64.urlsafe_b64decode(page_token.encode("ascii")))
        if not 0 <= offset <= OFFSET_LIMIT:
            raise ValueError(page_token)
    except (ValueError, binascii.Error):
        raise FleetError(
            errors_pb2.ERROR_REASON_INVALID_TOKEN,
            f"the page token {page_token!r} is not one of ours: list again from the start",
            field="page_token",
        ) from None
    return offset, page_size or DEFAULT_PAGE_SIZE


def page_within(found: Sequence[Item], size: int) -> list[Item]:
    """The items of a page: as many as are asked for, and fit into an answer; one at least."""
    page: list[Item] = []
    used_bytes = 0
    for item in found[:size]:
        used_bytes += item.ByteSize()
        if page and used_bytes > PAGE_LIMIT_BYTES:
            break
        page.append(item)
    return page


def next_token(offset: int, size: int, *, more: bool) -> str:
    """The token of the page after so many items from the offset on; empty where there is none."""
    return base64.urlsafe_b64encode(str(offset + size).encode("ascii")).decode() if more else ""
