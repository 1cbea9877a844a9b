"""The subcommands that other packages add through the entry points ``leasehold.commands``."""

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, requires
from importlib.util import find_spec
from typing import Final

import click

SUMMARIES: Final = {
    "coordinator": "Run the coordinator, to which workers connect and clients talk.",
    "doctor": "Check this GPU host: every precondition, each ok or with its remedy.",
    "simgpu": "Run programs on simulated GPU hosts.",
    "validate": "Suspend, restore and move a built-in program on this host's GPUs, and prove it.",
    "worker": "Run the worker agent of a GPU host.",
}
"""What ``leasehold --help`` says of them, so that it need load none."""


def rooms() -> dict[str, EntryPoint]:
    """The entry points by the names of their subcommands."""
    return {point.name: point for point in entry_points(group="leasehold.commands")}


def load(point: EntryPoint) -> click.Command:
    """The subcommand itself.

    Raises:
        ModuleNotFoundError: Its packages are not installed.
    """
    loaded: object = point.load()  # its type is only known at run time
    if not isinstance(loaded, click.Command):
        raise TypeError(f"entry point {point.value} is not a click command")
    return loaded


def extra_of(point: EntryPoint) -> str:
    """The extra that has what the subcommand needs: each package ``leasehold_X`` has an extra ``X``."""
    return point.module.partition(".")[0].removeprefix("leasehold_")


def missing_package(point: EntryPoint) -> str | None:
    """A package that the subcommand needs and that is not installed, found without importing any."""
    package = point.module.partition(".")[0]
    if find_spec(package) is None:
        return package
    return next((name for name in _packages_of_extra(extra_of(point)) if not _is_installed(name)), None)


def _packages_of_extra(extra: str) -> Iterator[str]:
    try:
        requirements = requires("leasehold") or []
    except PackageNotFoundError:
        return
    for requirement in requirements:
        named, _, marker = requirement.partition(";")
        if re.search(rf"\bextra == ['\"]{re.escape(extra)}['\"]", marker):
            yield re.split(r"[^\w.-]", named.strip(), maxsplit=1)[0]


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
