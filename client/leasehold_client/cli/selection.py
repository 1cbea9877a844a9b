"""Which workloads a verb is for: names, labels, a filter, or all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, final

import click

from leasehold_client.arguments.selectors import both, label_filter
from leasehold_client.cli.exit_codes import EXIT_FAILED
from leasehold_client.cli.parameter_types import SingleOption
from leasehold_client.display.terminal_text import echo_error, safe_cell
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import Workload

    from leasehold_client.coordinator.client import Client


@final
@dataclass(frozen=True, slots=True)
class Selection:
    """The workloads of a verb.

    Attributes:
        names: Names or ids.
        selector: Labels, as of kubectl. Empty: any.
        filter_text: Filter of the coordinator. Empty: any.
        is_all: Whether all workloads are meant to which the verb applies.
    """

    names: tuple[str, ...]
    selector: str = ""
    filter_text: str = ""
    is_all: bool = False

    @property
    def is_search(self) -> bool:
        """Whether the workloads are searched, and not named."""
        return bool(self.selector or self.filter_text or self.is_all)

    def find(
        self, client: Client, applies: Callable[[Workload], bool], *, include_ended: bool = False
    ) -> list[tuple[str, str]]:
        """Finds the workloads, and says on standard error if a search found none.

        Args and raises:
            As :meth:`matches`.

        Returns:
            As :meth:`matches`.
        """
        chosen = self.matches(client, applies, include_ended=include_ended)
        if not chosen:
            echo_error("leasehold: no workload matches, so nothing was done")
        return chosen

    def matches(
        self, client: Client, applies: Callable[[Workload], bool], *, include_ended: bool = False
    ) -> list[tuple[str, str]]:
        """Finds the workloads.

        Args:
            client: The client.
            applies: Whether the verb applies to a workload. A workload that is named is not asked about.
            include_ended: Whether workloads that have ended are searched too.

        Returns:
            Name for people, and name or id for calls, of each workload. Empty: the search found none.

        Raises:
            UsageError: Nothing is named, or a name and a search are given.
        """
        if self.names and self.is_search:
            raise UsageError(f"leave out {self.names[0]!r}, or -l, --filter and --all")
        if self.names:
            return [(name, name) for name in dict.fromkeys(self.names)]
        if not self.is_search:
            raise UsageError("name a workload, or choose some by -l, --filter or --all")
        found = self.search(client, include_ended=include_ended)
        return [(one.name, one.workload_id) for one in found if applies(one)]

    def search(self, client: Client, *, include_ended: bool = False) -> list[Workload]:
        """The workloads that a search finds."""
        text = both(self.filter_text, label_filter(self.selector))
        return client.workloads(include_ended=include_ended, filter=text)


def selection_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that search workloads. With ``names``, they become the argument ``selection``."""

    @click.option(
        "-l",
        "--selector",
        cls=SingleOption,
        default="",
        metavar="LABELS",
        help="All with these labels, such as team=vision.",
    )
    @click.option(
        "--filter",
        "filter_text",
        cls=SingleOption,
        default="",
        metavar="FILTER",
        help="All that match, as for `leasehold get`.",
    )
    @click.option("--all", "is_all", is_flag=True, help="All to which the verb applies.")
    @wraps(function)
    def call(
        *positional: Any,
        names: Sequence[str],
        selector: str,
        filter_text: str,
        is_all: bool,
        **named: Any,
    ) -> None:
        function(*positional, selection=Selection(tuple(names), selector, filter_text, is_all), **named)

    return call


yes_option = click.option("--yes", is_flag=True, help="Do not ask before a search is used.")


def confirm(question: str, names: Sequence[str], *, yes: bool) -> None:
    """Asks whether to go on with what a search found. Standard input must be a terminal, or ``yes`` be given.

    Raises:
        UsageError: Nobody can be asked.
        SystemExit: The answer is no.
    """
    if yes:
        return
    listed = name_list(names)
    if not sys.stdin.isatty():
        raise UsageError(f"{question} {listed}: without a terminal, answer with --yes")
    if not click.confirm(safe_cell(f"{question} {listed}?"), err=True):
        echo_error("leasehold: nothing was done")
        sys.exit(EXIT_FAILED)


def name_list(names: Sequence[str]) -> str:
    """The first 20 names, and the number of the others."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
