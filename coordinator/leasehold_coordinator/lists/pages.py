"""Pages of lists, by AIP-158, and their order, by AIP-132. Pure.

A page token holds the position of the last entry of its page: the values by which entries are sorted, and
an id. The next page begins after that position, whatever was inserted or deleted meanwhile. So an entry that
exists throughout, and whose values stay, is listed once.

A token also holds a digest of the position and of the request without its page fields. So a token is refused
by another method, for another parent, filter or order, and after damage. The digest has no secret: a client
that makes up a token gets a page that begins elsewhere in a list that the client may read anyway.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, final

import msgspec
from google.protobuf.message import Message
from leasehold.v1 import errors_pb2
from leasehold.v1.audit_service_pb2 import ListAuditEntriesRequest
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.event_service_pb2 import ListEventsRequest, ListLeaseHistoryRequest
from leasehold.v1.fleet_service_pb2 import ListGpusRequest, ListWorkersRequest
from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest

from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.lists.filter_fields import NUMBER_LIMIT, Value

DEFAULT_PAGE_SIZE: Final = 100
PAGE_SIZE_LIMIT: Final = 1000
"""A larger page is not refused, and has so many entries."""

PAGE_LIMIT_BYTES: Final = 3_500_000
"""Largest page. By default, clients of gRPC accept 4 MiB."""

ORDER_LIMIT: Final = 256
"""Characters of `order_by`."""

TOKEN_LIMIT: Final = 4_096
"""Characters of a page token. The longest values in one are names of 256 characters."""

_DIGEST_BYTES: Final = 12

M = TypeVar("M", bound=Message)
M_contra = TypeVar("M_contra", bound=Message, contravariant=True)

Position: TypeAlias = tuple[Value | None, ...]
"""The sort keys and the id of an entry. None: the entry has no such value."""


ListRequest: TypeAlias = (
    ListWorkersRequest
    | ListGpusRequest
    | ListWorkloadsRequest
    | ListCommandsRequest
    | ListEventsRequest
    | ListLeaseHistoryRequest
    | ListAuditEntriesRequest
)


class SortField(Protocol[M_contra]):
    """A field by which a list can be sorted."""

    @property
    def read(self) -> Callable[[M_contra], Value | None]:
        """The value of an entry."""

    @property
    def is_text(self) -> bool:
        """Whether values are text. Otherwise they are integers."""


@final
@dataclass(frozen=True, slots=True)
class SortKey(Generic[M]):
    """One of the fields by which a list is sorted.

    Attributes:
        name: Name of the field.
        field: The field.
        is_descending: Whether the largest value comes first.
    """

    name: str
    field: SortField[M]
    is_descending: bool = False


@final
@dataclass(frozen=True, slots=True)
class Order(Generic[M]):
    """The order of a list. The last key is unique, so that no two entries have the same position."""

    keys: tuple[SortKey[M], ...]

    def position(self, message: M) -> Position:
        """The position of an entry."""
        return tuple(key.field.read(message) for key in self.keys)

    def rank(self, position: Position) -> tuple[object, ...]:
        """The sort keys of positions. Entries without a value come first, or last if it is descending."""
        return tuple(
            _Descending(_rank(part)) if key.is_descending else _rank(part)
            for key, part in zip(self.keys, position, strict=True)
        )

    def is_position(self, position: Position) -> bool:
        """Whether each part has the type of its field."""
        return len(position) == len(self.keys) and all(
            part is None or (isinstance(part, str) if key.field.is_text else _is_integer(part))
            for key, part in zip(self.keys, position, strict=True)
        )


def _is_integer(part: Value) -> bool:
    return isinstance(part, int) and abs(part) < NUMBER_LIMIT


def _rank(part: Value | None) -> tuple[bool, Value]:
    return (part is not None, part if part is not None else 0)


@final
@dataclass(frozen=True, slots=True)
class _Descending:
    """A rank that is sorted from the largest to the smallest."""

    rank: tuple[bool, Value]

    def __lt__(self, other: "_Descending") -> bool:
        return other.rank < self.rank


@final
@dataclass(frozen=True, slots=True)
class PageRequest(Generic[M]):
    """The page that a client asks for.

    Attributes:
        size: Most entries.
        order: The order of the list.
        after: Position of the last entry of the page before. None: this is the first page.
        bound_to: The request that tokens of this list belong to.
    """

    size: int
    order: Order[M]
    after: Position | None
    bound_to: bytes

    def token(self, position: Position | None) -> str:
        """The token of the page after a position. Empty: there is no such page."""
        if position is None:
            return ""
        data = msgspec.msgpack.encode(position)
        return base64.urlsafe_b64encode(_digest(self.bound_to, data) + data).decode()


@final
@dataclass(frozen=True, slots=True)
class Page(Generic[M]):
    """A page of a list. It may have no items and yet a next page, if few entries match a filter.

    Attributes:
        items: The entries.
        last: Position after which the next page begins. None: there is no next page.
    """

    items: Sequence[M]
    last: Position | None


def page_request(request: ListRequest, order: Order[M], *parent_ids: str) -> PageRequest[M]:
    """The page that a request asks for.

    Args:
        request: The request.
        order: The order of the list.
        parent_ids: Ids of the worker and the workload that the request names. A name may pass to another one.

    Raises:
        FleetError: INVALID_TOKEN, the token is not of this list, filter and order.
    """
    bound_to = _binding(request, parent_ids)
    size = min(request.page_size or DEFAULT_PAGE_SIZE, PAGE_SIZE_LIMIT)
    after = _position(request.page_token, bound_to, order) if request.page_token else None
    return PageRequest(size, order, after, bound_to)


def _binding(request: Message, parent_ids: Sequence[str]) -> bytes:
    """The request that a token is bound to: its type, and all fields except those of the page."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("page_size")
    bare.ClearField("page_token")
    fields = bare.SerializeToString(deterministic=True)
    return msgspec.msgpack.encode((request.DESCRIPTOR.full_name, fields, parent_ids))


def _digest(bound_to: bytes, position: bytes) -> bytes:
    return blake2b(
        position, digest_size=_DIGEST_BYTES, key=blake2b(bound_to, digest_size=32).digest()
    ).digest()


def _position(token: str, bound_to: bytes, order: Order[M]) -> Position:
    try:
        data = base64.b64decode(token[: TOKEN_LIMIT + 1].encode("ascii"), altchars=b"-_", validate=True)
        digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if len(token) <= TOKEN_LIMIT and digest == _digest(bound_to, data):
            position: Position = msgspec.msgpack.decode(data, type=tuple[str | int | None, ...])
            if order.is_position(position):
                return position
    except (ValueError, binascii.Error):  # msgspec's errors are ValueErrors
        pass
    raise FleetError(
        errors_pb2.ERROR_REASON_INVALID_TOKEN,
        f"the page token {token[:64]!r} is not of this list with these parameters: keep filter, order_by and "
        "all else but page_size as they were, or list again from the start",
        field="page_token",
    )


@final
@dataclass(frozen=True, slots=True)
class Orders(Generic[M]):
    """The orders that a list can have.

    Attributes:
        fields: The fields by which the list can be sorted.
        default: The keys of the default order.
        unique: The key that is appended. None: each of the fields is unique.
    """

    fields: Mapping[str, SortField[M]]
    default: tuple[SortKey[M], ...]
    unique: SortKey[M] | None

    def parse(self, text: str) -> Order[M]:
        """The order that a client asks for, such as ``state, create_time desc``. Empty: the default.

        Raises:
            FleetError: INVALID_ARGUMENT, which names the rule and the remedy.
        """
        last = () if self.unique is None else (self.unique,)
        if len(text) > ORDER_LIMIT:
            raise invalid("order_by", f"an order_by of {len(text)} characters is too long: {ORDER_LIMIT} fit")
        if not text.strip():
            return Order((*self.default, *last))
        keys: list[SortKey[M]] = []
        for part in text.split(","):
            name, *direction = part.split() or [""]
            if (
                name not in self.fields
                or direction not in ([], ["desc"])
                or name in (key.name for key in keys)
            ):
                raise invalid(
                    "order_by",
                    f"invalid order {text!r} at {part.strip()!r}: write different fields of "
                    f"{', '.join(sorted(self.fields))}, each with or without ' desc', with commas between",
                )
            keys.append(SortKey(name, self.fields[name], bool(direction)))
        return Order((*keys, *last))


def page_within(found: Sequence[M], size: int, limit_bytes: int = PAGE_LIMIT_BYTES) -> list[M]:
    """The first entries: as many as a page may have and as fit into an answer, one at least."""
    page: list[M] = []
    used_bytes = 0
    for item in found[:size]:
        used_bytes += item.ByteSize()
        if page and used_bytes > limit_bytes:
            break
        page.append(item)
    return page
