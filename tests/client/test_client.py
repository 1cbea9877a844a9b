"""The Python client against a scripted coordinator."""

from collections.abc import Iterator

import pytest
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import Command
from leasehold_client import Client, LeaseholdError, NoCoordinatorError, client

from .conftest import Scripted

PENDING, RUNNING, SUCCEEDED = (
    command_pb2.COMMAND_STATE_PENDING,
    command_pb2.COMMAND_STATE_RUNNING,
    command_pb2.COMMAND_STATE_SUCCEEDED,
)


def command(revision: int, state: command_pb2.CommandState.ValueType) -> Command:
    return Command(command_id="c-1", revision=revision, state=state)


def test_a_watch_that_breaks_goes_on_and_tells_each_change_once(scripted: Scripted) -> None:
    def watch(before: int) -> Iterator[Command]:
        yield command(1, PENDING)
        yield command(2, RUNNING)
        if before == 0:
            raise ConnectionError
        if before == 1:
            return
        yield command(3, SUCCEEDED)

    scripted.watch = watch
    with Client(scripted.address) as connected:
        seen = [current.revision for current in connected.watch(Command(command_id="c-1"))]
    assert seen == [1, 2, 3]
    assert scripted.watches == 3


def test_a_wait_without_a_coordinator_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RECONNECT_S", 0.3)
    with Client("127.0.0.1:1") as connected, pytest.raises(NoCoordinatorError):
        connected.wait(Command(command_id="c-1"))


def test_output_goes_on_where_it_broke(scripted: Scripted) -> None:
    scripted.output, scripted.output_limit = b"0123456789", 4
    with Client(scripted.address) as connected:
        assert b"".join(connected.output("one", follow=True)) == b"0123456789"
    assert scripted.offsets == [0, 4, 8]


def test_output_that_nobody_follows_is_an_error_when_it_breaks(scripted: Scripted) -> None:
    scripted.output, scripted.output_limit = b"0123456789", 4
    with Client(scripted.address) as connected, pytest.raises(NoCoordinatorError):
        b"".join(connected.output("one"))


def test_a_refusal_has_its_reason_and_facts(scripted: Scripted) -> None:
    with Client(scripted.address) as connected, pytest.raises(LeaseholdError) as error:
        connected.suspend("missing")
    assert error.value.reason == "UNKNOWN_WORKLOAD"
    assert error.value.message == "no workload 'missing'"
    assert error.value.metadata == {"field": "x"}


def test_every_request_has_an_id_of_its_own(scripted: Scripted) -> None:
    with Client(scripted.address) as connected:
        connected.suspend("one")
        connected.suspend("one")
    assert len(set(scripted.request_ids)) == 2
    assert all(scripted.request_ids)


def test_a_method_that_the_coordinator_lacks(scripted: Scripted) -> None:
    with Client(scripted.address) as connected, pytest.raises(LeaseholdError) as error:
        connected.workers()
    assert error.value.reason == "UNIMPLEMENTED"
