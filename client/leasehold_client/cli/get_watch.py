"""``leasehold get … --watch``: one line per change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from leasehold_client.display.standard_output import echo_lines
from leasehold_client.display.terminal_text import echo_error
from leasehold_client.errors import LeaseholdError, UsageError

if TYPE_CHECKING:
    from google.protobuf.message import Message

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
    while True:
        try:
            for response in _responses(client, kind, name or "", filter_text):
                change = response.WhichOneof("change")
                is_other_kind = kind in ("workers", "gpus") and (kind == "gpus") != ("gpu" in change)
                if change == "bookmark" or is_other_kind:
                    continue
                if not echo_lines(_text(response, change, output)):
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


def _text(response: Message, change: str, output: str) -> str:
    if output == "table":
        return _line(response, change)
    import json

    from leasehold_client.display.documents import document_text, to_dict

    document = {change: to_dict(response)[change]}
    return json.dumps(document) if output == "json" else f"---\n{document_text(document, output)}"


def _line(response: Message, change: str) -> str:
    """A change as one line: a name or an id, and the state."""
    from leasehold.v1 import lease_pb2, worker_pb2

    from leasehold_client.arguments.gpu_names import gpu_place
    from leasehold_client.display.record_tables import event_text
    from leasehold_client.display.terminal_text import one_line
    from leasehold_client.messages import command_state, enum_name, operation_name, time_text, workload_state

    value = getattr(response, change)
    match change:
        case "worker":
            state = enum_name(worker_pb2.WorkerState.Name, value.state, "WORKER_STATE_")
            text = f"{value.name} {state}"
        case "gpu":
            state = enum_name(lease_pb2.SlotState.Name, value.lease.state, "SLOT_STATE_").lower()
            text = f"{gpu_place(value)} {state} {value.workload_name or value.lease.workload_id}".rstrip()
        case "workload":
            text = f"{value.name} {workload_state(value)}"
        case "command":
            text = f"{value.command_id} {operation_name(value)} {command_state(value)} {value.phase}".rstrip()
        case "event":
            text = f"{time_text(value.time)} {event_text(value)}"
        case _:
            text = f"{value} deleted"
    return one_line(text)
