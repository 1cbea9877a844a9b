"""Labels, annotations and deletions of workloads: the coordinator keeps them, whatever workers report."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from leasehold.v1 import workload_pb2
from leasehold.v1.command_service_pb2 import GetCommandRequest
from leasehold.v1.event_service_pb2 import ListEventsRequest
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadRequest,
    DeleteWorkloadRequest,
    GetWorkloadRequest,
    ListWorkloadsRequest,
    UpdateWorkloadRequest,
)
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent
from leasehold_coordinator.core.workload_metadata import ANNOTATIONS_LIMIT_BYTES, LABELS_LIMIT_BYTES

from tests.coordinator.api.test_command_service import refusal, reported, start, suspend
from tests.coordinator.api.test_watches import exit_workload
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until

RUNNING, EXITED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_EXITED
CPU = WorkloadSpec(arguments=["program"])


def found(coordinator: CoordinatorProcess, workload: str = "one") -> Workload:
    return coordinator.workloads.GetWorkload(GetWorkloadRequest(workload=workload)).workload


def update(coordinator: CoordinatorProcess, mask: list[str] | None = None, **fields: object) -> Workload:
    request = UpdateWorkloadRequest(
        workload=Workload(workload_id="one", **fields),  # type: ignore[arg-type]  # fields by name
        update_mask=None if mask is None else FieldMask(paths=mask),
    )
    return coordinator.workloads.UpdateWorkload(request).workload


def test_the_mask_says_what_is_replaced(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    labels, annotations = {"team": "a", "example.com/tier": "b"}, {"note": "x" * 1000}
    request = CreateWorkloadRequest(name="one", spec=CPU, labels=labels, annotations=annotations)
    created = coordinator.workloads.CreateWorkload(request).workload
    sent = worker.command("run").command
    assert (dict(created.labels), dict(created.annotations)) == (labels, annotations)
    assert b"example.com" not in sent.SerializeToString(), "no worker sees them"
    changed = update(coordinator, ["labels"], labels={"team": "c"}, annotations={"other": "y"})
    assert (dict(changed.labels), dict(changed.annotations)) == ({"team": "c"}, annotations)
    assert dict(update(coordinator, labels={}, annotations={"note": "z"}).labels) == {"team": "c"}
    both = update(coordinator, ["*"], annotations={"only": "this"})
    assert (dict(both.labels), dict(both.annotations)) == ({}, {"only": "this"})
    assert found(coordinator) == both
    assert update(coordinator, []) == both


def test_an_update_that_rests_on_an_older_state_is_refused(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker, "one", CPU)
    read = found(coordinator)
    changed = update(coordinator, labels={"a": "1"}, etag=read.etag)
    assert changed.etag not in ("", read.etag)
    code, reason = refusal(lambda: update(coordinator, labels={"a": "2"}, etag=read.etag))
    assert (code, reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    suspend(coordinator, "one")
    worker.succeed("suspend", reported(started, workload_pb2.WORKLOAD_STATE_SUSPENDED, 2))
    now = found(coordinator)
    assert now.status.generation == 2
    assert now.etag == changed.etag, "a new state is no other text"
    assert dict(update(coordinator, labels={"a": "2"}, etag=now.etag).labels) == {"a": "2"}


def test_an_update_that_is_repeated_after_a_lost_response_succeeds(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker, "one", CPU)
    read = found(coordinator)
    changed = update(coordinator, ["labels"], labels={"a": "1"}, etag=read.etag)
    assert update(coordinator, ["labels"], labels={"a": "1"}, etag=read.etag) == changed
    coordinator.restart()
    again = update(coordinator, ["labels"], labels={"a": "1"}, etag=read.etag)
    assert (dict(again.labels), again.etag) == ({"a": "1"}, changed.etag)
    update(coordinator, ["labels"], labels={"a": "2"})
    code, reason = refusal(lambda: update(coordinator, ["labels"], labels={"a": "1"}, etag=read.etag))
    assert (code, reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH"), "somebody else has changed them"


def broken() -> Iterator[object]:
    yield pytest.param({"labels": {"": "x"}}, None, "INVALID_ARGUMENT", id="empty key")
    yield pytest.param(
        {"labels": {"a-": "x"}}, None, "INVALID_ARGUMENT", id="key ends in a dash", marks=pytest.mark.long
    )
    yield pytest.param(
        {"labels": {"a b": "x"}}, None, "INVALID_ARGUMENT", id="space in a key", marks=pytest.mark.long
    )
    yield pytest.param(
        {"annotations": {"a" * 129: "x"}}, None, "INVALID_ARGUMENT", id="long key", marks=pytest.mark.long
    )
    yield pytest.param({"labels": {"a": "x" * LABELS_LIMIT_BYTES}}, None, "INVALID_ARGUMENT", id="labels")
    texts = {"a": "x" * ANNOTATIONS_LIMIT_BYTES}
    yield pytest.param(
        {"annotations": texts}, None, "INVALID_ARGUMENT", id="annotations", marks=pytest.mark.long
    )
    yield pytest.param({}, ["name"], "INVALID_ARGUMENT", id="another field")
    yield pytest.param({}, ["labels.a"], "INVALID_ARGUMENT", id="one key", marks=pytest.mark.long)


@pytest.mark.parametrize(("fields", "mask", "reason"), [*broken()])
def test_texts_that_break_a_rule_are_refused(
    coordinator: CoordinatorProcess,
    worker: ScriptedWorker,
    fields: dict[str, object],
    mask: list[str] | None,
    reason: str,
) -> None:
    start(coordinator, worker, "one", CPU)
    before = found(coordinator)
    assert refusal(lambda: update(coordinator, mask, **fields)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        reason,
    )
    assert found(coordinator) == before
    if fields:
        create = CreateWorkloadRequest(name="two", spec=CPU, **fields)  # type: ignore[arg-type]  # by name
        assert refusal(lambda: coordinator.workloads.CreateWorkload(create))[1] == reason


def test_texts_survive_restarts_of_both_sides_and_reports(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker, "one", CPU)
    update(coordinator, labels={"team": "a"}, annotations={"note": "b"})
    report = reported(started, RUNNING, 2)
    report.labels["team"] = "of the worker"
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=report)))
    until(lambda: found(coordinator).status.generation == 2)
    coordinator.restart()
    report.status.generation = 3
    back = coordinator.connect(make_hello(workloads=[report], instance_id="instance-2", last_epoch=1))
    back.welcome()
    until(lambda: found(coordinator).status.generation == 3)
    for _ in range(2):
        now = found(coordinator)
        assert (dict(now.labels), dict(now.annotations)) == ({"team": "a"}, {"note": "b"})
        exit_workload(coordinator, back, started, generation=4)
    assert dict(update(coordinator, labels={"team": "b"}).labels) == {"team": "b"}, "also after its end"
    assert found(coordinator).status.state == EXITED
    events = EventServiceStub(coordinator.channel).ListEvents(ListEventsRequest(workload="one")).events
    kinds = [event.message for event in events]
    assert kinds.count("workload one is EXITED") == 1, "another label is no event"


def test_what_a_host_registers_by_itself_has_no_labels_until_a_client_sets_them(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    claim = Workload(workload_id="w-claim", name="one", labels={"a": "b"}, etag="x")
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=reported(claim, RUNNING, 1))))
    until(lambda: len(coordinator.workloads.ListWorkloads(ListWorkloadsRequest()).workloads) == 1)
    assert not found(coordinator).labels
    assert dict(update(coordinator, labels={"c": "d"}).labels) == {"c": "d"}


def test_an_ended_workload_is_deleted_with_its_commands_and_stays_away(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker, "one", CPU)
    delete = DeleteWorkloadRequest(workload="one")
    refused = refusal(lambda: coordinator.workloads.DeleteWorkload(delete))
    assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    stopping = suspend(coordinator, "one")
    exit_workload(coordinator, worker, started)
    assert refusal(lambda: coordinator.workloads.DeleteWorkload(delete))[1] == "WORKLOAD_BUSY"
    worker.succeed("suspend")
    update(coordinator, labels={"a": "b"})
    stale = DeleteWorkloadRequest(workload="one", etag=started.etag)
    assert refusal(lambda: coordinator.workloads.DeleteWorkload(stale))[1] == "ETAG_MISMATCH"
    deleted = coordinator.workloads.DeleteWorkload(delete)
    assert deleted.workload.workload_id == started.workload_id
    assert deleted.deleted_command_count == 2
    assert refusal(lambda: coordinator.workloads.DeleteWorkload(delete))[1] == "UNKNOWN_WORKLOAD"
    command = GetCommandRequest(command_id=stopping.command_id)
    assert refusal(lambda: coordinator.commands.GetCommand(command))[1] == "UNKNOWN_COMMAND"
    ended = reported(started, EXITED, 2)
    everything = ListWorkloadsRequest(include_ended=True)
    worker.close()
    for restarts in (False, True):
        if restarts:
            coordinator.restart()
        hello = make_hello(workloads=[ended], instance_id=f"instance-{restarts}", last_epoch=9)
        back = coordinator.connect(hello)
        back.welcome()
        start(coordinator, back, "", CPU)  # comes after all that the hello said
        assert started.workload_id not in {
            one.workload_id for one in coordinator.workloads.ListWorkloads(everything).workloads
        }
    events = EventServiceStub(coordinator.channel).ListEvents(ListEventsRequest()).events
    assert "workload one was deleted" in {event.message for event in events}


def test_a_deleted_workload_that_lives_after_all_is_known_again(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker, "one", CPU)
    worker.close()
    gone = make_hello(instance_id="instance-2", last_epoch=1)
    second = coordinator.connect(gone)
    second.welcome()
    until(lambda: found(coordinator).status.state == workload_pb2.WORKLOAD_STATE_FAILED)
    coordinator.workloads.DeleteWorkload(DeleteWorkloadRequest(workload="one"))
    alive = reported(started, RUNNING, 5)
    second.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=alive)))
    until(lambda: len(coordinator.workloads.ListWorkloads(ListWorkloadsRequest()).workloads) == 1)
    assert found(coordinator).workload_id == started.workload_id
