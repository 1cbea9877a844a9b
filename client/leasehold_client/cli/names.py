"""Completion of names: workloads, workers, GPUs, commands, checkpoints, contexts and files.

Each completer takes what click gives it: the context, the parameter, and the incomplete word.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import click
from click.shell_completion import CompletionItem

from leasehold_client.arguments.kinds import Kind
from leasehold_client.cli.name_cache import Names, cached_names
from leasehold_client.contexts import chosen_coordinator, read_contexts
from leasehold_client.errors import LeaseholdError

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

PARKED: Final = frozenset({"SLEEPING", "SUSPENDED", "CHECKPOINTED", "STOPPED"})
"""States of workloads that can be restored."""

ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "REJECTED", "CANCELLED", "EXPIRED"})
"""States of commands that have ended."""


def complete_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a name of the kind that was typed before."""
    kind = ctx.params.get("kind")
    if not isinstance(kind, Kind):
        return []
    # To `get`, the name with these kinds is that of a workload.
    of_workload = ctx.info_name == "get" and kind.plural in ("checkpoints", "events")
    return _complete(ctx, "workloads" if of_workload else kind.plural, incomplete)


def complete_workloads(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a workload that has not ended, with its state."""
    return _complete(ctx, "workloads", incomplete)


def complete_parked(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a workload that can be restored."""
    return [one for one in _complete(ctx, "workloads", incomplete) if one.help in PARKED]


def complete_running(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a workload that is not suspended."""
    return [one for one in _complete(ctx, "workloads", incomplete) if one.help not in PARKED]


def complete_workers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a worker, with its state."""
    return _complete(ctx, "workers", incomplete)


def complete_gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a GPU as worker/slot, also the last one of a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    return _listed(before + comma, _complete(ctx, "gpus", last))


def complete_preempted(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a workload that is not suspended, also the last one of a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    return _listed(before + comma, complete_running(ctx, param, last))


def _listed(before: str, found: list[CompletionItem]) -> list[CompletionItem]:
    return [CompletionItem(f"{before}{one.value}", help=one.help) for one in found]


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a worker or a GPU."""
    return [*_complete(ctx, "workers", incomplete), *_complete(ctx, "gpus", incomplete)]


def complete_commands(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a command, with its operation and state."""
    return _complete(ctx, "commands", incomplete)


def complete_open_commands(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes a command that has not ended."""
    found = _complete(ctx, "commands", incomplete)
    return [one for one in found if (one.help or "").rpartition(" ")[2] not in ENDED]


def complete_contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes a context, with its identity."""
    try:
        contexts = read_contexts().by_name
    except (LeaseholdError, OSError):
        return []
    return [
        CompletionItem(name, help=one.identity)
        for name, one in contexts.items()
        if name.startswith(incomplete)
    ]


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete a file."""
    return [CompletionItem(incomplete, type="file")]


def _complete(ctx: click.Context, plural: str, incomplete: str) -> list[CompletionItem]:
    given = ctx.params.get(_argument_names(ctx), ()) or ()
    return [
        CompletionItem(name, help=remark)
        for name, remark in _names(ctx).get(plural, {}).items()
        if name.startswith(incomplete) and name not in given
    ]


def _argument_names(ctx: click.Context) -> str:
    """The name of the verb's argument that takes several names. Empty: none."""
    many = [one.name for one in ctx.command.params if isinstance(one, click.Argument) and one.nargs == -1]
    return (many[0] if many else "") or ""


def _names(ctx: click.Context) -> Names:
    """The names of the coordinator that the typed options choose. Empty: it does not answer."""
    coordinator, on_behalf_of = ctx.params.get("coordinator"), ctx.params.get("on_behalf_of") or ""
    try:
        address, found = chosen_coordinator(coordinator, ctx.params.get("context"))
    except (LeaseholdError, OSError):
        return {}

    def fetch() -> Names:
        os.environ["GRPC_VERBOSITY"] = "NONE"  # a log line would break the line that is being typed
        from leasehold_client.cli.name_lookup import look_up_names

        return look_up_names(address, found.name if found else None, on_behalf_of)

    return cached_names(f"{address} {found.name if found else ''} {on_behalf_of}", fetch)
