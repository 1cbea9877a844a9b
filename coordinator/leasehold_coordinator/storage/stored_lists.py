"""The lists of the store: their columns, and filters and positions of pages as conditions of SQL.

Only some fields of an entry have a column; the others are in the record. So the SQL condition of a filter may
select rows that the filter does not match, but it selects every row that the filter matches.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, final

import sqlalchemy as sa
from google.protobuf.message import Message

from leasehold_coordinator.core import command_states, workload_states
from leasehold_coordinator.lists.filter_fields import Bound
from leasehold_coordinator.lists.filters import All, Condition, Either, Filter, Negation, matches
from leasehold_coordinator.lists.pages import PAGE_LIMIT_BYTES, Order, Page, PageRequest, Position
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.schema import event_id_at

M = TypeVar("M", bound=Message)

Clause: TypeAlias = sa.ColumnElement[bool]

SortColumns: TypeAlias = Sequence[tuple[sa.Column[Any], bool]]
"""Columns by which rows are sorted, each with whether it is descending. The last is unique."""

SCAN_LIMIT: Final = 10_000
"""Rows that a page with a filter looks through."""

SCAN_LIMIT_BYTES: Final = 64 * 2**20
"""Largest sum of the records that a page looks through."""

SCAN_LIMIT_S: Final = 0.1
"""CPU time for which a page with a filter looks through rows. Lists of other clients wait that long."""

CLOCK_SLACK_NS: Final = 10**9
"""Largest difference between the time in an event and the time in its id."""


@final
@dataclass(frozen=True, slots=True)
class StoredList:
    """A table of the store with its list in the API.

    Attributes:
        table: The table.
        sorted_by: Columns of the fields by which the list is sorted.
        exact: Columns with the values of fields. An empty text stands for no value.
        implied: What a restriction of a field implies, given its comparator and value. None: nothing.
    """

    table: sa.Table
    sorted_by: Mapping[str, sa.Column[Any]]
    exact: Mapping[str, sa.Column[Any]]
    implied: Mapping[str, Callable[[str, Any], Clause | None]]

    def sort_columns(self, order: Order[Any]) -> SortColumns:
        """The columns of an order."""
        return [(self.sorted_by[key.name], key.is_descending) for key in order.keys]

    def page(
        self,
        statement: sa.Select[Any],
        keys: SortColumns,
        after: Position | None,
        wanted: Filter[Any],
        also: Clause | None,
    ) -> sa.Select[Any]:
        """The rows of a statement behind a position, in order, without some that a filter does not match.

        Args:
            statement: All rows.
            keys: The order.
            after: The position. None: the begin.
            wanted: The filter.
            also: Rows that may match, whatever their columns say. None: the columns are right for each row.
        """
        if after is not None:
            statement = statement.where(_behind(after, keys))
        if wanted.condition is not None:
            clause = _narrowed(wanted.condition, self)
            if clause is not None:
                statement = statement.where(clause if also is None else sa.or_(clause, also))
        directions = [column.desc() if is_descending else column for column, is_descending in keys]
        return statement.order_by(*directions)


def _ended_by(table: sa.Table, ended: frozenset[int]) -> Callable[[str, Any], Clause | None]:
    def implied(comparator: str, state: int) -> Clause | None:
        if comparator != "=":
            return None
        return table.c.ended if state in ended else ~table.c.ended

    return implied


def _id_at(comparator: str, time_ns: int) -> Clause | None:
    """The ids of events are in the order of their times."""
    if time_ns < CLOCK_SLACK_NS:
        return None
    earliest, latest = event_id_at(time_ns - CLOCK_SLACK_NS), event_id_at(time_ns + CLOCK_SLACK_NS)
    if comparator in (">", ">="):
        return schema.events.c.event_id >= earliest
    return schema.events.c.event_id <= latest if comparator in ("<", "<=") else None


def _workload_named(comparator: str, wanted: frozenset[str]) -> Clause | None:
    if comparator != "=":
        return None
    return sa.or_(schema.workloads.c.workload_id.in_(wanted), schema.workloads.c.name.in_(wanted))


WORKLOADS: Final = StoredList(
    schema.workloads,
    {
        "create_time": schema.workloads.c.create_time_ns,
        "name": schema.workloads.c.name,
        "workload_id": schema.workloads.c.workload_id,
    },
    {
        "worker": schema.workloads.c.worker_id,
        "name": schema.workloads.c.name,
        "create_time": schema.workloads.c.create_time_ns,
    },
    {
        "state": _ended_by(schema.workloads, frozenset(workload_states.ENDED)),
        "workload": _workload_named,
    },
)

COMMANDS: Final = StoredList(
    schema.commands,
    {
        "create_time": schema.commands.c.create_time_ns,
        "command_id": schema.commands.c.command_id,
    },
    {
        "command_id": schema.commands.c.command_id,
        "worker": schema.commands.c.worker_id,
        "workload": schema.commands.c.workload_id,
        "create_time": schema.commands.c.create_time_ns,
    },
    {"state": _ended_by(schema.commands, frozenset(command_states.OUTCOMES))},
)

EVENTS: Final = StoredList(
    schema.events,
    {"time": schema.events.c.event_id},
    {"worker": schema.events.c.worker_id, "workload": schema.events.c.workload_id},
    {"time": _id_at},
)

LEASE_SPANS: Final = StoredList(
    schema.lease_spans,
    {"end_time": schema.lease_spans.c.end_time_ns, "span_id": schema.lease_spans.c.span_id},
    {},
    {},
)

AUDIT: Final = StoredList(
    schema.audit,
    {"number": schema.audit.c.number},
    {"number": schema.audit.c.number, "identity": schema.audit.c.identity},
    {},
)


def read_page(
    connection: sa.Connection,
    listed: StoredList,
    statement: sa.Select[Any],
    page: PageRequest[M],
    wanted: Filter[M],
    decode: Callable[[sa.Row[Any]], M | None],
    also: Clause | None = None,
) -> Page[M]:
    """A page of as many rows as fit into an answer, one at least. Others are neither read nor parsed.

    With a filter, the page ends after 10,000 rows, 64 MiB or 0.1 s of CPU time, however few match.

    Args:
        connection: The connection to read on.
        listed: The list.
        statement: All rows of the list.
        page: The page.
        wanted: The filter.
        decode: Reads a record. None: the row is damaged, and the list leaves it out.
        also: As :meth:`StoredList.page`.
    """
    keys = listed.sort_columns(page.order)
    row_limit = page.size if wanted.condition is None else SCAN_LIMIT
    time_limit_s = None if wanted.condition is None else time.thread_time() + SCAN_LIMIT_S
    selected = listed.page(statement, keys, page.after, wanted, also).limit(row_limit + 1)
    items: list[M] = []
    used_bytes = scanned_bytes = 0
    last: Position | None = None
    with connection.execute(selected) as rows:
        for count, row in enumerate(rows):
            size_bytes = len(row.record) if isinstance(row.record, bytes) else 0
            scanned_bytes += size_bytes
            is_full = len(items) == page.size or (bool(items) and used_bytes + size_bytes > PAGE_LIMIT_BYTES)
            is_late = time_limit_s is not None and time.thread_time() > time_limit_s
            if count and (is_full or is_late or count == row_limit or scanned_bytes > SCAN_LIMIT_BYTES):
                return Page(items, last)
            item = decode(row)
            if item is not None and matches(wanted, item):
                items.append(item)
                used_bytes += size_bytes
            position = tuple(row._mapping[column] for column, _ in keys)
            last = position if page.order.is_position(position) else last
    return Page(items, None)


def _narrowed(condition: Condition[Any], listed: StoredList) -> Clause | None:
    """A condition of rows that the entries of a filter's condition satisfy. None: each row may match."""
    match condition:
        case Bound():
            exact = _exact(condition, listed)
            implied = listed.implied.get(condition.field)
            if exact is not None or implied is None or condition.value is None:
                return exact
            return implied(condition.comparator, condition.value)
        case Negation(part):
            exact = _exact(part, listed)
            return None if exact is None else sa.not_(exact)
        case All(parts):
            found = [clause for part in parts if (clause := _narrowed(part, listed)) is not None]
            return sa.and_(*found) if found else None
        case Either(parts):
            found = [clause for part in parts if (clause := _narrowed(part, listed)) is not None]
            return sa.or_(*found) if len(found) == len(parts) else None


def _exact(condition: Condition[Any], listed: StoredList) -> Clause | None:
    """The condition of just the rows whose entries match. None: columns don't tell."""
    match condition:
        case Bound():
            column = listed.exact.get(condition.field)
            return None if column is None else _comparison(column, condition)
        case Negation(part):
            exact = _exact(part, listed)
            return None if exact is None else sa.not_(exact)
        case All(parts) | Either(parts):
            found = [clause for part in parts if (clause := _exact(part, listed)) is not None]
            if len(found) < len(parts):
                return None
            return sa.and_(*found) if isinstance(condition, All) else sa.or_(*found)


def _comparison(column: sa.Column[Any], restriction: Bound[Any]) -> Clause | None:
    value, comparator = restriction.value, restriction.comparator
    if value is None or comparator == ":":
        return None
    if isinstance(value, int):
        return column.op(comparator, is_comparison=True)(value)
    values = value if isinstance(value, frozenset) else {value}
    # Equality with one value lets SQLite read an index in the order of the list.
    equal = column == next(iter(values)) if len(values) == 1 else column.in_(values)
    return sa.and_(column != "", equal if comparator == "=" else sa.not_(equal))


def _behind(position: Position, keys: SortColumns) -> Clause:
    """The condition of the rows behind a position of a list.

    Args:
        position: The position, with a value for each column.
        keys: The columns by which the list is sorted.
    """
    if None in position:
        return sa.false()  # no column is ever NULL
    clauses: list[Clause] = []
    before: list[Clause] = []
    for (column, is_descending), value in zip(keys, position, strict=True):
        clauses.append(sa.and_(*before, column < value if is_descending else column > value))
        before.append(column == value)
    (first, is_descending), value = keys[0], position[0]
    # The first condition follows from the others. It lets an index begin at the position.
    return sa.and_(first <= value if is_descending else first >= value, sa.or_(*clauses))
