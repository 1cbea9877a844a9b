"""The grammar of filters: a subset of AIP-160. Pure.

    expression  = alternative {"AND" alternative}
    alternative = condition {"OR" condition}
    condition   = ["NOT"] (restriction | "(" expression ")")
    restriction = field comparator value
    field       = name {"." (name | string)}
    comparator  = "=" | "!=" | "<" | "<=" | ">" | ">=" | ":"
    value       = word | string

OR binds tighter than AND, as AIP-160 says: ``a AND b OR c`` is ``a AND (b OR c)``. Of AIP-160, this grammar
lacks bare words, conditions without an operator between them, ``-`` for NOT, functions, and wildcards.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias, final

from leasehold_coordinator.errors import FleetError, invalid

LENGTH_LIMIT: Final = 2_048
"""Characters of a filter."""

RESTRICTION_LIMIT: Final = 50
"""Restrictions of a filter. Each takes about 1 us for each entry of a list and each change of a watch."""

DEPTH_LIMIT: Final = 16
"""Parentheses within parentheses."""

ANYTHING: Final = "*"
"""The value of a restriction such as ``end_time:*``, which holds if the field has a value."""

_SPACE: Final = re.compile(r"\s*")
_KEYWORD: Final = re.compile(r"(AND|OR|NOT)(?![^\s()])", re.IGNORECASE)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_KEY: Final = re.compile(r"[A-Za-z0-9_/-]+")
_COMPARATOR: Final = re.compile(r"<=|>=|!=|=|<|>|:")
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.DOTALL)
_WORD: Final = re.compile(r"[^\s()\"'=!<>,\\]+")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_FOUND: Final = re.compile(r"\S{1,16}")


@final
@dataclass(frozen=True, slots=True)
class Restriction:
    """One comparison.

    Attributes:
        field: Name of the field.
        keys: What follows the name after dots: the key of a map.
        comparator: The operator.
        value: The value, without quotes and escapes.
        is_presence: The value is an unquoted ``*`` after ``:``.
        position: Place of the field in the filter, from 1.
        value_position: Place of the value, likewise.
    """

    field: str
    keys: tuple[str, ...]
    comparator: str
    value: str
    is_presence: bool
    position: int
    value_position: int


@final
@dataclass(frozen=True, slots=True)
class Not:
    """Holds if the part does not."""

    part: "Expression"


@final
@dataclass(frozen=True, slots=True)
class And:
    """Holds if all parts do."""

    parts: "tuple[Expression, ...]"


@final
@dataclass(frozen=True, slots=True)
class Or:
    """Holds if a part does."""

    parts: "tuple[Expression, ...]"


Expression: TypeAlias = Restriction | Not | And | Or


def parse_filter(text: str) -> Expression | None:
    """The expression of a filter. None: the filter is blank, and everything matches.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the position, the rule and the remedy.
    """
    if len(text) > LENGTH_LIMIT:
        raise invalid("filter", f"a filter of {len(text)} characters is too long: {LENGTH_LIMIT} fit")
    return _Parser(text).whole() if text.strip() else None


def restrictions(expression: Expression) -> Iterator[Restriction]:
    """The restrictions of an expression, from left to right."""
    match expression:
        case Restriction():
            yield expression
        case Not(part):
            yield from restrictions(part)
        case And(parts) | Or(parts):
            for part in parts:
                yield from restrictions(part)


def refusal(position: int, text: str) -> FleetError:
    """INVALID_ARGUMENT for a place of a filter, counted from 1."""
    return invalid("filter", f"invalid filter at character {position}: {text}")


@final
class _Parser:
    """Reads one filter from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._restriction_count = 0

    def whole(self) -> Expression:
        expression = self._expression(0)
        self._skip_space()
        if self._at < len(self._text):
            self._refuse(f"{self._found()} follows a condition: join conditions with AND or OR")
        return expression

    def _expression(self, depth: int) -> Expression:
        parts = [self._alternative(depth)]
        while self._keyword("AND"):
            parts.append(self._alternative(depth))
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _alternative(self, depth: int) -> Expression:
        parts = [self._condition(depth)]
        while self._keyword("OR"):
            parts.append(self._condition(depth))
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _condition(self, depth: int) -> Expression:
        if self._keyword("NOT"):
            return Not(self._simple(depth))
        return self._simple(depth)

    def _simple(self, depth: int) -> Expression:
        self._skip_space()
        if not self._text.startswith("(", self._at):
            return self._restriction()
        if depth == DEPTH_LIMIT:
            self._refuse(f"more than {DEPTH_LIMIT} parentheses within each other: write it flatter")
        opened = self._at + 1
        self._at += 1
        expression = self._expression(depth + 1)
        self._skip_space()
        if not self._text.startswith(")", self._at):
            self._refuse(f"{self._found()} where ')' closes the '(' of character {opened}: add ')'")
        self._at += 1
        return expression

    def _restriction(self) -> Restriction:
        self._restriction_count += 1
        if self._restriction_count > RESTRICTION_LIMIT:
            self._refuse(f"more than {RESTRICTION_LIMIT} comparisons: use several filters")
        position = self._at + 1
        name = None if _KEYWORD.match(self._text, self._at) else self._take(_NAME)
        if name is None:
            self._refuse(
                f"{self._found()} where a field is expected: write FIELD = VALUE, as in state = RUNNING"
            )
        keys: list[str] = []
        while self._text.startswith(".", self._at):
            self._at += 1
            keys.append(self._key())
        self._skip_space()
        comparator = self._take(_COMPARATOR)
        if comparator is None:
            self._refuse(
                f"{self._found()} after the field {name!r}: write one of = != < <= > >= : and a value there"
            )
        self._skip_space()
        value_position = self._at + 1
        is_quoted = self._text.startswith(('"', "'"), self._at)
        value = self._string() if is_quoted else self._word(comparator)
        is_presence = comparator == ":" and value == ANYTHING and not is_quoted
        return Restriction(name, tuple(keys), comparator, value, is_presence, position, value_position)

    def _key(self) -> str:
        if self._text.startswith(('"', "'"), self._at):
            return self._string()
        key = self._take(_KEY)
        if key is None:
            self._refuse(f"{self._found()} where a key is expected: write it in quotes")
        return key

    def _word(self, comparator: str) -> str:
        word = None if _KEYWORD.match(self._text, self._at) else self._take(_WORD)
        if word is None:
            self._refuse(
                f"{self._found()} where a value is expected after {comparator!r}: write one, in quotes if it "
                "has spaces or signs"
            )
        return word

    def _string(self) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            self._refuse(f"the string has no end: close it with {self._text[self._at]}")
        self._at = match.end()
        return _ESCAPE.sub(r"\1", match[0][1:-1])

    def _keyword(self, keyword: str) -> bool:
        """Takes a keyword, if it comes next."""
        self._skip_space()
        match = _KEYWORD.match(self._text, self._at)
        if match is None or match[1].upper() != keyword:
            return False
        if match[1] != keyword:
            self._refuse(f"{match[1]!r} is no operator: write {keyword} in capitals")
        self._at = match.end()
        return True

    def _take(self, pattern: "re.Pattern[str]") -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[0]

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match is not None else self._at

    def _found(self) -> str:
        match = _FOUND.match(self._text, self._at)
        return repr(match[0]) if match is not None else "nothing"

    def _refuse(self, text: str) -> NoReturn:
        raise refusal(self._at + 1, text)
