"""Checks of every request before its handler runs, and the headers of every answer.

A browser sends its cookies with each request to the page, also with requests that another site made it send.
A cookie with SameSite=Strict, the check of Origin, and a header that only our scripts add each prevent that.
The check of Host refuses a site whose name points to this address (DNS rebinding).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from leasehold_web.refusals import problem
from leasehold_web.request_pace import RequestPace
from leasehold_web.sessions import Session, Sessions
from leasehold_web.view_paths import TABLE_PREFIX, login_path

COOKIE: Final = web.AppKey("cookie", str)
SESSIONS: Final = web.AppKey("sessions", Sessions)
PACE: Final = web.AppKey("pace", RequestPace)
SESSION: Final = web.RequestKey("session", Session)

CALL_LIMIT: Final = 24
"""Most requests of one session under way, without its streams."""

REQUEST_LIMIT_S: Final = 60.0
"""Longest time of a request, without streams."""

SCRIPT_HEADER: Final = "Leasehold-Page"
"""Header of every POST of our scripts. Another site can't add it without a permission that nothing gives."""

SAFE: Final = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # Not no-referrer: forms would then send Origin: null. No other site gets a referrer.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Adds the headers of every answer."""
    set_headers(response)


def set_headers(response: web.StreamResponse) -> None:
    """Sets the headers of every answer."""
    for name, value in HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    response.headers[hdrs.SERVER] = "leasehold"


def guard(hosts: Collection[str]) -> Middleware:
    """The checks of every request.

    Args:
        hosts: The names and addresses by which browsers call the server, in lower case.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        await request.app[PACE].wait(request.remote or "")
        host = request.headers.get(hdrs.HOST, "")
        if _name(host) not in hosts:
            raise problem(
                403,
                f"this server is not called {host[:100]!r}: use one of {', '.join(sorted(hosts))}, or add "
                "the name to server_names",
            )
        if request.method not in SAFE:
            origin = request.headers.get(hdrs.ORIGIN, "")
            if origin != f"{request.scheme}://{host}":
                raise problem(403, "the request comes from another site: open this page by itself")
        try:
            return await handler(request)
        except ConnectionError:  # the browser has gone: nobody reads the answer
            return web.Response(status=499)

    return check


@web.middleware
async def require_session(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Requires a session for the API and the tables, and a header of our scripts for changes of the API."""
    is_api = request.path.startswith("/api/")
    if not is_api and not request.path.startswith(TABLE_PREFIX):
        return await _in_time(request, handler)
    session = await session_of(request)
    if session is None and not is_api:
        raise web.HTTPSeeOther(login_path(request))
    if session is None:
        raise problem(401, "nobody is logged in, or the login has ended: log in", "NO_SESSION")
    if is_api and request.method not in SAFE and request.headers.get(SCRIPT_HEADER) != "1":
        raise problem(403, f"a change needs the header {SCRIPT_HEADER}: 1")
    request[SESSION] = session
    if request.match_info.handler in _STREAMS:
        return await handler(request)
    if session.calls >= CALL_LIMIT:
        raise problem(429, f"{CALL_LIMIT} requests of this session are under way: wait for their answers")
    session.calls += 1
    try:
        return await _in_time(request, handler)
    finally:
        session.calls -= 1


async def _in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Bounds the time of a request, so that no browser holds a place by a body that never comes.

    Raises:
        HTTPException: The time has passed.
    """
    try:
        async with asyncio.timeout(REQUEST_LIMIT_S):
            return await handler(request)
    except TimeoutError:
        raise problem(503, f"no answer within {REQUEST_LIMIT_S:g} s: try again") from None


_STREAMS: Final[set[Handler]] = set()


def stream(handler: Handler) -> Handler:
    """Marks a handler whose answer does not end by itself. It has bounds of its own."""
    _STREAMS.add(handler)
    return handler


async def session_of(request: web.Request) -> Session | None:
    """The session of a request. None: nobody is logged in."""
    session_id = request.cookies.get(request.app[COOKIE], "")
    return await request.app[SESSIONS].find(session_id) if session_id else None


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
