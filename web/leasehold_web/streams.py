"""The answers that go on: the live view, and the output of a workload, as server-sent events."""

import asyncio
import codecs
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc
import msgspec
from aiohttp import hdrs, web
from leasehold.v1.workload_service_pb2 import ReadWorkloadOutputRequest

from leasehold_web.entries import Api
from leasehold_web.feed import Feeds
from leasehold_web.guards import PACE, SESSION, SESSIONS, stream
from leasehold_web.refusals import problem, refusal
from leasehold_web.sessions import Session

STREAMS_PER_SESSION: Final = 16
STREAMS_PER_CALLER: Final = 64
"""Most streams of all sessions of one caller, who would otherwise keep out all others."""

STREAM_LIMIT: Final = 512
WRITE_LIMIT_S: Final = 20.0
"""How long a browser may read nothing before its stream ends."""

ROWS_PER_REQUEST: Final = 500
"""Rows of a live view that a browser gets first, for the cost of one request."""

FEEDS: Final = web.AppKey("feeds", Feeds)
OPEN: Final = web.AppKey("open", Counter[str])
"""The number of open streams, by caller."""


async def get_live(request: web.Request) -> web.StreamResponse:
    """The live view: all entries, and then each change."""
    session = request[SESSION]
    with _counted(request, session):
        await request.app[PACE].wait(
            request.remote or "", request.app[FEEDS].of(session.entry).rows / ROWS_PER_REQUEST
        )
        response = await _begin(request)
        with request.app[FEEDS].of(session.entry).listening(session.entry) as listener:
            ending = asyncio.create_task(_call_at_end(request, session, listener.close))
            try:
                await _write_all(request, response, listener.messages())
            finally:
                ending.cancel()
        return response


async def get_output(request: web.Request) -> web.StreamResponse:
    """The output of a workload, as far as it is, and then as it comes.

    Each message has text and the offsets before and after it. The id of a message is the offset after it. A
    browser that connects again continues there. A negative offset counts from the end.
    """
    session = request[SESSION]
    offset = request.headers.get("Last-Event-ID") or request.query.get("offset", "0")
    number = offset.removeprefix("-")
    if not number.isascii() or not number.isdecimal() or len(number) > 18:
        raise problem(400, "offset is a number of bytes")
    with _counted(request, session):
        api = await session.entry.api()
        response = await _begin(request)
        reading = asyncio.create_task(
            _write_all(request, response, _output(api, request.match_info["id"], int(offset)), is_raw=True)
        )
        ending = asyncio.create_task(_call_at_end(request, session, reading.cancel))
        try:
            await asyncio.wait([reading])
        finally:
            ending.cancel()
            reading.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)
        return response


async def _output(api: Api, workload: str, offset: int) -> AsyncIterator[bytes]:
    """The messages of an output. Bytes that are no UTF-8 become replacement characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    call = api.workloads.ReadWorkloadOutput(
        ReadWorkloadOutputRequest(workload=workload, offset=offset, follow=True), metadata=api.metadata
    )
    try:
        async for part in call:
            text = decoder.decode(part.data)
            # A character that is cut in two is read again from its begin.
            rest = len(decoder.getstate()[0])
            begin = part.next_offset - len(part.data)
            body = msgspec.json.encode({"text": text, "offset": begin, "next_offset": part.next_offset})
            yield b"id: %d\ndata: %b\n\n" % (part.next_offset - rest, body)
        yield b"event: end\ndata: {}\n\n"
    except grpc.aio.AioRpcError as error:
        yield b"event: refused\ndata: %b\n\n" % msgspec.json.encode(refusal(error))
    finally:
        call.cancel()


async def _write_all(
    request: web.Request,
    response: web.StreamResponse,
    messages: AsyncIterator[bytes],
    *,
    is_raw: bool = False,
) -> None:
    """Writes messages until they end, or until the browser is gone or reads nothing."""
    try:
        async for message in messages:
            async with asyncio.timeout(WRITE_LIMIT_S):
                await response.write(message if is_raw else b"data: %b\n\n" % message)
    except TimeoutError:
        if request.transport is not None:  # aiohttp would wait for the browser at the end of the answer again
            request.transport.abort()
    except ConnectionError:
        return


async def _call_at_end(request: web.Request, session: Session, end: Callable[[], object]) -> None:
    """Calls a function at the end of a session. Between requests, a session expires here only."""
    try:
        async with asyncio.timeout(max(0.0, session.expire_s - time.time())):
            await session.ended.wait()
    except TimeoutError:
        await request.app[SESSIONS].close(session)
    end()


def stream_refusal(request: web.Request) -> str:
    """Why a further stream of a session is refused. Empty: one may be opened."""
    session, streams = request[SESSION], request.app[OPEN]
    of_caller = streams[session.entry.caller]
    if session.streams >= STREAMS_PER_SESSION or of_caller >= STREAMS_PER_CALLER:
        return f"{of_caller} streams of this user are open: close some of its windows"
    if streams.total() >= STREAM_LIMIT:
        return f"{STREAM_LIMIT} streams of all users are open: close some windows of this page"
    return ""


@contextmanager
def _counted(request: web.Request, session: Session) -> Iterator[None]:
    """Counts a stream.

    Raises:
        HTTPException: There are too many.
    """
    if full := stream_refusal(request):
        raise problem(429, full)
    streams, caller = request.app[OPEN], session.entry.caller
    session.streams += 1
    streams[caller] += 1
    try:
        yield
    finally:
        session.streams -= 1
        streams[caller] -= 1
        if not streams[caller]:
            del streams[caller]


async def _begin(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream", "X-Accel-Buffering": "no"})
    await response.prepare(request)
    return response


def routes() -> list[web.RouteDef]:
    """The routes of this module."""
    return [
        web.get("/api/live", stream(get_live), allow_head=False),
        web.get("/api/workloads/{id}/output", stream(get_output), allow_head=False),
    ]
