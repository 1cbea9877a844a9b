"""``leasehold describe``: all about one object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from leasehold_client.arguments.gpu_names import gpu_places, resolve_gpu
from leasehold_client.arguments.kinds import DESCRIBED, Kind
from leasehold_client.arguments.selectors import quoted
from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import raise_all
from leasehold_client.cli.kind_argument import KindType
from leasehold_client.cli.names import complete_kind
from leasehold_client.cli.verb import verb
from leasehold_client.display.standard_output import echo_lines
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError

if TYPE_CHECKING:
    from leasehold.v1.event_pb2 import Event

    from leasehold_client.coordinator.client import Client
    from leasehold_client.display.tables import Column

Row = TypeVar("Row")


@click.command(
    epilog=examples(
        "leasehold describe workload one",
        "leasehold describe worker alpha",
        "leasehold describe gpu alpha/0",
        "leasehold describe command c-5c1e0f",
    )
)
@click.argument("kind", type=KindType(DESCRIBED))
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_kind)
@verb
def describe(client: Client, kind: Kind, names: Sequence[str]) -> None:
    """Show all about one object: its parts, times, commands and events.

    KIND is worker, gpu, workload, checkpoint or command. NAME is a name or an id. The text is for people:
    programs use `leasehold get -o json`.
    """
    if kind not in DESCRIBED:
        raise UsageError(
            f"{kind.objects} have no description: `leasehold get {kind.plural} -o wide` lists them"
        )
    refusals: list[LeaseholdError] = []
    for number, name in enumerate(dict.fromkeys(names)):
        if number > len(refusals):
            echo_lines("\n")
        try:
            _describe(client, kind.plural, name)
        except LeaseholdError as error:
            refusals.append(error)
            if isinstance(error, NoCoordinatorError):
                break
    raise_all(refusals)


def _describe(client: Client, plural: str, name: str) -> None:
    from leasehold_client.cli.listing import targets_of
    from leasehold_client.cli.lookups import (
        gpus_if_known,
        gpus_to_name,
        known_checkpoints,
        preempted_if_known,
        worker_names,
    )
    from leasehold_client.display import descriptions, fleet_tables, record_tables

    match plural:
        case "workers":
            worker = client.worker(name)
            descriptions.describe_worker(worker).echo()
            of_worker = f"worker = {quoted(worker.worker_id)}"
            gpus = client.gpus(filter=of_worker)
            _section("GPUs", fleet_tables.GPU_COLUMNS, gpus)
            columns = fleet_tables.workload_columns(gpu_places(gpus))
            _section("Workloads", columns, client.workloads(filter=of_worker))
            _records(client, of_worker, f"worker = {quoted(worker.worker_id)}")
        case "gpus":
            with gpus_to_name(client) as gpus:
                uuid = resolve_gpu(name, gpus)
            [gpu] = [one for one in gpus if one.gpu.uuid == uuid][:1]
            descriptions.describe_gpu(gpu).echo()
        case "workloads":
            workload = client.workload(name)
            places = gpu_places(gpus_if_known(client))
            worker_name = worker_names(client).get(workload.worker_id, workload.worker_id)
            descriptions.describe_workload(workload, worker_name, places).echo()
            of_workload = f"workload = {quoted(workload.workload_id)}"
            _records(client, of_workload, of_workload)
        case "checkpoints":
            found = [one for one in known_checkpoints(client) if one.checkpoint_id == name]
            if not found:
                raise LeaseholdError(
                    f"no worker that answered has a checkpoint {name!r}: `leasehold get checkpoints` lists "
                    "checkpoints",
                    "UNKNOWN_CHECKPOINT",
                )
            owner = worker_names(client).get(found[0].worker_id, found[0].worker_id)
            descriptions.describe_checkpoint(found[0], owner).echo()
        case _:
            command = client.command(name)
            about = record_tables.command_about(command, targets_of(client, [command]))
            preempted = preempted_if_known(client, list(command.result.preempted_workload_ids))
            places = gpu_places(gpus_if_known(client))
            descriptions.describe_command(command, about, places, preempted).echo()
            events = client.events(
                limit=descriptions.SECTION_LIMIT, filter=f"command_id = {quoted(command.command_id)}"
            )
            _events(client, events)


def _records(client: Client, of_commands: str, of_events: str) -> None:
    """Prints the newest commands and events of an object."""
    from leasehold_client.cli.listing import targets_of
    from leasehold_client.display import descriptions, record_tables

    commands = client.commands(descriptions.SECTION_LIMIT, filter=of_commands)
    _section("Commands", record_tables.command_columns(targets_of(client, commands)), commands)
    _events(client, client.events(limit=descriptions.SECTION_LIMIT, filter=of_events))


def _events(client: Client, events: Iterable[Event]) -> None:
    from leasehold_client.cli.lookups import places_in
    from leasehold_client.display import record_tables

    listed = list(events)
    columns = record_tables.event_columns(places_in(client, (one.message for one in listed)))
    _section("Events", columns, listed)


def _section(title: str, columns: Sequence[Column[Row]], rows: Sequence[Row]) -> None:
    """Prints a table with a heading, or nothing if the table is empty."""
    from leasehold_client.display.descriptions import heading
    from leasehold_client.display.tables import echo_table

    if rows:
        echo_lines(heading(title))
        echo_table(columns, rows)
