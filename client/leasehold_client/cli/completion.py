"""``leasehold completion``: the script that makes a shell complete ``leasehold``."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from leasehold_client.cli import bash_words  # noqa: F401 - click gets its class
from leasehold_client.cli.examples import examples
from leasehold_client.display.standard_output import echo_lines

SHELLS: Final = ("bash", "zsh", "fish")


@click.command(
    epilog=examples(
        "leasehold completion bash > ~/.local/share/bash-completion/completions/leasehold",
        'eval "$(leasehold completion zsh)"  # in ~/.zshrc, after compinit',
        "leasehold completion fish > ~/.config/fish/completions/leasehold.fish",
    )
)
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
def completion(shell: str) -> None:
    """Print the script that makes a shell complete verbs, options and names.

    Names of workloads, workers, GPUs and commands come from the coordinator, and are kept for 15 seconds in a
    file below ~/.cache/leasehold. A coordinator that does not answer completes no names.
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"this version of click has no completion for {shell}")
    script = found(click.get_current_context().find_root().command, {}, "leasehold", "_LEASEHOLD_COMPLETE")
    echo_lines(script.source_template % script.source_vars())
