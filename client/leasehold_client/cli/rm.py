"""``leasehold rm``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import raise_all
from leasehold_client.cli.lookups import known_checkpoints, worker_names
from leasehold_client.cli.names import complete_workers
from leasehold_client.cli.selection import Selection, confirm, name_list, selection_options, yes_option
from leasehold_client.cli.verb import CommandOptions, command_options, dry_run_option, output_option, verb
from leasehold_client.display.standard_output import echo
from leasehold_client.display.terminal_text import echo_error, one_line
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from leasehold.v1.checkpoint_pb2 import Checkpoint
    from leasehold.v1.command_pb2 import Command
    from leasehold.v1.fleet_service_pb2 import DeleteWorkerResponse
    from leasehold.v1.workload_service_pb2 import DeleteWorkloadResponse

    from leasehold_client.coordinator.client import Client

Deleted = TypeVar("Deleted", bound="Message")


@click.group()
def rm() -> None:
    """Delete checkpoints, and records of ended workloads and of workers that are gone."""


@rm.command(
    "workload",
    epilog=examples(
        "leasehold rm workload one two",
        "leasehold rm workload --all --yes",
        "leasehold rm workload -l team=vision",
    ),
)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...")
@selection_options
@yes_option
@output_option
@verb
def rm_workload(client: Client, selection: Selection, yes: bool, output: str) -> None:
    """Delete the records of workloads that have ended, and of their commands.

    Output and checkpoints on the disk of the worker stay. Each workload is deleted or refused by itself. With
    --all, -l or --filter, the workloads that have ended are searched.
    """
    from leasehold.v1 import workload_pb2

    ended = (
        workload_pb2.WORKLOAD_STATE_EXITED,
        workload_pb2.WORKLOAD_STATE_FAILED,
        workload_pb2.WORKLOAD_STATE_RELEASED,
    )
    chosen = selection.find(client, lambda one: one.status.state in ended, include_ended=True)
    if selection.is_search and chosen:
        confirm("delete the records of", [label for label, _ in chosen], yes=yes)

    def told(label: str, deleted: DeleteWorkloadResponse) -> str:
        count = deleted.deleted_command_count
        return f"{label}: deleted, with {count} command{'' if count == 1 else 's'}"

    is_list = selection.is_search or len(chosen) > 1
    _delete(chosen, client.delete_workload, told, output, is_list=is_list)


@rm.command(
    "worker",
    epilog=examples(
        "leasehold rm worker gpu-07", "leasehold rm worker gpu-07 gpu-08", "leasehold rm worker --all --yes"
    ),
)
@click.argument("names", nargs=-1, metavar="[NAME|ID]...", shell_complete=complete_workers)
@click.option("--all", "is_all", is_flag=True, help="All that are LOST or DISCONNECTED.")
@yes_option
@output_option
@verb
def rm_worker(client: Client, names: Sequence[str], is_all: bool, yes: bool, output: str) -> None:
    """Delete the records of workers that are not connected.

    The open workloads and commands of such a worker become FAILED. Nothing on its host changes. If the worker
    connects again, it is registered again, with the workloads that it still has.
    """
    if bool(names) == is_all:
        raise UsageError("name either workers, or --all")
    chosen = [(name, name) for name in dict.fromkeys(names)]
    if is_all:
        chosen = _gone_workers(client)
        if chosen:
            confirm("delete the records of", [label for label, _ in chosen], yes=yes)

    def told(label: str, deleted: DeleteWorkerResponse) -> str:
        failed = len(deleted.failed_workload_ids)
        workloads = f"; {failed} workload{'' if failed == 1 else 's'} of it FAILED" if failed else ""
        return f"{deleted.worker.name} ({deleted.worker.worker_id}): deleted{workloads}"

    _delete(chosen, client.delete_worker, told, output, is_list=is_all or len(chosen) > 1)


def _gone_workers(client: Client) -> list[tuple[str, str]]:
    """Name and id of each worker that is lost or disconnected. Says on standard error which others are kept.

    An unconfirmed worker is kept although it may be deleted: after a restart of the coordinator, each worker
    is unconfirmed until it reconnects or becomes lost.
    """
    from leasehold.v1 import worker_pb2

    from leasehold_client.messages import enum_name

    gone = (worker_pb2.WORKER_STATE_LOST, worker_pb2.WORKER_STATE_DISCONNECTED)
    workers = client.workers()
    chosen = [(one.name, one.worker_id) for one in workers if one.state in gone]
    kept = [
        f"{one.name} ({enum_name(worker_pb2.WorkerState.Name, one.state, 'WORKER_STATE_')})"
        for one in workers
        if one.state not in gone
    ]
    if kept:
        names = one_line(name_list(kept))
        echo_error(f"leasehold: kept, since neither LOST nor DISCONNECTED: {names}")
    if not chosen:
        echo_error("leasehold: no worker matches, so nothing was done")
    return chosen


def _delete(
    chosen: Sequence[tuple[str, str]],
    delete: Callable[[str], Deleted],
    told: Callable[[str, Deleted], str],
    output: str,
    *,
    is_list: bool,
) -> None:
    """Deletes records, each by itself.

    Args:
        chosen: Name for people, and name or id for the call, of each record.
        delete: Deletes one record.
        told: The line about a deleted record.
        output: Output format.
        is_list: Whether the document is a list.

    Raises:
        LeaseholdError: The last refusal. The others were printed.
    """
    from leasehold_client.display.documents import echo_document, echo_message, to_dict

    refusals: list[LeaseholdError] = []
    documents: list[dict[str, object]] = []
    for label, name in chosen:
        try:
            deleted = delete(name)
        except NoCoordinatorError as error:
            refusals.append(error)
            break
        except LeaseholdError as error:
            refusals.append(error)
            continue
        if output == "table":
            echo(told(label, deleted))
        elif is_list:
            documents.append(to_dict(deleted))
        else:
            echo_message(deleted, output)
    if is_list and output != "table":
        echo_document({"deleted": documents}, output)
    raise_all(refusals)


@rm.command(
    "checkpoint",
    epilog=examples("leasehold rm checkpoint k-5c1e0f", "leasehold rm checkpoint --all --dry-run"),
)
@click.argument("checkpoint_ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--all", "is_all", is_flag=True, help="All that no suspended workload needs, or may need: see IN USE."
)
@yes_option
@click.option(
    "--force",
    is_flag=True,
    help="Delete also a named checkpoint that a suspended workload needs, or may need. The workload can't be "
    "restored then. Without effect on --all.",
)
@dry_run_option
@command_options
@verb
def rm_checkpoint(
    client: Client,
    checkpoint_ids: Sequence[str],
    is_all: bool,
    yes: bool,
    force: bool,
    dry_run: bool,
    options: CommandOptions,
) -> None:
    """Delete checkpoints, with one command per worker that made any of them.

    Workers that share a directory list the same checkpoints. A shared checkpoint is deleted once, and only if
    no worker needs it. If the worker that made it does not answer, that is unknown: only --force with the ID
    deletes the checkpoint.
    """
    from leasehold_client.cli.conclusion import conclude_all

    if bool(checkpoint_ids) == is_all:
        raise UsageError("name either checkpoints, or --all")
    known = known_checkpoints(client)
    in_use = {one.checkpoint_id: one for one in known if one.in_use}
    if is_all:
        force = False
        listed = dict.fromkeys(one.checkpoint_id for one in known)
        checkpoint_ids = [one for one in listed if one not in in_use]
        _tell_kept(client, in_use.values())
        if not checkpoint_ids:
            echo_error("leasehold: no checkpoint matches, so nothing was done")
        elif not dry_run:
            confirm("delete", checkpoint_ids, yes=yes)
    chosen = _choose(known, checkpoint_ids)
    if dry_run:
        _show_deletion(client, chosen, options)
    if not force:
        _require_unneeded(client, [in_use[one] for one in checkpoint_ids if one in in_use])
    if dry_run:
        return
    holders: dict[str, list[str]] = {}
    for one in chosen:
        holders.setdefault(one.worker_id, []).append(one.checkpoint_id)
    create = partial(client.delete_checkpoints, force=force, timeout_s=options.timeout_s)
    creations: list[tuple[str, Callable[[], Command]]] = [
        (", ".join(ids), partial(create, worker_id, ids)) for worker_id, ids in holders.items()
    ]
    conclude_all(client, creations, options, is_search=is_all)


def _tell_kept(client: Client, kept: Iterable[Checkpoint]) -> None:
    """Names the checkpoints that --all does not delete on standard error, with the reason."""
    in_use = list(kept)
    needed = [one for one in in_use if not one.in_use_unknown]
    unknown = [one for one in in_use if one.in_use_unknown]
    if needed:
        ids = one_line(name_list([one.checkpoint_id for one in needed]))
        echo_error(f"leasehold: kept, since suspended workloads need them: {ids}")
    if unknown:
        names = worker_names(client)
        ids = one_line(name_list([f"{one.checkpoint_id} ({_owner(one, names)})" for one in unknown]))
        echo_error(
            "leasehold: kept, since the workers that made them did not list them, and may need them: "
            f"{ids}; name a checkpoint with --force to delete it"
        )


def _require_unneeded(client: Client, in_use: Sequence[Checkpoint]) -> None:
    """Refuses checkpoints that a workload needs or may need, as the worker would.

    Raises:
        LeaseholdError: CHECKPOINT_IN_USE.
    """
    for one in in_use:
        if one.in_use_unknown:
            names = worker_names(client)
            way = "ask again when the worker lists it, or " if one.owner_worker_id in names else ""
            raise LeaseholdError(
                f"the checkpoint {one.checkpoint_id} belongs to worker {_owner(one, names)}, which did not "
                f"list it and whose workloads may need it, and nothing was deleted: {way}delete it with "
                "--force",
                "CHECKPOINT_IN_USE",
            )
        raise LeaseholdError(
            f"a suspended workload needs the checkpoint {one.checkpoint_id}, and nothing was deleted: "
            "restore or stop the workload, or lose it with --force",
            "CHECKPOINT_IN_USE",
        )


def _owner(checkpoint: Checkpoint, names: Mapping[str, str]) -> str:
    return names.get(checkpoint.owner_worker_id, checkpoint.owner_worker_id)


def _show_deletion(client: Client, chosen: Sequence[Checkpoint], options: CommandOptions) -> None:
    """Prints the checkpoints that would be deleted, and the bytes that would be freed."""
    from leasehold_client.byte_sizes import size_text
    from leasehold_client.display.documents import echo_document, to_dict
    from leasehold_client.display.record_tables import checkpoint_columns
    from leasehold_client.display.tables import echo_table

    freed_bytes = sum(one.size_bytes for one in chosen)
    if options.is_document:
        document = {"checkpoints": [to_dict(one) for one in chosen], "freed_bytes": str(freed_bytes)}
        echo_document(document, options.output)
    else:
        echo_table(checkpoint_columns(worker_names(client)), chosen)
        echo(f"would free {size_text(freed_bytes)} on disk")


def _choose(known: Iterable[Checkpoint], checkpoint_ids: Sequence[str]) -> list[Checkpoint]:
    """Picks each checkpoint once, from the worker that made it if that worker lists it.

    Raises:
        LeaseholdError: UNKNOWN_CHECKPOINT: no worker that answered has the checkpoint.
    """
    listed = list(known)
    chosen: list[Checkpoint] = []
    for checkpoint_id in dict.fromkeys(checkpoint_ids):
        found = [one for one in listed if one.checkpoint_id == checkpoint_id]
        if not found:
            raise LeaseholdError(
                f"no worker that answered has a checkpoint {checkpoint_id!r}, and nothing was deleted: "
                "`leasehold get checkpoints` lists checkpoints",
                "UNKNOWN_CHECKPOINT",
            )
        by_owner = [one for one in found if one.worker_id == one.owner_worker_id]
        chosen.append((by_owner or found)[0])
    return chosen
