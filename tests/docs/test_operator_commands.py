"""The commands of the pages for operators have options and values that the command line takes."""

import re
import shlex
from pathlib import Path

import click
import pytest
from leasehold_client.main import leasehold

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands(page: str) -> list[list[str]]:
    """The arguments of each command in the blocks and in the paragraphs of a page."""
    found: list[list[str]] = []
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    codes = re.findall(
        r"`(?:[^`\n]* )?(leasehold [^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    )
    for line in [*"\n".join(blocks).splitlines(), *codes]:
        if found_here := re.search(r"(?:^|-- )leasehold (.*)", " ".join(line.split())):
            words = shlex.split(found_here[1])
            end = next((number for number, word in enumerate(words) if word[0] in "<>&|;"), len(words))
            found.append(words[:end])
    return found


def parse(command: click.Command, arguments: list[str], parent: click.Context | None = None) -> None:
    with command.make_context(command.name, arguments, parent=parent) as context:
        if isinstance(command, click.Group):
            _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            assert inner is not None
            parse(inner, rest, context)


@pytest.mark.parametrize("page", ["kubernetes.md", "operations.md", "troubleshooting.md"])
def test_each_command_is_parsed(page: str) -> None:
    found = commands(page)
    assert len(found) > 5
    for arguments in found:
        try:
            parse(leasehold, [*arguments])
        except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError, click.MissingParameter):
            continue  # prose names a verb alone
        except click.UsageError as error:
            if isinstance(error.__cause__, click.MissingParameter):  # of `exec`, with a code of its own
                continue
            pytest.fail(f"`leasehold {shlex.join(arguments)}`: {error.format_message()}")
