"""The text of a job file as a document: TOML, JSON or YAML whose keys are texts, each of them once.

TOML requires both. The parsers of JSON and YAML take the last one of equal keys, which hides a mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from yaml.nodes import Node

_TEXT: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"
"""The key ``<<`` of YAML, which takes the entries of another table."""


def parse_toml(data: bytes) -> Any:
    """The document in TOML.

    Raises:
        ValueError: The text is malformed.
    """
    import tomllib  # late: few calls of `run` have a file

    return tomllib.loads(data.decode())


def parse_json(data: bytes) -> Any:
    """The document in JSON.

    Raises:
        ValueError: The text is malformed, or a table has a key twice.
        RecursionError: The document is too deep.
    """
    import json

    return json.loads(data, object_pairs_hook=_table, parse_constant=_refuse_constant)


def parse_yaml(data: bytes) -> Any:
    """The document in YAML.

    Raises:
        ValueError: The text is malformed, or a table has a key twice or one that is not text.
        RecursionError: The document is too deep.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may lack the one in C
    try:
        _check_keys(yaml.compose(data, Loader=loader))
        return yaml.load(data, Loader=loader)  # noqa: S506 - a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = ": ".join(text for text in (error.context, error.problem) if text)
        raise ValueError(place + problem) from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r} occurs twice in one table: leave one out")
        table[key] = value
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON: write a number")


def _check_keys(root: Node | None) -> None:
    """Checks the keys of all tables, each table once: by its aliases, a short text can have many."""
    import yaml

    pending, seen = [root] if root is not None else [], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                _check_key(key, keys)
                pending.append(value)


def _check_key(key: Node, earlier: set[str]) -> None:
    line = f"line {key.start_mark.line + 1}"
    if key.tag == _MERGE:
        return
    if key.tag != _TEXT:
        shown = key.value if isinstance(key.value, str) else "of a list or table"
        raise ValueError(f"{line}: the key {shown} is not text: put it into quotes")
    if key.value in earlier:
        raise ValueError(f"{line}: the key {key.value!r} occurs twice in one table: leave one out")
    earlier.add(key.value)
