"""``leasehold get … --watch``: one line per change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from leasehold_client.cli.lookups import ShortNames
from leasehold_client.display.standard_output import echo_lines
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from leasehold.v1.worker_pb2 import Worker

    from leasehold_client.coordinator.client import Client

AGAIN_S: Final = 1.0
"""Wait before another watch."""

WATCHED = ("workers", "gpus", "workloads", "commands", "events")


def echo_changes(client: Client, kind: str, name: str | None, filter_text: str, output: str) -> None:
    """Prints the entries of a kind, and then each change and deletion, until the user ends it.

    After a restart of the coordinator, the entries are printed again.

    Raises:
        UsageError: The kind can't be watched, or not by name.
    """
    if kind not in WATCHED:
        raise UsageError(f"--watch can't show {kind}: choose {', '.join(WATCHED)}")
    if name and kind not in ("workloads", "events"):
        raise UsageError(f"--watch shows all {kind}: leave the name out")
    is_again = False
    short = ShortNames(client)
    while True:
        shown = _Shown(bool(filter_text))
        try:
            if is_again and output != "table" and not echo_lines(_document_text({"reset": {}}, output)):
                return
            is_again = True
            for response in _responses(client, kind, name or "", filter_text):
                text = _text(shown, response, kind, output)
                if kind == "events" and output == "table":
                    text = short.replaced(text)
                if text and not echo_lines(text):
                    return
            return
        except LeaseholdError as error:
            wait_missed(error)


def wait_missed(error: LeaseholdError) -> None:
    """Tells that a watch has missed changes, and waits before another one. Raises any other error."""
    if error.reason != "INVALID_TOKEN":
        raise error
    echo_error("leasehold: the coordinator has started anew, or changes came too fast: watching again")
    time.sleep(AGAIN_S)


def _responses(client: Client, kind: str, name: str, filter_text: str) -> Iterator[Message]:
    match kind:
        case "workloads":
            return client.watch_workloads(name, filter=filter_text)
        case "commands":
            return client.watch_commands(filter=filter_text)
        case "events":
            return client.watch_events(workload=name, filter=filter_text)
        case _:
            return client.watch_fleet(filter=filter_text)


@final
@dataclass(slots=True)
class _Shown:
    """The entries that a watch has printed, for later changes.

    Attributes:
        is_filtered: Whether the watch has a filter.
        names: The names of printed entries by id, unless the name is the id.
        workers: Workers by id, for the contact of GPUs.
    """

    is_filtered: bool
    names: dict[str, str] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)


def _text(shown: _Shown, response: Message, kind: str, output: str) -> str:
    """A change as text. Empty: nothing to print."""
    change = response.WhichOneof("change") or "bookmark"
    if kind == "gpus" and "worker" in change:
        return _contact_text(shown, response, change, output)
    if change == "bookmark" or (kind == "workers" and "gpu" in change):
        return ""
    name = _known_name(shown, response, change)
    if not name and change.startswith("deleted_"):
        return ""
    if output == "table":
        return _line(shown, response, change, name)
    return _change_text(response, change, output)


def _change_text(response: Message, change: str, output: str) -> str:
    """A change as a document."""
    from leasehold_client.display.documents import to_dict

    return _document_text({change: to_dict(response)[change]}, output)


def _document_text(document: dict[str, object], output: str) -> str:
    """A document of a stream: one line of JSON, or YAML after its separator."""
    import json

    from leasehold_client.display.documents import document_text

    return json.dumps(document) if output == "json" else f"---\n{document_text(document, output)}"


def _known_name(shown: _Shown, response: Message, change: str) -> str:
    """The name of a changed entry. Empty: a deletion of an entry that was not printed.

    With a filter, each change of an entry that does not match comes as a deletion.
    """
    from leasehold_client.arguments.gpu_names import gpu_place

    value = getattr(response, change)
    match change:
        case "worker":
            identifier, name = value.worker_id, value.name
        case "gpu":
            identifier, name = value.gpu.uuid, gpu_place(value)
        case "workload":
            identifier, name = value.workload_id, value.name
        case "command":
            identifier = name = value.command_id
        case "event":
            return str(value.event_id)
        case _:
            return shown.names.pop(value, "" if shown.is_filtered else str(value))
    if shown.is_filtered or name != identifier:
        shown.names[identifier] = name
    return str(name)


def _contact_text(shown: _Shown, response: Message, change: str, output: str) -> str:
    """A worker whose state changed since its last one, in a watch of GPUs: a line, or a document.

    A document comes for the first state too, since those of GPUs have no contact.
    """
    from leasehold_client.display.fleet_tables import worker_state
    from leasehold_client.display.terminal_text import one_line

    value = getattr(response, change)
    if change == "deleted_worker_id":  # with a filter, also a worker that does not match
        shown.workers.pop(value, None)
        return ""
    known = shown.workers.get(value.worker_id)
    shown.workers[value.worker_id] = value
    if known is not None and known.state == value.state:
        return ""
    if output != "table":
        return _change_text(response, change, output)
    return "" if known is None else one_line(f"{value.name} {worker_state(value)}")


def _line(shown: _Shown, response: Message, change: str, name: str) -> str:
    """A change as one line: a name or an id, and the state."""
    from leasehold_client.display.fleet_tables import slot_state, worker_state
    from leasehold_client.display.record_tables import event_text
    from leasehold_client.display.terminal_text import one_line
    from leasehold_client.messages import command_state, operation_name, time_text, workload_state

    value = getattr(response, change)
    match change:
        case "worker":
            text = f"{name} {worker_state(value)}"
        case "gpu":
            holder = value.workload_name or value.lease.workload_id
            text = f"{name} {slot_state(value)} {holder}".rstrip() + _contact_mark(shown, value.worker_id)
        case "workload":
            text = f"{name} {workload_state(value)}"
        case "command":
            text = f"{name} {operation_name(value)} {command_state(value)} {value.phase}".rstrip()
        case "event":
            text = f"{time_text(value.time)} {event_text(value)}"
        case _:
            text = f"{name} no longer matches, or was deleted" if shown.is_filtered else f"{name} deleted"
    return one_line(text)


def _contact_mark(shown: _Shown, worker_id: str) -> str:
    """The mark of a GPU whose host is out of contact: its state is the last known one."""
    from leasehold.v1 import worker_pb2

    from leasehold_client.messages import enum_name

    worker = shown.workers.get(worker_id)
    if worker is None or worker.state == worker_pb2.WORKER_STATE_CONNECTED:
        return ""
    return f" (host {enum_name(worker_pb2.WorkerState.Name, worker.state, 'WORKER_STATE_')})"
