"""The command ``run``: options from a job file, and exit codes of attached programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import click
from click.core import ParameterSource

from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED
from leasehold_client.cli.program_command import EXIT_REFUSED, ProgramCommand
from leasehold_client.errors import UsageError

TABLES: Final = ("env", "labels", "annotations")
"""Keys of job files that are tables, each entry of which is an option."""


@final
class ProgramExit(SystemExit):
    """The exit with the code of an attached program."""


@final
class JobCommand(ProgramCommand):
    """A command that names the job file in errors about its values, and keeps the codes of programs apart."""

    def passes_code(self, args: Sequence[str]) -> bool:
        """Whether --attach is given."""
        return "--attach" in args[: args.index("--") if "--" in args else len(args)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the options. A value of the job file counts where an option is missing."""
        try:
            rest = super().parse_args(ctx, args)
            self._merge_tables(ctx)
            return rest
        except click.MissingParameter as error:  # only the command is required
            if not (path := ctx.params.get("file")):
                raise
            from leasehold_client.arguments.job_file import job_file_text

            raise click.UsageError(
                f"{job_file_text(path)} has no command: add the key command, a list of the program and its "
                "arguments, or write them after --",
                ctx,
            ) from error
        except click.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if name is None or ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
                raise
            key = next((key for key, one in _parameters(self).items() if one.name == name), name)
            from leasehold_client.arguments.job_file import job_file_text

            message = f"{job_file_text(ctx.params['file'])}: {key}: {error.message}"
            raise click.UsageError(message, ctx) from error

    def _merge_tables(self, ctx: click.Context) -> None:
        """Adds the entries of the job file to those of options, which replace the entries of their names."""
        for key in TABLES:
            name = _parameters(self)[key].name or key
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
                given = {text.partition("=")[0] for text in ctx.params[name]}
                in_file = (ctx.default_map or {}).get(name, ())
                left = (text for text in in_file if text.partition("=")[0] not in given)
                ctx.params[name] = (*left, *ctx.params[name])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb. With --attach, a failure of Leasehold itself has the code 125."""
        try:
            return super().invoke(ctx)
        except ProgramExit:
            raise
        except SystemExit as ended:
            if ctx.params.get("attach") and ended.code not in (0, EXIT_INTERRUPTED):
                raise SystemExit(EXIT_REFUSED) from None
            raise


def use_job_file(ctx: click.Context, param: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Makes the values of a job file the defaults of the other options. Several files are refused later."""
    if len(paths) != 1 or not paths[0] or ctx.resilient_parsing:
        return paths
    from leasehold_client.arguments.job_file import read_job_file

    try:
        given = read_job_file(paths[0])
    except UsageError as error:
        raise click.UsageError(error.message, ctx) from error
    parameters = _parameters(ctx.command)
    ctx.default_map = {parameters[key].name or key: _as_option(key, value) for key, value in given.items()}
    return paths


def _parameters(command: click.Command) -> Mapping[str, click.Parameter]:
    """The parameters of ``run`` by the keys of job files."""
    found: dict[str, click.Parameter] = {}
    for param in command.params:
        for flag in param.opts:
            if isinstance(param, click.Argument):
                found["command"] = param
            elif flag.startswith("--"):
                found[flag[2:].replace("-", "_")] = param
    return {**found, "labels": found["label"], "annotations": found["annotation"]}


def _as_option(key: str, value: Any) -> Any:
    """A value as the option takes it."""
    if key in TABLES:
        return [f"{name}={text}" for name, text in value.items()]
    return value
