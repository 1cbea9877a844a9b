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
"""Most bytes of a page. By default, clients of gRPC accept 4 MiB."""

Item = TypeVar("Item", bound=Message)
Read = TypeVar("Read", bound=Message)

OFFSET_LIMIT: Final = 2**62
"""The highest offset: far above any list, and within the integers of every database."""


@final
@dataclass(frozen=True, slots=True)
class Page(Generic[Read]):
    """A page of a list in the store.

    Attributes:
        items: The items. None stands for a row that can't be read.
        more: Another page follows.
    """

    items: Sequence[Read | None]
    more: bool

    @property
    def readable(self) -> list[Read]:
        """The readable items."""
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
            f"invalid page token {page_token!r}: list again from the start",
            field="page_token",
        ) from None
    return offset, page_size or DEFAULT_PAGE_SIZE


def page_within(found: Sequence[Item], size: int) -> list[Item]:
    """The items of a page: at most ``size`` items, and at most PAGE_LIMIT_BYTES unless one item is larger."""
    page: list[Item] = []
    used_bytes = 0
    for item in found[:size]:
        used_bytes += item.ByteSize()
        if page and used_bytes > PAGE_LIMIT_BYTES:
            break
        page.append(item)
    return page


def next_token(offset: int, size: int, *, more: bool) -> str:
    """The token of the next page, which begins ``size`` items after the offset. Empty: no next page."""
    return base64.urlsafe_b64encode(str(offset + size).encode("ascii")).decode() if more else ""
