"""The resources that a request names, for refusals in the audit. Pure."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from google.protobuf.message import Message

from leasehold_coordinator.access.methods import NAMES

NAMED_LIMIT: Final = 4
"""Most resources of one request. A further resource of the request is left out."""

NAME_LIMIT: Final = 64
"""Most characters of one resource's name, which the caller chooses."""


def named_resources(method: str, request: Message) -> tuple[str, ...]:
    """The first resources that a request names, each once, as KIND/NAME.

    The names are those of the request: nobody has looked up whether such resources exist.

    Args:
        method: Full name of the method.
        request: Its request, which may be invalid.
    """
    rows = (row.split("/") for row in NAMES.get(method, ()))
    found = (
        f"{kind}/{name[:NAME_LIMIT]}" for kind, path in rows for name in _names(request, path.split("."))
    )
    return tuple(dict.fromkeys(islice(found, NAMED_LIMIT)))


def _names(message: Message, path: Sequence[str]) -> Iterator[str]:
    """The values of the fields at a path, without empty ones."""
    name, *rest = path
    value = getattr(message, name)
    for one in value if message.DESCRIPTOR.fields_by_name[name].is_repeated else (value,):
        if rest:
            yield from _names(one, rest)
        elif one:
            yield one
