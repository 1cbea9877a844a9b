"""Completion in bash of a word with ``=``, ``:`` or ``@``, at which bash parts a word (COMP_WORDBREAKS).

bash gives a completion function the parts, and replaces the last one only. So the script hands over the line,
and a completion is printed without the parts before the last one.
"""

import os
from typing import Final, final

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

_PARTS: Final = 'COMP_WORDS="${COMP_WORDS[*]}"'
_LINE: Final = 'COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS"'


@add_completion_class
@final
class WholeWords(BashComplete):
    """click's completion for bash, with whole words."""

    source_template = BashComplete.source_template.replace(_PARTS, _LINE)

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor without the program, and the incomplete word, which may be empty."""
        *words, last = split_arg_string(f"{os.environ['COMP_WORDS']}x")  # so that there is a last word
        return words[1:], last[:-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """The completions of the last part of a word."""
        value = incomplete.partition("=")[2] if incomplete.startswith("-") else incomplete
        breaks = os.environ.get("COMP_WORDBREAKS", "")
        kept = value[: 1 + max(map(value.rfind, breaks), default=-1)]
        return [
            CompletionItem(item.value.removeprefix(kept), item.type, item.help)
            for item in super().get_completions(args, incomplete)
        ]
