"""Pages of lists: workloads, commands, events, lease spans and the audit."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar, final

import sqlalchemy as sa
from google.protobuf.message import Message
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.command_pb2 import Command
from leasehold.v1.event_pb2 import Event
from leasehold.v1.lease_pb2 import LeaseSpan
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.lists.filters import Filter
from leasehold_coordinator.lists.pages import Page, PageRequest
from leasehold_coordinator.storage import schema, stored_lists
from leasehold_coordinator.storage.readers import Readers
from leasehold_coordinator.storage.record_decoder import RecordDecoder
from leasehold_coordinator.storage.stored_lists import Clause, StoredList, read_page

Record = TypeVar("Record", bound=Message)


@final
class RecordLists:
    """The lists of a store. They skip damaged rows."""

    def __init__(self, readers: Readers, decoder: RecordDecoder) -> None:
        self._readers = readers
        self._decoder = decoder

    async def workloads(
        self,
        page: PageRequest[Workload],
        wanted: Filter[Workload],
        view: Callable[[Workload], Workload],
        *,
        include_ended: bool,
        worker_id: str | None,
    ) -> Page[Workload]:
        """A page of workloads. The filter sees the view of each."""
        table = schema.workloads
        statement = sa.select(table)
        if not include_ended:
            statement = statement.where(~table.c.ended)
        if worker_id is not None:
            statement = statement.where(table.c.worker_id == worker_id)
        return await self._page(Workload, stored_lists.WORKLOADS, statement, page, wanted, view)

    async def commands(
        self,
        page: PageRequest[Command],
        wanted: Filter[Command],
        view: Callable[[Command], Command],
        *,
        workload_id: str | None,
        of_workload: Collection[str] = (),
        may_match: Collection[str] = (),
    ) -> Page[Command]:
        """A page of commands. The filter sees the view of each.

        The column of the workload has the first workload of a command. Other workloads need the arguments.

        Args:
            page: The page.
            wanted: The filter.
            view: The view.
            workload_id: Only commands of this workload. None: all.
            of_workload: Ids of commands of this workload whose first workload may be another.
            may_match: Ids of commands that may match the filter by a workload that is not their first.
        """
        columns = schema.commands.c
        statement = sa.select(schema.commands)
        if workload_id is not None:
            is_first = columns.workload_id == workload_id
            # Without OR where possible: the index of the workload is also in the order of the list.
            statement = statement.where(
                sa.or_(is_first, columns.command_id.in_(of_workload)) if of_workload else is_first
            )
        also = columns.command_id.in_(may_match) if may_match else None
        return await self._page(Command, stored_lists.COMMANDS, statement, page, wanted, view, also)

    async def events(
        self,
        page: PageRequest[Event],
        wanted: Filter[Event],
        view: Callable[[Event], Event],
        *,
        worker_id: str | None,
        workload_id: str | None,
    ) -> Page[Event]:
        """A page of events. The filter sees the view of each."""
        table = schema.events
        statement = sa.select(table)
        if worker_id is not None:
            statement = statement.where(table.c.worker_id == worker_id)
        if workload_id is not None:
            statement = statement.where(table.c.workload_id == workload_id)
        return await self._page(Event, stored_lists.EVENTS, statement, page, wanted, view)

    async def lease_spans(
        self,
        page: PageRequest[LeaseSpan],
        view: Callable[[LeaseSpan], LeaseSpan],
        time_ns: tuple[int, int],
        *,
        worker_id: str | None,
        workload_id: str | None,
        gpu_uuid: str | None,
        parked: bool | None,
    ) -> Page[LeaseSpan]:
        """A page of the lease spans that overlap a time, from its begin to its end.

        Args:
            page: The page.
            view: Hides fields.
            time_ns: The time.
            worker_id: Only spans of this worker.
            workload_id: Only spans of this workload.
            gpu_uuid: Only spans of this GPU.
            parked: Only those of parked workloads, or only the others.
        """
        columns = schema.lease_spans.c
        start_ns, end_ns = time_ns
        statement = sa.select(schema.lease_spans).where(
            columns.end_time_ns > start_ns, columns.begin_time_ns < end_ns
        )
        if parked is not None:  # each index has the ids
            is_parked = columns.span_id.startswith(schema.PARKED_SPAN)
            statement = statement.where(is_parked if parked else sa.not_(is_parked))
        for column, value in (
            (columns.worker_id, worker_id),
            (columns.workload_id, workload_id),
            (columns.gpu_uuid, gpu_uuid),
        ):
            if value is not None:
                statement = statement.where(column == value)
        return await self._page(LeaseSpan, stored_lists.LEASE_SPANS, statement, page, Filter(), view)

    async def audit(self, page: PageRequest[AuditEntry], wanted: Filter[AuditEntry]) -> Page[AuditEntry]:
        """A page of the audit."""
        return await self._page(AuditEntry, stored_lists.AUDIT, sa.select(schema.audit), page, wanted, _whole)

    async def _page(
        self,
        kind: type[Record],
        listed: StoredList,
        statement: sa.Select[Any],
        page: PageRequest[Record],
        wanted: Filter[Record],
        view: Callable[[Record], Record],
        also: Clause | None = None,
    ) -> Page[Record]:
        def decode(row: sa.Row[Any]) -> Record | None:
            record = self._decoder.decode_if_whole(kind, listed.table, row)
            return None if record is None else view(record)

        return await self._readers.read_page(
            lambda connection: read_page(connection, listed, statement, page, wanted, decode, also)
        )


def _whole(entry: Record) -> Record:
    """The view of an entry that is shown as it is."""
    return entry
