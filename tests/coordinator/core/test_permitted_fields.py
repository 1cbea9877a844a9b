"""Every field of a message has a row, and views show the permitted fields only."""

from collections.abc import Mapping
from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from leasehold.v1.command_pb2 import Command
from leasehold.v1.errors_pb2 import ERROR_REASON_HOOK_FAILED, ERROR_REASON_INTERNAL, Error
from leasehold.v1.event_pb2 import EVENT_KIND_GPU_FOREIGN, EVENT_KIND_WORKER_CONNECTED, Event
from leasehold.v1.lease_pb2 import LeaseSpan
from leasehold.v1.operation_pb2 import Operation, RunOperation, StopOperation
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import (
    WORKLOAD_STATE_RUNNING,
    WORKLOAD_STATE_WEDGED,
    Workload,
    WorkloadStatus,
)
from leasehold_coordinator.core.owner_views import OwnerViews
from leasehold_coordinator.core.permitted_fields import (
    ACTORS_COMMAND,
    COMMAND,
    EVENT,
    GPU,
    LEASE_SPAN,
    SHARED_COMMAND,
    WORKLOAD,
    Rows,
    restricted,
)
from leasehold_coordinator.storage import stored_lists

TABLES = [
    (Workload, WORKLOAD),
    (Command, COMMAND),
    (Command, SHARED_COMMAND),
    (Command, ACTORS_COMMAND),
    (Event, EVENT),
    (FleetGpu, GPU),
    (LeaseSpan, LEASE_SPAN),
]


def gaps(message: Descriptor | None, rows: Rows, path: str = "") -> list[str]:
    """Fields without a row, and rows without a field."""
    assert message is not None
    found = [f"{path}{name}" for name in set(message.fields_by_name) ^ set(rows)]
    for name, row in rows.items():
        if isinstance(row, Mapping) and row and name in message.fields_by_name:
            found += gaps(
                cast("Descriptor", message.fields_by_name[name].message_type), row, f"{path}{name}."
            )
    return found


@pytest.mark.parametrize(("kind", "rows"), TABLES)
def test_every_field_has_a_row(kind: type[Message], rows: Rows) -> None:
    assert gaps(cast("Descriptor", kind.DESCRIPTOR), rows) == []


def fill(message: Message, depth: int = 0) -> None:
    """Sets every field, of a oneof the last one."""
    for field in message.DESCRIPTOR.fields:
        kind = cast("Descriptor | None", field.message_type)
        is_map = kind is not None and kind.GetOptions().map_entry
        if depth > 6 or field.full_name == "leasehold.v1.Error.metadata":
            continue
        if kind is not None and is_map:
            value = kind.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)["SECRET"] = "SECRET" if value.type == value.TYPE_STRING else 7
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            fill(inner.add() if field.is_repeated else inner, depth + 1)
            if not field.is_repeated:
                inner.SetInParent()
        else:
            value_of = {field.TYPE_STRING: "SECRET", field.TYPE_BYTES: b"SECRET", field.TYPE_BOOL: True}
            one = value_of.get(field.type, 1)
            if field.is_repeated:
                getattr(message, field.name).append(one)
            else:
                setattr(message, field.name, one)


def paths(message: Message, prefix: str = "") -> set[str]:
    """Paths of the fields that are set."""
    found = set()
    for field, value in message.ListFields():
        found.add(f"{prefix}{field.name}")
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                found |= paths(part, f"{prefix}{field.name}.")
    return found


def permitted(rows: Rows, message: Message, prefix: str = "") -> set[str]:
    """Paths that rows permit of a message."""
    found = set()
    for field, value in message.ListFields():
        row, path = rows[field.name], f"{prefix}{field.name}"
        if row is False:
            continue
        found.add(path)
        for part in value if field.is_repeated else [value]:
            if isinstance(row, Mapping):
                found |= permitted(row, part, f"{path}.") if row else set()
            elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
                found |= paths(part, f"{path}.")
    return found


@pytest.mark.parametrize(("kind", "rows"), TABLES)
def test_a_view_has_the_permitted_fields_and_no_others(kind: type[Message], rows: Rows) -> None:
    whole = kind()
    fill(whole)
    before = whole.SerializeToString(deterministic=True)
    assert paths(restricted(whole, rows)) == permitted(rows, whole)
    assert whole.SerializeToString(deterministic=True) == before


def test_columns_of_lists_hold_permitted_fields_only() -> None:
    """A filter by SQL sees columns, and not the view."""
    fields = {"workload": "workload_id", "worker": "worker_id", "state": "status", "time": "time"}
    for listed, rows in (
        (stored_lists.WORKLOADS, WORKLOAD),
        (stored_lists.COMMANDS, COMMAND),
        (stored_lists.EVENTS, EVENT),
        (stored_lists.LEASE_SPANS, LEASE_SPAN),
    ):
        for name in {*listed.exact, *listed.implied, *listed.sorted_by}:
            row = rows.get(name, rows.get(fields.get(name, "")))
            assert row is True or (name, listed) == ("state", stored_lists.WORKLOADS), name


ANN, BEN = OwnerViews("local/ann"), OwnerViews("local/ben")
ALL = OwnerViews(None)


def command(*owners: str, actor: str = "local/root", on_behalf_of: str = "") -> Command:
    """A run that failed."""
    found = Command(
        command_id="c-1",
        actor=actor,
        on_behalf_of=on_behalf_of,
        owners=owners,
        operation=Operation(run=RunOperation(name="one")),
        request_id="r-1",
    )
    found.error.message = "SECRET"
    found.error.reason = ERROR_REASON_INTERNAL
    return found


def test_others_see_that_a_hook_of_a_running_workload_failed() -> None:
    failed = Error(reason=ERROR_REASON_HOOK_FAILED, message="SECRET", metadata={"hook": "SECRET"})
    own = Workload(owner="local/ann", status=WorkloadStatus(state=WORKLOAD_STATE_RUNNING, error=failed))
    assert ANN.workload(own) is own
    seen = BEN.workload(own)
    assert seen.status.error.reason == ERROR_REASON_HOOK_FAILED
    assert b"SECRET" not in seen.SerializeToString()
    own.status.state = WORKLOAD_STATE_WEDGED
    assert not BEN.workload(own).status.HasField("error")


def test_a_command_belongs_to_the_owners_of_its_workloads() -> None:
    own = command("local/ann")
    assert ANN.command(own) is own
    assert ALL.command(own) is own
    others = BEN.command(own)
    assert others == Command(command_id="c-1", operation=Operation(run=RunOperation()))


def test_a_command_about_a_worker_belongs_to_its_actor() -> None:
    own = command(actor="local/ann")
    assert ANN.command(own) is own
    assert not BEN.command(own).actor
    acted = command(actor="service/batch", on_behalf_of="local/ann")
    assert ANN.command(acted) is acted
    assert not OwnerViews("service/batch").command(acted).actor, "it acts as itself now"


def test_a_command_about_workloads_of_two_owners_tells_neither_about_the_other() -> None:
    both = command("local/ann", "local/ben", actor="local/ann")
    for views, sees_request in ((ANN, True), (BEN, False)):
        seen = views.command(both)
        assert b"SECRET" not in seen.SerializeToString()
        assert seen.error.reason == ERROR_REASON_INTERNAL
        assert bool(seen.request_id) == sees_request == bool(seen.operation.run.name)
    assert OwnerViews("local/eve").command(both).owners == []
    assert ALL.command(both) is both


def test_the_kind_of_an_operation_stays() -> None:
    stopped = Command(operation=Operation(stop=StopOperation(force=True)), owners=["local/ann"])
    assert BEN.command(stopped).operation == Operation(stop=StopOperation())


def test_events_of_workers_are_public_but_for_foreign_processes() -> None:
    connected = Event(kind=EVENT_KIND_WORKER_CONNECTED, worker_id="w", message="worker w is in contact")
    assert ANN.event(connected) is connected
    foreign = Event(kind=EVENT_KIND_GPU_FOREIGN, worker_id="w", message="pid 1 (SECRET)")
    assert not ANN.event(foreign).message
    foreign.owner = "local/ann"  # the holder of the GPU
    assert not ANN.event(foreign).message
    assert ALL.event(foreign).message
    about = Event(kind=EVENT_KIND_WORKER_CONNECTED, workload_id="w-1", owner="local/ann", message="SECRET")
    assert ANN.event(about) is about
    assert BEN.event(about) == Event(kind=EVENT_KIND_WORKER_CONNECTED, workload_id="w-1")
