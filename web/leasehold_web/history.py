"""The past for our scripts: lease spans, and commands and events by time."""

import asyncio
import re
import time
from typing import Final

from aiohttp import web
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.event_service_pb2 import ListEventsRequest, ListLeaseHistoryRequest

from leasehold_web.answers import CALL_TIMEOUT_S, ID, answer, documents_of
from leasehold_web.documents import Document, milliseconds
from leasehold_web.guards import SESSION
from leasehold_web.refusals import problem
from leasehold_web.workload_names import workload_names

WORKLOADS_LIMIT: Final = 50
"""Most workloads of one question: their ids fit the line of a request."""

HISTORY_PAGES: Final = 6
HISTORY_PAGE_SIZE: Final = 1_000
MARKS_LIMIT: Final = 1_000
COMMAND_TIME_S: Final = 600
"""The longest default timeout of a command: an earlier command is hardly under way."""


async def get_names(request: web.Request) -> web.Response:
    """The names of some workloads by id, also of ended ones."""
    return answer(await workload_names(await request[SESSION].entry.api(), _workloads(request)))


async def get_history(request: web.Request) -> web.Response:
    """The uses of GPUs and the parked times within a time, each the latest first.

    The answer also has the server's time, and whether it lacks uses or parked times. Parked times have a
    bound of their own: many workloads may be parked, and keep out no use of a GPU.
    """
    now_ms = 1000 * time.time()  # before the first page: a later change may be missing
    (spans, is_truncated), (parked, is_parked_truncated) = await asyncio.gather(
        _spans(request, parked=False), _spans(request, parked=True)
    )
    return answer(
        {
            "spans": spans,
            "is_truncated": is_truncated,
            "parked": parked,
            "is_parked_truncated": is_parked_truncated,
            "time": now_ms,
        }
    )


async def _spans(request: web.Request, *, parked: bool) -> tuple[list[Document], bool]:
    """Spans of a time, and whether there are more."""
    api = await request[SESSION].entry.api()
    asked = ListLeaseHistoryRequest(
        page_size=HISTORY_PAGE_SIZE,
        worker=request.query.get("worker", ""),
        workload=request.query.get("workload", ""),
        gpu_uuid=request.query.get("gpu", ""),
        start_time=_moment(request, "start"),
        end_time=_moment(request, "end"),
        parked=parked,
    )
    spans: list[Document] = []
    for _ in range(HISTORY_PAGES):
        page = await api.events.ListLeaseHistory(asked, metadata=api.metadata, timeout=CALL_TIMEOUT_S)
        spans += await documents_of(request, page.spans)
        asked.page_token = page.next_page_token
        if not asked.page_token:
            break
    return spans, bool(asked.page_token)


async def get_marks(request: web.Request) -> web.Response:
    """The commands and events of a time, the latest first, and the time since which both are complete."""
    api = await request[SESSION].entry.api()
    start, end = _moment(request, "start"), _moment(request, "end")
    commands, events = await asyncio.gather(
        api.commands.ListCommands(
            ListCommandsRequest(page_size=MARKS_LIMIT, filter=_commands_within(start, end)),
            metadata=api.metadata,
            timeout=CALL_TIMEOUT_S,
        ),
        api.events.ListEvents(
            ListEventsRequest(page_size=MARKS_LIMIT, filter=_within("time", start, end)),
            metadata=api.metadata,
            timeout=CALL_TIMEOUT_S,
        ),
    )
    found: dict[str, object] = {
        "commands": await documents_of(request, commands.commands),
        "events": await documents_of(request, events.events),
    }
    cuts = [one.create_time for one in commands.commands[-1:] if commands.next_page_token]
    cuts += [one.time for one in events.events[-1:] if events.next_page_token]
    if cuts:
        found["complete_from"] = max(map(milliseconds, cuts))
    return answer(found)


def _workloads(request: web.Request) -> list[str]:
    """The ids of workloads in a query."""
    ids = request.query.getall("workload", [])
    if len(ids) > WORKLOADS_LIMIT:
        raise problem(400, f"a question names at most {WORKLOADS_LIMIT} workloads")
    if not all(map(ID.fullmatch, ids)):
        raise problem(400, "no id has this form")
    return ids


def _moment(request: web.Request, name: str) -> Timestamp | None:
    """A time of the query, in milliseconds of the Unix epoch. None: not given."""
    text = request.query.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,14}(\.\d{1,6})?", text):
        raise problem(400, f"{name} is a time in milliseconds of the Unix epoch")
    found = Timestamp()
    found.FromMicroseconds(int(float(text) * 1000))
    return found


def _commands_within(start: Timestamp | None, end: Timestamp | None) -> str:
    """A filter of the commands that were under way within a time. A hidden end counts as such a command."""
    if start is None:
        return _within("create_time", None, end)
    earlier = Timestamp(seconds=max(0, start.seconds - COMMAND_TIME_S), nanos=start.nanos)
    over = f'(end_time >= "{start.ToJsonString()}" OR NOT end_time:*)'
    return f"{_within('create_time', earlier, end)} AND {over}"


def _within(field: str, start: Timestamp | None, end: Timestamp | None) -> str:
    """A filter of a time."""
    parts = []
    if start is not None:
        parts.append(f'{field} >= "{start.ToJsonString()}"')
    if end is not None:
        parts.append(f'{field} <= "{end.ToJsonString()}"')
    return " AND ".join(parts)
