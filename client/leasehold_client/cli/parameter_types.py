"""Types of option values, with ranges that help and errors express in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

import click
from click.core import ParameterSource

from leasehold_client.byte_sizes import IntegerType

if TYPE_CHECKING:
    FloatType = click.ParamType[float]
else:  # older versions of click have no generic ParamType
    FloatType = click.ParamType

UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
"""Seconds of each unit of a time."""

_GIVEN: Final = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
"""Sources of values that a user gave: an option, or a job file."""


@final
class Seconds(FloatType):
    """A click parameter type: a time in seconds, or with a unit such as 90s, 2m, 1h or 7d.

    Args:
        least: The smallest time in seconds.
        most: The largest time in seconds.
    """

    name = "seconds"

    def __init__(self, least: float, most: float) -> None:
        self.least = least
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parses the time."""
        text = str(value).strip()
        unit = UNITS_S.get(text[-1:])
        try:
            seconds = float(text if unit is None else text[:-1]) * (unit or 1.0)
        except ValueError:
            seconds = math.nan
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a time: write seconds, such as 30, or 90s, 2m, 1h or 7d", param, ctx)
        if not self.least <= seconds <= self.most:
            self.fail(
                f"{text} is not in the range from {_time_text(self.least)} to {_time_text(self.most)}",
                param,
                ctx,
            )
        return seconds


@final
class Number(IntegerType):
    """A click parameter type: a whole number of a range.

    Args:
        least: The smallest number.
        most: The largest number.
    """

    name = "number"

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the number."""
        try:
            number = int(str(value))
        except ValueError:
            self.fail(
                f"{value!r} is not a whole number: write a number, such as {max(1, self.least)}", param, ctx
            )
        if not self.least <= number <= self.most:
            self.fail(f"{number} is not in the range from {self.least} to {self.most}", param, ctx)
        return number


class GivenPath(click.Path):
    """A click parameter type: a path that is not empty. As a path, empty text is the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Checks the path."""
        if value == "":
            self.fail("the value is empty: give one", param, ctx)
        return super().convert(value, param, ctx)


class SingleOption(click.Option):
    """An option that selects objects, and is given once at most.

    Click takes the last value of a repeated option. A verb would act on the objects of that one, in silence.
    """

    def __init__(self, *arguments: Any, default: str | None = None, **more: Any) -> None:
        super().__init__(*arguments, **{**more, "multiple": True})
        self.single_default = default

    def consume_value(
        self, ctx: click.Context, opts: Mapping[str, click.Parameter]
    ) -> tuple[Any, ParameterSource]:
        """The value. One of a job file is not a list."""
        value, source = super().consume_value(ctx, opts)
        return (value,) if isinstance(value, str) else value, source

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The only value, or the default.

        Raises:
            click.UsageError: There are several values.
        """
        values = super().process_value(ctx, value)
        if len(values) > 1:
            raise click.UsageError(f"{self.opts[-1]} is given more than once: give it once", ctx)
        return values[0] if values else self.single_default


def _time_text(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        if seconds and seconds % UNITS_S[unit] == 0:
            return f"{seconds / UNITS_S[unit]:g}{unit}"
    return f"{seconds:g}s"


def not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuses an empty option, as :func:`refuse_empty` does. A callback of click."""
    _refuse_if_empty(ctx, param, value)
    return value


def refuse_empty(ctx: click.Context) -> None:
    """Refuses each empty name and option of a verb or a job file, as ``"$NAME"`` is without the variable.

    Arguments of a program may be empty.

    Raises:
        click.BadParameter: A name or an option is empty.
    """
    for param in ctx.command.params:
        if param.name != "arguments":
            _refuse_if_empty(ctx, param, ctx.params.get(param.name or ""))


def _refuse_if_empty(ctx: click.Context, param: click.Parameter, value: object) -> None:
    is_empty = "" in value if isinstance(value, tuple) else value == ""
    if is_empty and ctx.get_parameter_source(param.name or "") in _GIVEN:
        remedy = "give one" if param.required else "give one, or leave it out"
        raise click.BadParameter(f"the value is empty: {remedy}", ctx, param)
