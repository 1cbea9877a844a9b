"""What the dialogs of a stop and of a cancellation say in each state."""

from typing import Any

import pytest
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse
from leasehold_client.errors import UsageError
from leasehold_client.top.effects import cancel_effect, stop_effect
from leasehold_client.top.fleet_model import FleetModel

from .scripted_fleet import END_OF_SNAPSHOT, command, workload

SIGTERM = "It gets SIGTERM, and SIGKILL after 10 s."
KILLED = "Its processes are killed at once"
DEPENDS = "Its end depends on the later state"
LOST = "Its parked state is lost."
ENDED = ("EXITED", "FAILED", "RELEASED")


@pytest.fixture
def model() -> FleetModel:
    """An empty fleet."""
    made = FleetModel()
    made.fold_workloads(WatchWorkloadsResponse(bookmark=END_OF_SNAPSHOT))
    made.fold_commands(WatchCommandsResponse(bookmark=END_OF_SNAPSHOT))
    return made


@pytest.mark.parametrize(
    ("state", "end", "is_lost"),
    [
        ("UNSPECIFIED", KILLED, False),
        ("PENDING", DEPENDS, False),
        ("RUNNING", SIGTERM, False),
        ("SUSPENDING", DEPENDS, False),
        ("SUSPENDED", KILLED, True),
        ("RESTORING", DEPENDS, False),
        ("REMAPPING", DEPENDS, False),
        ("CHECKPOINTED", "It ends at once, since it has no process.", True),
        ("STOPPING", DEPENDS, False),
        ("WEDGED", KILLED, False),
        ("UNKNOWN", KILLED, False),
        ("SLEEPING", SIGTERM, True),
        ("STOPPED", "It ends at once, since it has no process.", False),
    ],
)
def test_the_end_of_a_workload_depends_on_its_state(
    model: FleetModel, state: str, end: str, is_lost: bool
) -> None:
    one = workload("one", state=workload_pb2.WorkloadState.Value(f"WORKLOAD_STATE_{state}"))
    model.fold_workloads(WatchWorkloadsResponse(workload=one))
    text = stop_effect(model, workload("one"))
    assert text.startswith(f"one is {state}. {end}")
    assert text.endswith(LOST) == is_lost
    assert ("SIGTERM" in text) == (end in (SIGTERM, DEPENDS))


@pytest.mark.parametrize(
    ("state", "fields", "told"),
    [
        ("STOPPED", {"checkpoint_id": "k-1", "disk_bytes": 9}, "leasehold run --from-checkpoint k-1 starts"),
        ("STOPPED", {"checkpoint_id": "k-1", "disk_bytes": 0}, ""),  # it was deleted
        ("STOPPED", {}, ""),
        ("SUSPENDED", {"kernel": {}}, f"{LOST} Checkpoints that its application has made stay"),
        ("SLEEPING", {"kernel": {}}, f"{LOST} Checkpoints that its application has made stay"),
        ("CHECKPOINTED", {"checkpoint_id": "i-1", "disk_bytes": 9}, LOST),
    ],
)
def test_a_stop_leaves_the_checkpoints_of_an_application(
    model: FleetModel, state: str, fields: dict[str, Any], told: str
) -> None:
    one = workload("one", state=workload_pb2.WorkloadState.Value(f"WORKLOAD_STATE_{state}"))
    one.status.MergeFrom(workload_pb2.WorkloadStatus(**fields))
    model.fold_workloads(WatchWorkloadsResponse(workload=one))
    text = stop_effect(model, workload("one"))
    assert told in text
    assert ("--from-checkpoint" in text) == ("checkpoint" in told.lower())
    assert (LOST in text) == (state != "STOPPED")


@pytest.mark.parametrize("state", ENDED)
def test_an_ended_workload_can_not_be_stopped(model: FleetModel, state: str) -> None:
    one = workload("one", state=workload_pb2.WorkloadState.Value(f"WORKLOAD_STATE_{state}"))
    model.fold_workloads(WatchWorkloadsResponse(workload=one))
    with pytest.raises(UsageError, match="one has ended: there is nothing to stop"):
        stop_effect(model, workload("one"))


def test_a_stop_beside_another_command_is_refused_until_its_end(model: FleetModel) -> None:
    model.fold_workloads(WatchWorkloadsResponse(workload=workload("one")))
    assert "refused" not in stop_effect(model, workload("one"))
    model.put_command(command("c-1"))
    assert "A stop is refused until its suspend has ended." in stop_effect(model, workload("one"))


@pytest.mark.parametrize("state", command_pb2.CommandState.keys())
def test_a_cancellation_depends_on_the_state_of_its_command(model: FleetModel, state: str) -> None:
    told = {
        "PENDING": "The suspend of one was not sent to its worker: it ends at once.",
        "UNKNOWN": "The worker of the suspend of one is out of contact.",
    }
    not_ended = ("UNSPECIFIED", "DISPATCHED", "ACCEPTED", "RUNNING", *told)
    model.put_command(command("c-1", state=command_pb2.CommandState.Value(state)))
    name = state.removeprefix("COMMAND_STATE_")
    if name in not_ended:
        text = cancel_effect(model, command("c-1"), "one")
        assert text.startswith(told.get(name, "The suspend of one is rolled back once"))
    else:
        with pytest.raises(UsageError, match="the suspend of one has ended: there is nothing to cancel"):
            cancel_effect(model, command("c-1"), "one")
