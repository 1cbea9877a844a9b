"""Waiting for a command that does not end, or whose worker is out of contact."""

import json
import threading
from collections.abc import Generator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import command_pb2, command_service_pb2
from leasehold.v1.command_pb2 import Command
from leasehold_client.coordinator import command_watch
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import CommandWaitTimeoutError, NoCoordinatorError

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, command
from tests.grids import grid

DISPATCHED, SUCCEEDED, UNKNOWN = (
    command_pb2.COMMAND_STATE_DISPATCHED,
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_UNKNOWN,
)


def stays(scripted: ScriptedCoordinator, *commands: Command) -> None:
    """A watch tells these, and then is silent until the caller ends it."""
    scripted.plays(*commands)

    def watch(_: Any, context: grpc.ServicerContext) -> Iterator[command_service_pb2.WatchCommandResponse]:
        ended = threading.Event()
        context.add_callback(ended.set)
        for current in commands:
            yield command_service_pb2.WatchCommandResponse(command=current)
        ended.wait(20)

    scripted.answers["WatchCommand"] = watch


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_watch, "OUT_OF_CONTACT_LIMIT_S", 0.2)


def test_somebody_who_sets_a_limit_waits_no_longer(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    stays(scripted, command(DISPATCHED))
    done = leasehold("suspend", "one", "--wait-timeout", "0.2")
    assert done.code == 4
    assert done.stderr == (
        "leasehold: command c-1 has not ended: the wait timed out; it continues, and "
        "`leasehold get commands c-1` shows its state\n"
    )


@pytest.mark.parametrize("state", [SUCCEEDED, DISPATCHED])
def test_a_wait_without_any_time_looks_once(
    scripted: ScriptedCoordinator, state: command_pb2.CommandState.ValueType
) -> None:
    stays(scripted, command(state))
    with Client(scripted.address) as client:
        try:
            ended = client.wait(command(DISPATCHED), timeout_s=0)
        except CommandWaitTimeoutError:
            assert state == DISPATCHED
        else:
            assert ended.state == state == SUCCEEDED


@pytest.mark.usefixtures("short_patience")
def test_a_command_of_a_worker_that_stays_away_is_not_waited_for_forever(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    timeout = Duration(nanos=100_000_000)
    stays(scripted, command(DISPATCHED, timeout=timeout), command(UNKNOWN, 2, timeout=timeout))
    done = leasehold("suspend", "one", "-o", "json")
    assert done.code == 4
    assert "its worker is out of contact" in done.stderr
    assert json.loads(done.stdout)["state"] == "COMMAND_STATE_UNKNOWN"


@pytest.mark.usefixtures("short_patience")
def test_a_worker_that_is_back_in_time_is_waited_for(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.plays(command(DISPATCHED), command(UNKNOWN, 2), command(DISPATCHED, 3), command(SUCCEEDED, 4))
    assert leasehold("suspend", "one").code == 0
    assert leasehold("suspend", "one", "--wait-timeout", "20").code == 0


@pytest.mark.usefixtures("short_patience")
def test_a_cancel_ends_too(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    stays(scripted, command(UNKNOWN))
    scripted.answers["CancelCommand"] = lambda request, context: command_service_pb2.CancelCommandResponse(
        command=command(UNKNOWN)
    )
    assert leasehold("cancel", "c-1").code == 4


def test_an_outage_counts_as_waiting(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(DISPATCHED))
    scripted.answers["WatchCommand"] = lambda request, context: iter(())
    assert leasehold("suspend", "one", "--wait-timeout", "0.3").code == 4


def test_an_outcome_counts_whatever_its_revision() -> None:
    """A coordinator that was killed may give a revision again that it told and had not stored."""
    streams = iter([[command(DISPATCHED), command(UNKNOWN, 2)], [command(DISPATCHED), command(SUCCEEDED, 2)]])

    def opened(_: float | None) -> Generator[Command]:
        yield from next(streams)
        raise NoCoordinatorError("gone")

    deadline = command_watch.CommandDeadline(command(DISPATCHED))
    assert [told.state for told in command_watch.watch_command(opened, deadline)] == [
        DISPATCHED,
        UNKNOWN,
        SUCCEEDED,
    ]


@pytest.mark.usefixtures("short_outages")
@pytest.mark.parametrize(
    "code",
    grid([None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED], grpc.StatusCode.UNAVAILABLE),
)
@pytest.mark.parametrize("limit", [(), ("--wait-timeout", "60")])
def test_a_coordinator_that_ends_each_watch_early_is_given_up(
    leasehold: CommandLine,
    scripted: ScriptedCoordinator,
    code: grpc.StatusCode | None,
    limit: tuple[str, ...],
) -> None:
    scripted.plays(command(DISPATCHED))

    def watch(_: Any, context: grpc.ServicerContext) -> Iterator[command_service_pb2.WatchCommandResponse]:
        yield command_service_pb2.WatchCommandResponse(command=command(DISPATCHED))
        if code is not None:
            context.abort(code, "cut")

    scripted.answers["WatchCommand"] = watch
    done = leasehold("suspend", "one", *limit)
    assert done.code == 3
    assert "command c-1 continues: `leasehold get commands c-1` shows its state" in done.stderr
    assert len(scripted.asked(command_service_pb2.WatchCommandRequest)) < 100, "no busy loop"
