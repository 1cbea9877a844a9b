"""The paths of the views, and the way past the login to each of them."""

import re
from typing import Final
from urllib.parse import quote

from aiohttp import web

SHELL_PATHS: Final = (
    "/",
    "/timeline",
    "/workloads",
    "/workloads/{id}",
    "/commands",
    "/commands/{id}",
    "/workers/{id}",
)
"""Paths of the views that our scripts draw."""

TABLE_PREFIX: Final = "/plain/"
"""Begin of the paths of tables without scripts."""

_VIEW: Final = re.compile(
    r"/(?:(?:timeline|workloads|commands|workers|plain)(?:/[\w.@%:-]{1,512})?)?(?:\?[\w.@%:=&/+-]{0,1024})?",
    re.ASCII,
)
"""Path and query of a view. The address of another site never has this form."""


def view_path(text: str) -> str:
    """The path and query of a view, from a browser. The fleet, if the text is anything else."""
    return text if _VIEW.fullmatch(text) else "/"


def login_path(request: web.Request) -> str:
    """The address of the login form that leads back to the view of a request."""
    view = view_path(request.path_qs)
    return "/login" if view == "/" else f"/login?next={quote(view, safe='/')}"
