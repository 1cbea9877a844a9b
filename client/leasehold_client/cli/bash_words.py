"""Completion in bash of a word with ``=``, ``:`` or ``@``, at which bash parts a word (COMP_WORDBREAKS).

bash gives a completion function the parts, and replaces the last one only. From an open quote on, it replaces
all. So the script hands over the line, and of each completion the part that bash replaces is printed.
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
        """The completions, each without the part of the word that bash keeps."""
        option, equals, _ = incomplete.partition("=")
        before = option + equals if incomplete.startswith("-") and equals else ""
        replaced = _replaced(os.environ["COMP_WORDS"], os.environ.get("COMP_WORDBREAKS", ""))
        kept = max(0, len(incomplete) - len(replaced))
        return [
            CompletionItem(f"{before}{item.value}"[kept:], item.type, item.help)
            for item in super().get_completions(args, incomplete)
        ]


def _replaced(line: str, breaks: str) -> str:
    """The end of a line that bash replaces: all from an open quote on, or else the last part of a word."""
    quote, begin, is_escaped = "", 0, False
    for at, char in enumerate(line):
        if is_escaped:
            is_escaped = False
        elif char == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            if char == quote:
                quote = ""
        elif char in "'\"":
            quote, begin = char, at + 1
        elif char in breaks:
            begin = at + 1
    return line[begin:]
