"""Lists of objects of one kind, for ``get``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, final

from leasehold_client.arguments.gpu_names import gpu_place, gpu_places, resolve_list
from leasehold_client.arguments.selectors import both, quoted
from leasehold_client.cli.lookups import known_checkpoints, known_gpus, places_in, worker_names
from leasehold_client.display import fleet_tables, record_tables
from leasehold_client.display.tables import Column
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_client.messages import gpu_targets, workload_targets

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from leasehold.v1.audit_pb2 import AuditEntry
    from leasehold.v1.command_pb2 import Command

    from leasehold_client.coordinator.client import Client

Shown = TypeVar("Shown")

NAMED_LIMIT = 40
"""Workloads whose names are looked up by one filter, which has at most 50 comparisons."""


@final
@dataclass(frozen=True, slots=True)
class Listing:
    """Objects of one kind, and how they are printed.

    Attributes:
        messages: The objects.
        columns: The columns of their table.
        name: The name of an object, as other verbs take it.
        identifier: The id of an object.
        refusals: Why some of the named objects are missing.
    """

    messages: Sequence[Message]
    columns: Sequence[Column[Any]]  # of the messages' own type
    name: Callable[[Any], str]
    identifier: Callable[[Any], str]
    refusals: Sequence[LeaseholdError] = field(default=())


@final
@dataclass(frozen=True, slots=True)
class Query:
    """Which objects are listed.

    Attributes:
        names: Names or ids. Empty: all. For checkpoints and events, workloads. For the audit, identities.
        filter_text: Filter of the coordinator. Empty: all.
        sort_by: Fields to sort by. Empty: the order of the list.
        include_ended: Whether workloads that have ended are listed too.
    """

    names: Sequence[str] = ()
    filter_text: str = ""
    sort_by: str = ""
    include_ended: bool = False


def list_kind(client: Client, plural: str, query: Query) -> Listing:
    """Lists the objects of a kind.

    Raises:
        LeaseholdError: The coordinator refuses the list. A missing object is a refusal of the listing.
    """
    names, text, order = query.names, query.filter_text, query.sort_by
    match plural:
        case "workers":
            workers, refusals = _each(client.worker, names)
            if not names:
                workers = client.workers(filter=text, order_by=order)
            columns = fleet_tables.WORKER_COLUMNS
            return Listing(workers, columns, lambda one: one.name, lambda one: one.worker_id, refusals)
        case "gpus":
            gpus = known_gpus(client, text, order)
            if names:
                found_uuids, refusals = _each(lambda name: resolve_list(name, gpus), names)
                wanted = {uuid for uuids in found_uuids for uuid in uuids}
                gpus = [gpu for gpu in gpus if gpu.gpu.uuid in wanted]
                return Listing(gpus, fleet_tables.GPU_COLUMNS, gpu_place, lambda one: one.gpu.uuid, refusals)
            return Listing(gpus, fleet_tables.GPU_COLUMNS, gpu_place, lambda one: one.gpu.uuid)
        case "workloads":
            workloads, refusals = _each(client.workload, names)
            if not names:
                workloads = client.workloads(include_ended=query.include_ended, filter=text, order_by=order)
            columns_of = fleet_tables.workload_columns(gpu_places(client.gpus()))
            return Listing(workloads, columns_of, lambda one: one.name, lambda one: one.workload_id, refusals)
        case "checkpoints":
            lists, refusals = _each(lambda name: known_checkpoints(client, name, text), names or [""])
            checkpoints = [one for found in lists for one in found]
            checkpoint_columns = record_tables.checkpoint_columns(worker_names(client))
            return Listing(checkpoints, checkpoint_columns, _checkpoint_id, _checkpoint_id, refusals)
        case "events":
            found, refusals = _each(
                lambda name: client.events(name, filter=text, order_by=order), names or [""]
            )
            events = [event for some in found for event in some]
            event_columns = record_tables.event_columns(places_in(client, (one.message for one in events)))
            return Listing(events, event_columns, _event_id, _event_id, refusals)
        case "audit":
            parts, refusals = _each(lambda name: _audit_entries(client, name, text, order), names or [""])
            entries = [entry for part in parts for entry in part]
            return Listing(entries, record_tables.AUDIT_COLUMNS, _audit_number, _audit_number, refusals)
        case _:
            commands, refusals = _each(client.command, names)
            if not names:
                commands = client.commands(filter=text, order_by=order)
            command_columns = record_tables.command_columns(targets_of(client, commands))
            return Listing(commands, command_columns, _command_id, _command_id, refusals)


def targets_of(client: Client, commands: Sequence[Command]) -> dict[str, str]:
    """Names of the workers and workloads of commands by id, and of their GPUs by UUID.

    Empty if the coordinator refuses.
    """
    targets = [workload_targets(command) for command in commands]
    ids = [*dict.fromkeys(one for some in targets for one in some)]
    try:
        names = dict(worker_names(client)) if not all(targets) else {}
        if any(map(gpu_targets, commands)):
            names |= gpu_places(client.gpus())
        for begin in range(0, len(ids), NAMED_LIMIT):
            text = " OR ".join(f"workload = {quoted(one)}" for one in ids[begin : begin + NAMED_LIMIT])
            found = client.workloads(include_ended=True, filter=text)
            names |= {workload.workload_id: workload.name for workload in found}
    except LeaseholdError:
        return {}
    return names


def _each(find: Callable[[str], Shown], names: Sequence[str]) -> tuple[list[Shown], Sequence[LeaseholdError]]:
    """Objects that were found by name, and the refusals of the other names.

    Raises:
        NoCoordinatorError: No coordinator answers.
        LeaseholdError: The only name is refused.
    """
    found: list[Shown] = []
    refusals: list[LeaseholdError] = []
    for name in names:
        try:
            found.append(find(name))
        except NoCoordinatorError:
            raise
        except LeaseholdError as error:
            if len(names) == 1:
                raise
            refusals.append(error)
    return found, refusals


def _audit_entries(client: Client, identity: str, text: str, order: str) -> list[AuditEntry]:
    """Entries of the audit. Empty: of all identities.

    Raises:
        LeaseholdError: The audit has no such entry of the identity.
    """
    of_identity = f"identity = {quoted(identity)}" if identity else ""
    found = client.audit_entries(filter=both(text, of_identity), order_by=order)
    if identity and not found:
        raise LeaseholdError(
            f"no entry of the audit is of the identity {identity!r}{' and matches' if text else ''}: "
            "`leasehold get audit` shows identities, such as user/alice"
        )
    return found


def _audit_number(message: Any) -> str:
    return str(message.number)


def _checkpoint_id(message: Any) -> str:  # Message has no fields of its own
    return str(message.checkpoint_id)


def _event_id(message: Any) -> str:
    return str(message.event_id)


def _command_id(message: Any) -> str:
    return str(message.command_id)
