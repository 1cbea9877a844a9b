"""Commands that pass on the exit code of a program, and have the code 125 for their own failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import click

from leasehold_client.cli.parameter_types import refuse_empty

EXIT_REFUSED: Final = 125
"""Leasehold itself failed, as for docker and env(1)."""


@final
class ProgramUsageError(click.UsageError):
    """A usage error of a command that passes on the code of a program."""

    exit_code = EXIT_REFUSED


class ProgramCommand(click.Command):
    """A command whose usage errors have the code 125 if it passes on the code of a program."""

    def passes_code(self, args: Sequence[str]) -> bool:
        """Whether the command passes on the code of a program, by its command line."""
        return True

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parses the options.

        Raises:
            ProgramUsageError: An option is invalid, and the command passes on the code of a program.
        """
        given = list(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if not self.passes_code(given):
                raise
            raise ProgramUsageError(error.format_message(), error.ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb.

        Raises:
            ProgramUsageError: As of :meth:`make_context`, for options that only fit together in the verb.
        """
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if not ctx.params.get("attach", True):
                raise
            raise ProgramUsageError(error.format_message(), error.ctx) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the options, and refuses empty ones."""
        rest = super().parse_args(ctx, args)
        refuse_empty(ctx)
        return rest
