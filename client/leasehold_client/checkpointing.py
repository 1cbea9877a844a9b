"""The verbs about checkpoints on disk: to make one, to list them, and to delete some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from leasehold_client.errors import LeaseholdError
from leasehold_client.standard_output import echo
from leasehold_client.terminal_text import echo_error
from leasehold_client.verb import dry_run_option, output_option, timeout_option, verb, waiting_options

if TYPE_CHECKING:
    from leasehold.v1.checkpoint_pb2 import Checkpoint
    from leasehold.v1.command_pb2 import Command

    from leasehold_client.client import Client
    from leasehold_client.watching import Waiting


@click.command()
@click.argument("workload")
@dry_run_option
@waiting_options()
@timeout_option
@output_option
@verb
def checkpoint(
    client: Client, workload: str, dry_run: bool, waiting: Waiting, timeout_s: float | None, output: str
) -> None:
    """Have the application of a running workload save itself, and go on.

    It must serve a kernel, by leasehold_client.kernel.
    """
    from leasehold_client.conclusion import conclude, conclude_plan

    if dry_run:
        conclude_plan(client, client.plan_checkpoint(workload), workload, "checkpoint", output=output)
        return
    command = client.checkpoint(workload, timeout_s=timeout_s)
    conclude(client, command, workload, waiting=waiting, output=output)


@click.group()
def rm() -> None:
    """Delete what lies on the disks of workers: checkpoints."""


@rm.command("checkpoint")
@click.argument("checkpoint_ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--force", is_flag=True, help="Also those that a parked workload needs, which then can't be woken."
)
@dry_run_option
@waiting_options()
@timeout_option
@output_option
@verb
def rm_checkpoint(
    client: Client,
    checkpoint_ids: Sequence[str],
    force: bool,
    dry_run: bool,
    waiting: Waiting,
    timeout_s: float | None,
    output: str,
) -> None:
    """Delete checkpoints, wherever they are: by one command for each worker that made some of them.

    Workers that share a directory all list what is in it: it is deleted once, and not while one needs it.
    """
    from leasehold_client.conclusion import conclude_all

    known = known_checkpoints(client)
    chosen = _choose(known, checkpoint_ids)
    needed = [one.checkpoint_id for one in known if one.in_use and one.checkpoint_id in checkpoint_ids]
    if dry_run:
        _show_deletion(client, chosen, output)
    if needed and not force:
        raise LeaseholdError(
            f"a parked workload is woken from {needed[0]}, and nothing was deleted: wake or stop it, "
            "or give --force, and it is lost",
            "CHECKPOINT_IN_USE",
        )
    if dry_run:
        return
    holders: dict[str, list[str]] = {}
    for one in chosen:
        holders.setdefault(one.worker_id, []).append(one.checkpoint_id)
    create = partial(client.delete_checkpoints, force=force, timeout_s=timeout_s)
    creations: list[tuple[str, Callable[[], Command]]] = [
        (", ".join(ids), partial(create, worker_id, ids)) for worker_id, ids in holders.items()
    ]
    conclude_all(client, creations, waiting=waiting, output=output)


def known_checkpoints(client: Client, workload: str = "") -> list[Checkpoint]:
    """The checkpoints that are known; says which workers have not told theirs: that is not "none".

    Args:
        client: Where to ask.
        workload: Only those of the workload with this id or name. Empty: of all.
    """
    listed = client.list_checkpoints(workload=workload)
    if listed.unreachable:
        silent = ", ".join(_worker_names(client).get(one, one) for one in listed.unreachable)
        echo_error(f"leasehold: these workers did not answer: {silent}; their checkpoints are not known")
    return list(listed.checkpoints)


def echo_checkpoints(checkpoints: Iterable[Checkpoint], client: Client) -> None:
    """Prints a table of checkpoints, with the names of their workers."""
    from leasehold_client.render import echo_table, size, time_text

    names = _worker_names(client)
    echo_table(
        ["ID", "KIND", "WORKLOAD", "WORKER", "SIZE", "CREATED", "IN USE"],
        [
            [
                one.checkpoint_id,
                _kind(one),
                one.workload_name or one.workload_id,
                names.get(one.worker_id, one.worker_id),
                size(one.size_bytes),
                time_text(one.create_time),
                "yes" if one.in_use else "-",
            ]
            for one in checkpoints
        ],
    )


def _kind(checkpoint: Checkpoint) -> str:
    from leasehold.v1.checkpoint_pb2 import CheckpointKind

    from leasehold_client.render import enum_name

    kind = enum_name(CheckpointKind.Name, checkpoint.kind, "CHECKPOINT_KIND_").lower()
    return f"{kind}, damaged" if checkpoint.problem else kind


def _worker_names(client: Client) -> Mapping[str, str]:
    return {worker.worker_id: worker.name for worker in client.workers()}


def _show_deletion(client: Client, chosen: Sequence[Checkpoint], output: str) -> None:
    """Says what would be deleted, and how many bytes that frees."""
    from leasehold_client.render import echo_json, size, to_dict

    freed_bytes = sum(one.size_bytes for one in chosen)
    if output == "json":
        echo_json({"checkpoints": [to_dict(one) for one in chosen], "freed_bytes": freed_bytes})
    else:
        echo_checkpoints(chosen, client)
        echo(f"would free {size(freed_bytes)} on disk")


def _choose(known: Iterable[Checkpoint], checkpoint_ids: Sequence[str]) -> list[Checkpoint]:
    """Checkpoints as the worker that deletes them has them, each once: the one that made it, if it is there.

    Raises:
        LeaseholdError: UNKNOWN_CHECKPOINT, nobody who answered has one of them.
    """
    listed = list(known)
    chosen: list[Checkpoint] = []
    for checkpoint_id in dict.fromkeys(checkpoint_ids):
        found = [one for one in listed if one.checkpoint_id == checkpoint_id]
        if not found:
            raise LeaseholdError(
                f"no worker that answered has the checkpoint {checkpoint_id!r}, and none was deleted: "
                "`leasehold get checkpoints` lists them",
                "UNKNOWN_CHECKPOINT",
            )
        by_owner = [one for one in found if one.worker_id == one.owner_worker_id]
        chosen.append((by_owner or found)[0])
    return chosen
