"""Options of `leasehold simgpu`, and their types."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from leasehold_simgpu.host import DIRECTORY_VARIABLE
from leasehold_simgpu.records import ThrottleReason

_Command = TypeVar("_Command", bound=Callable[..., Any])

_UNITS: Final = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class SizeType(click.ParamType[int]):
    """A number of bytes such as 80GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads the number. Fails with a message that shows a valid size."""
        match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(value))
        if match is None or match[2].upper() not in _UNITS:
            self.fail(f"{value!r} is not a size: write one like 80GiB, with KiB, MiB, GiB or TiB", param, ctx)
        return int(match[1]) * _UNITS[match[2].upper()]


class SignalType(click.ParamType[int]):
    """A signal by name or number."""

    name = "signal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads KILL, SIGKILL or 9."""
        text = str(value).upper()
        if text.isdecimal() and int(text) in set(signal.Signals):
            return int(text)
        name = text if text.startswith("SIG") else f"SIG{text}"
        if name not in signal.Signals.__members__:
            self.fail(f"{value!r} is not a signal: write one like KILL or 9", param, ctx)
        return signal.Signals[name]


class DirectoryType(click.Path):
    """A directory. As a path, empty text would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses empty text."""
        if value == "":
            self.fail("the value is empty: give one", param, ctx)
        return super().convert(value, param, ctx)


class ThrottleReasonType(click.ParamType[int]):
    """Reasons of throttling by name."""

    name = "reasons"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads `none`, or names with commas between them, into NVML's bits."""
        reasons = ThrottleReason(0)
        for name in () if value == "none" else str(value).split(","):
            member = ThrottleReason.__members__.get(name.upper().replace("-", "_"))
            if member is None:
                known = ", ".join(reason.replace("_", "-").lower() for reason in ThrottleReason.__members__)
                self.fail(f"unknown reason of throttling {name!r}: choose from none, {known}", param, ctx)
            reasons |= member
        return reasons


def directory_option(command: _Command) -> _Command:
    """The option --dir, for commands about an existing host."""
    return click.option(
        "--dir",
        "directory",
        envvar=DIRECTORY_VARIABLE,
        type=DirectoryType(file_okay=False, path_type=Path),
        required=True,
        help=f"The host's directory. Default: ${DIRECTORY_VARIABLE}.",
    )(command)
