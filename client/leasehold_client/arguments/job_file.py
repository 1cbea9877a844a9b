"""Job files: the options of ``run`` in TOML, JSON or YAML."""

import codecs
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import msgspec

from leasehold_client.arguments.job_document import parse_json, parse_toml, parse_yaml
from leasehold_client.arguments.suggestions import close_to
from leasehold_client.config import FILE_LIMIT_BYTES, read_settings_file
from leasehold_client.errors import UsageError

_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`")
_EXPECTED: Final = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)

_WORD: Final = re.compile(r"`([^`]*)`")
_TYPES: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "text",
}
"""Types of msgspec as people say them."""


@final
class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job file. Each key has the name and the values of an option of ``run``, with ``_`` for ``-``.

    Four keys differ: ``command`` is a list, ``env``, ``labels`` and ``annotations`` are tables, and ``hooks``
    is a list of tables.
    """

    command: list[str] = []
    name: str = ""
    worker: str = ""
    gpus: int = 0
    gpu: list[str] = []
    gpu_memory: str | int = ""
    gpu_name: str = ""
    gpu_units: int = 0
    acceptable_units: list[int] = []
    prefer: str = ""
    allow_foreign: bool = False
    cpu: str | int | float = ""
    memory: str | int = ""
    disk: str | int = ""
    priority: int = 0
    workdir: str = ""
    env: dict[str, str] = {}
    env_secret: list[str] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    helper: str = ""
    yield_grace: str | int | float = ""
    yield_signal: str = ""
    evict: str = ""
    escalate_to: str = ""
    hooks: list[dict[str, Any]] = []
    keep_checkpoints: int = 0
    from_checkpoint: str = ""


def read_job_file(path: str) -> dict[str, Any]:
    """Reads a job file, and returns the given keys with their values.

    Args:
        path: The file. Its suffix is ``.json``, ``.yaml`` or ``.yml``, or else the file is TOML. ``-``:
            standard input, as TOML.

    Raises:
        UsageError: The file can't be read, is malformed, or has an unknown key or a value of another type.
    """
    try:
        if path == "-":
            data = sys.stdin.buffer.read(FILE_LIMIT_BYTES + 1)
            if len(data) > FILE_LIMIT_BYTES:
                raise UsageError(
                    f"the job file on standard input exceeds the limit of {FILE_LIMIT_BYTES} bytes"
                )
        else:
            data = read_settings_file(Path(path))
    except OSError as error:
        raise UsageError(
            f"the job file {path} can't be read: {error.strerror}; name a readable file in TOML, JSON or YAML"
        ) from error
    where = job_file_text(path)
    try:
        document = _parser(path)(data.removeprefix(codecs.BOM_UTF8))
        _require_texts(document, where)
        job = msgspec.convert(document, JobFile)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {_explained(str(error))}") from error
    except RecursionError as error:
        raise UsageError(f"{where} is malformed: its tables or lists are nested too deeply") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is malformed: it is not text in UTF-8") from error
    except ValueError as error:
        why = "a number has too many digits" if "int_max_str_digits" in str(error) else str(error)
        raise UsageError(f"{where} is malformed: {' '.join(why.split())}") from error
    if "command" in document and not job.command:
        raise UsageError(f"{where}: command: the list is empty: give a program and its arguments")
    for key, table in (("env", job.env), ("labels", job.labels), ("annotations", job.annotations)):
        for entry in table:
            if "=" in entry:  # the option would end the name there
                raise UsageError(f"{where}: {key}: invalid name {entry!r}: leave out '='")
    return {key: getattr(job, key) for key in document}


def job_file_text(path: str) -> str:
    """A job file by its path, for messages."""
    return f"the job file {'on standard input' if path == '-' else path}"


def _parser(path: str) -> Callable[[bytes], Any]:
    match Path(path).suffix.lower():
        case ".json":
            return parse_json
        case ".yaml" | ".yml":
            return parse_yaml
        case _:
            return parse_toml


def _require_texts(document: Any, where: str) -> None:
    """Refuses other values in the tables of texts. msgspec would not name their key.

    Raises:
        UsageError: A value is not text.
    """
    for key in ("env", "labels", "annotations"):
        table = document.get(key) if isinstance(document, dict) else None
        for entry, value in table.items() if isinstance(table, dict) else ():
            if not isinstance(value, str):
                raise UsageError(
                    f"{where}: {key}.{entry}: expected text, got {_type_text(value)}: put it into quotes"
                )


def _type_text(value: object) -> str:
    found = {bool: "bool", int: "int", float: "float", list: "array", dict: "object"}.get(type(value), "")
    return _TYPES.get(found, "another value")


def _explained(message: str) -> str:
    """A message of msgspec with the path of the key, and the known keys."""
    if unknown := _UNKNOWN.match(message):
        keys = JobFile.__struct_fields__
        return f"unknown key {unknown[1]!r}{close_to(unknown[1], keys)}: the keys are {', '.join(keys)}"
    if expected := _EXPECTED.fullmatch(message):
        return f"{expected[2]}: {_WORD.sub(_in_words, expected[1]).replace('Expected', 'expected')}"
    return _WORD.sub(_in_words, message)


def _in_words(types: re.Match[str]) -> str:
    return " or ".join(_TYPES.get(one, one) for one in types[1].split(" | "))
