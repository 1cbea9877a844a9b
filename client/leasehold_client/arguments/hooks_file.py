"""Hooks of a workload, as a file says them: a JSON list of messages ``Hook``, by the names of the protos."""

import json
import re
from pathlib import Path
from typing import Final

from google.protobuf import json_format
from leasehold.v1.workload_pb2 import Hook

from leasehold_client.errors import UsageError

FILE_LIMIT_BYTES: Final = 1_000_000
"""A larger file is no list of hooks: no spec would hold them."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")


def read_hooks(path: Path) -> list[Hook]:
    """The hooks in a file, in its order. Whether they can be called is their worker's to say.

    Raises:
        UsageError: The file can't be read, or is no such list; the text says which hook is wrong, and how.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror or error}; name a file with a JSON list of hooks"
        ) from error
    if len(data) > FILE_LIMIT_BYTES:
        raise UsageError(
            f"{path} has more than {FILE_LIMIT_BYTES} bytes: name a file with a JSON list of hooks"
        )
    try:
        documents = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}): write a list of hooks") from error
    if not isinstance(documents, list):
        raise UsageError(f"{path} has no list: write hooks as [{{…}}, …]")
    return [_read_hook(path, number, document) for number, document in enumerate(documents)]


def _read_hook(path: Path, number: int, document: object) -> Hook:
    if not isinstance(document, dict):
        raise UsageError(f"{path}: hook {number} is {json.dumps(document)[:40]}: write it as {{…}}")
    try:
        _check_bodies(document)
        return json_format.ParseDict(document, Hook())
    except (json_format.ParseError, ValueError, TypeError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"{path}: hook {number} is no Hook ({why}): write its fields as the protos name them"
        ) from error


def _check_bodies(document: dict[str, object]) -> None:
    """Refuses bodies of HTTP requests that are plain text: they would be read as bytes, and become others.

    Raises:
        ValueError: One is no base64.
    """
    for key, value in document.items():
        if isinstance(value, dict):
            _check_bodies(value)
        elif key == "body" and isinstance(value, str) and not _BASE64.fullmatch(value):
            raise ValueError(f"the body {value[:40]!r} is not base64, as JSON has bytes")
