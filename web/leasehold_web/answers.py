"""The common parts of the answers for our scripts."""

import re
from collections.abc import Iterable
from typing import Final

import msgspec
from aiohttp import web
from google.protobuf.message import Message

from leasehold_web.conversions import Conversions
from leasehold_web.documents import Document
from leasehold_web.guards import SESSION

CALL_TIMEOUT_S: Final = 10.0
"""Time for one call of the API."""

CONVERSIONS: Final = web.AppKey("conversions", Conversions)

ID: Final = re.compile(r"[\w.@/-]{1,256}")
"""The form of ids and names."""


def answer(value: object) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def documents_of(request: web.Request, messages: Iterable[Message]) -> list[Document]:
    """Messages as JSON, without holding up other requests."""
    return await request.app[CONVERSIONS].documents(request[SESSION].entry.caller, messages)
