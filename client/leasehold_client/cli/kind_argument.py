"""The argument KIND of ``get`` and ``describe``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import click
from click.shell_completion import CompletionItem

from leasehold_client.arguments.kinds import BY_WORD, KINDS, Kind
from leasehold_client.arguments.suggestions import close_to

if TYPE_CHECKING:
    KindParameter = click.ParamType[Kind]
else:  # older versions of click have no generic ParamType
    KindParameter = click.ParamType


@final
class KindType(KindParameter):
    """A click parameter type: a kind of objects, in plural, singular or short.

    Args:
        offered: The kinds that messages and completion name.
    """

    name = "kind"

    def __init__(self, offered: Sequence[Kind] = KINDS) -> None:
        self._offered = offered

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Kind:
        """Finds the kind."""
        if isinstance(value, Kind):
            return value
        word = str(value).lower()
        if word not in BY_WORD:
            plurals = ", ".join(kind.plural for kind in self._offered)
            self.fail(f"{value!r} is not a kind{close_to(word, BY_WORD)}: choose {plurals}", param, ctx)
        return BY_WORD[word]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Completes the plural, or the singular where only that is typed."""
        words = [kind.plural for kind in self._offered] + [kind.singular for kind in self._offered]
        return [CompletionItem(word) for word in dict.fromkeys(words) if word.startswith(incomplete)]
