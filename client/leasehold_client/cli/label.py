"""``leasehold label`` and ``leasehold annotate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.names import complete_workloads
from leasehold_client.cli.verb import output_option, verb
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import echo_error, safe_cell
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import Workload

    from leasehold_client.coordinator.client import Client

ATTEMPT_LIMIT = 5
"""How often a change is repeated if somebody else changes the workload at the same time."""


@click.group()
def label() -> None:
    """Set or remove labels of a workload."""


@label.command("workload", epilog=examples("leasehold label workload one team=vision tier-"))
@click.argument("name", metavar="WORKLOAD", shell_complete=complete_workloads)
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
@output_option
@verb
def label_workload(client: Client, name: str, changes: Sequence[str], output: str) -> None:
    """Set labels of a workload with KEY=VALUE, and remove labels with KEY-.

    Other labels stay. The workload may have ended.
    """
    _change(client, name, "labels", changes, output)


@click.group()
def annotate() -> None:
    """Set or remove annotations of a workload."""


@annotate.command("workload", epilog=examples('leasehold annotate workload one note="second run"'))
@click.argument("name", metavar="WORKLOAD", shell_complete=complete_workloads)
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
@output_option
@verb
def annotate_workload(client: Client, name: str, changes: Sequence[str], output: str) -> None:
    """Set annotations of a workload with KEY=VALUE, and remove annotations with KEY-.

    Other annotations stay. The workload may have ended.
    """
    _change(client, name, "annotations", changes, output)


def _change(
    client: Client,
    name: str,
    field: Literal["labels", "annotations"],
    changes: Sequence[str],
    output: str,
) -> None:
    from leasehold_client.display.documents import echo_message

    found, absent = _update(client, name, field, changes)
    for key in absent:
        echo_error(f"leasehold: {safe_cell(name)} had no {field[:-1]} {safe_cell(key)} to remove")
    if output != "table":
        echo_message(found, output)
        return
    texts = found.labels if field == "labels" else found.annotations
    echo(f"{found.name}: {', '.join(f'{key}={texts[key]}' for key in sorted(texts)) or f'no {field}'}")


def _update(
    client: Client, name: str, field: Literal["labels", "annotations"], changes: Sequence[str]
) -> tuple[Workload, list[str]]:
    """Reads the labels or annotations, changes some, and writes them unless they have changed meanwhile.

    Returns:
        The workload, and the keys to remove that it did not have.
    """
    workload_id = name
    for attempt in range(ATTEMPT_LIMIT):
        known = client.workload(workload_id)
        workload_id = known.workload_id
        try:
            texts = known.labels if field == "labels" else known.annotations
            new = {field: changed(texts, changes)}
            absent = [one[:-1] for one in changes if "=" not in one and one[:-1] not in texts]
            return client.update_workload(workload_id, **new, etag=known.etag), absent
        except LeaseholdError as error:
            if error.reason != "ETAG_MISMATCH" or attempt == ATTEMPT_LIMIT - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def changed(texts: Mapping[str, str], changes: Sequence[str]) -> dict[str, str]:
    """The labels or annotations after some changes.

    Raises:
        UsageError: A change is neither KEY=VALUE nor KEY-, or a key has two changes.
    """
    values: dict[str, str | None] = {}
    for change in changes:
        key, has_value, value = change.partition("=")
        if has_value and key:
            new = value
        elif not has_value and len(change) > 1 and change.endswith("-"):
            key, new = change[:-1], None
        else:
            raise UsageError(f"invalid change {change!r}: write KEY=VALUE to set it, or KEY- to remove it")
        if values.setdefault(key, new) != new:
            raise UsageError(f"the key {key!r} has two changes: give one")
    return {key: value for key, value in {**texts, **values}.items() if value is not None}
