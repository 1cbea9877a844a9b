"""Label selectors of kubectl as filters of the coordinator. Pure."""

import re
from typing import Final

from leasehold_client.errors import UsageError

_KEY: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE: Final = r"[^,()=!]*"
_TERM: Final = re.compile(
    rf"""\s*(?:
        (?P<absent>!\s*{_KEY})
      | (?P<key>{_KEY})\s*(?:
            (?P<sign>==?|!=)\s*(?P<value>{_VALUE})
          | \s(?P<set>in|notin)\s*\((?P<values>[^()]*)\)
        )?
    )\s*(?:,|$)""",
    re.VERBOSE,
)


def label_filter(selector: str) -> str:
    """Converts a selector to a filter.

    Args:
        selector: Terms, separated by commas, which all must hold: ``KEY=VALUE``, ``KEY!=VALUE``,
            ``KEY in (A,B)``, ``KEY notin (A,B)``, ``KEY`` (the label exists) or ``!KEY``. As in kubectl, a
            missing label satisfies ``!=`` and ``notin``. Empty: no filter.

    Raises:
        UsageError: The selector is invalid.
    """
    conditions = []
    position = 0
    while position < len(selector):
        term = _TERM.match(selector, position)
        if term is None:
            raise UsageError(
                f"invalid selector {selector!r} at {selector[position:].strip()[:40]!r}: write KEY=VALUE, "
                "KEY!=VALUE, KEY, !KEY, or KEY in (A,B), separated by commas"
            )
        if term["set"] and not term["values"].strip():  # NOT () would match everything
            raise UsageError(
                f"invalid selector {selector!r}: {term['key']} {term['set']} () has no value: give one"
            )
        conditions.append(_condition(term))
        position = term.end()
    return " AND ".join(conditions)


def both(first: str, second: str) -> str:
    """The filter of what two filters match. An empty filter matches everything.

    OR binds tighter than AND in filters, so no parentheses are needed. Without them, a refusal of the
    first filter has the position in that filter.
    """
    if not first.strip() or not second.strip():
        return first if first.strip() else second
    return f"{first} AND {second}"


def quoted(text: str) -> str:
    """A text as a string of a filter."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _condition(term: re.Match[str]) -> str:
    if term["absent"]:
        return f"NOT labels:{quoted(term['absent'][1:].strip())}"
    key = quoted(term["key"])
    if term["sign"]:
        equal = f"labels.{key} = {quoted(term['value'].strip())}"
        return f"NOT {equal}" if term["sign"] == "!=" else equal
    if term["set"]:
        values = [quoted(value.strip()) for value in term["values"].split(",")]
        any_of = " OR ".join(f"labels.{key} = {value}" for value in values)
        return f"NOT ({any_of})" if term["set"] == "notin" else f"({any_of})"
    return f"labels:{key}"
