"""The pages themselves: the shell of our scripts, the login, and the files that both load."""

import asyncio
import hashlib
import html
import time
from importlib.resources import files
from typing import Final, TypeAlias
from urllib.parse import parse_qsl

from aiohttp import hdrs, web

from leasehold_web.entries import Doors, Entry, LoginRefusedError
from leasehold_web.guards import COOKIE, SESSIONS, Handler, session_of
from leasehold_web.login_places import LoginPlaces
from leasehold_web.sessions import SESSION_LIFE_S
from leasehold_web.view_paths import SHELL_PATHS, login_path, view_path

DOORS: Final = web.AppKey("doors", Doors)
Files: TypeAlias = dict[str, tuple[bytes, str, str]]
PLACES: Final = web.AppKey("places", LoginPlaces)
FILES: Final = web.AppKey("files", Files)
"""Content, type and tag of each file, by name."""

REFUSAL_S: Final = 0.5
"""How long a refused login is held back."""

TOKEN_LIMIT: Final = 8_192
FIELD_LIMIT: Final = 8

_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def read_files() -> Files:
    """The files of the page. Blocks."""
    found = {}
    for file in files("leasehold_web").joinpath("static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _TYPES:
            content = file.read_bytes()
            found[file.name] = content, _TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return found


async def get_file(request: web.Request) -> web.Response:
    """A file. Browsers ask each time whether it has changed."""
    found = request.app[FILES].get(request.match_info["name"])
    if found is None or found[1] == "text/html":
        raise web.HTTPNotFound(text="no file of the page has this name")
    content, kind, tag = found
    headers = {hdrs.ETAG: tag, hdrs.CACHE_CONTROL: "no-cache"}
    if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)


async def get_shell(request: web.Request) -> web.Response:
    """The page, in which our scripts draw the view of its path."""
    if await session_of(request) is None:
        raise web.HTTPSeeOther(login_path(request))
    return web.Response(body=request.app[FILES]["page.html"][0], content_type="text/html", charset="utf-8")


@web.middleware
async def explain_missing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers an unknown address outside the API with a page that leads to the fleet."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        if request.path.startswith(("/api/", "/static/")):
            raise
        text = request.app[FILES]["missing.html"][0]
        return web.Response(body=text, content_type="text/html", charset="utf-8", status=404)


async def get_favicon(request: web.Request) -> web.Response:
    """The icon, for browsers that ask for it at its usual place."""
    raise web.HTTPMovedPermanently("/static/favicon.svg")


async def get_login(request: web.Request) -> web.Response:
    """The login form."""
    refusal = "the login has ended, or its credential is not valid any more: log in again"
    return _login_page(request, request.query.get("next", ""), refusal if "ended" in request.query else "")


async def post_login(request: web.Request) -> web.Response:
    """Logs in with a token, or with the certificate of the connection."""
    try:
        # Not request.post(), which takes any charset and parts of files.
        fields = dict(parse_qsl((await request.read()).decode(), max_num_fields=FIELD_LIMIT))
    except web.HTTPRequestEntityTooLarge:
        return _login_page(request, "", "the text is too long for a token: paste the token alone", 413)
    except ValueError:  # too many, or no UTF-8
        return _login_page(request, "", "the login is not that of this page: load the page again", 400)
    view = fields.get("next", "")
    by_certificate = fields.get("method") == "certificate"
    try:
        entry = await _enter(request, fields.get("token", "").strip(), by_certificate=by_certificate)
    except LoginRefusedError as error:
        return _login_page(request, view, str(error), status=403)
    session_id = await request.app[SESSIONS].open(entry)
    response = web.HTTPSeeOther(view_path(view))
    response.set_cookie(
        request.app[COOKIE],
        session_id,
        max_age=int(SESSION_LIFE_S),
        httponly=True,
        secure=request.secure,
        samesite="Strict",
        path="/",
    )
    raise response


async def post_logout(request: web.Request) -> web.Response:
    """Ends the session."""
    session = await session_of(request)
    if session is not None:
        await request.app[SESSIONS].close(session)
    response = web.HTTPSeeOther("/login")
    response.del_cookie(
        request.app[COOKIE], path="/", secure=request.secure, httponly=True, samesite="Strict"
    )
    raise response


async def _enter(request: web.Request, token: str, *, by_certificate: bool) -> Entry:
    """The login that a request asks for.

    Raises:
        LoginRefusedError: The credential is missing or not valid, or too many log in at once.
    """
    address = request.remote or "unknown"
    async with request.app[PLACES].taken(address):
        began_s = time.monotonic()
        try:
            if by_certificate:
                der = peer_certificate(request)
                if der is None:
                    raise LoginRefusedError(
                        "the browser presented no client certificate: import yours into the browser, and "
                        "open the page again"
                    )
                return await request.app[DOORS].by_certificate(der, address)
            if not token:
                raise LoginRefusedError("the token is empty: paste the token that the form describes")
            if len(token) > TOKEN_LIMIT:
                raise LoginRefusedError("the token is too long: paste the token alone")
            return await request.app[DOORS].by_token(token, address)
        except LoginRefusedError:
            await asyncio.sleep(max(0.0, REFUSAL_S - (time.monotonic() - began_s)))
            raise


def peer_certificate(request: web.Request) -> bytes | None:
    """The client certificate of a connection, as DER. None: it presents none."""
    ssl_object = request.get_extra_info("ssl_object")
    found = ssl_object.getpeercert(binary_form=True) if ssl_object is not None else None
    return found if isinstance(found, bytes) else None


def _login_page(request: web.Request, view: str, refusal: str, status: int = 200) -> web.Response:
    """The login form.

    Args:
        request: The request.
        view: Where the login leads, as the browser says.
        refusal: Why there is no login. Empty: nobody has tried.
        status: The HTTP status.
    """
    text = request.app[FILES]["login.html"][0].decode()
    text = text.replace("{{hint}}", html.escape(request.app[DOORS].hint))
    text = text.replace(
        "{{refusal}}", f'<p role="alert" class="refusal">{html.escape(refusal)}</p>' if refusal else ""
    )
    has_certificate = peer_certificate(request) is not None
    text = text.replace("{{certificate}}", _CERTIFICATE_FORM if has_certificate else "")
    text = text.replace("{{next}}", html.escape(view_path(view)))
    return web.Response(text=text, content_type="text/html", status=status)


_CERTIFICATE_FORM: Final = (
    '<form method="post" action="/login"><input type="hidden" name="method" value="certificate">'
    '<input type="hidden" name="next" value="{{next}}">'
    '<button class="wide">Log in with the certificate of this browser</button></form>'
)


def routes() -> list[web.RouteDef]:
    """The routes of this module."""
    return [
        *(web.get(path, get_shell) for path in SHELL_PATHS),
        web.get("/favicon.ico", get_favicon),
        web.get("/static/{name}", get_file),
        web.get("/login", get_login),
        web.post("/login", post_login),
        web.post("/logout", post_logout),
    ]
