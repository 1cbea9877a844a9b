"""Properties of the tables and plans, over all that can happen."""

import asyncio
import itertools

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.workload_pb2 import Resources, Workload
from leasehold_coordinator.api.error_statuses import abort
from leasehold_coordinator.api.status_codes import status_code
from leasehold_coordinator.core import command_states
from leasehold_coordinator.core.command_states import OUTCOMES, TRANSITIONS, is_terminal, may_follow
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet import change_hub
from leasehold_coordinator.fleet.change_hub import Hub, Subscription
from leasehold_coordinator.scheduling.planner import check_named_gpus

from tests.coordinator.candidates import candidate
from tests.coordinator.fleet.test_change_hub import named

STATES = [state for state in CommandState.values() if state]


def test_every_state_is_in_the_table_or_an_outcome() -> None:
    assert set(STATES) == set(TRANSITIONS) | OUTCOMES
    assert not set(TRANSITIONS) & OUTCOMES
    assert not is_terminal(CommandState.Value("COMMAND_STATE_UNSPECIFIED"))


def test_only_running_may_follow_itself() -> None:
    assert [state for state in STATES if may_follow(state, state)] == [command_states.RUNNING]


def test_nothing_leads_back_to_before_it_was_sent() -> None:
    for state, following in itertools.product(STATES, STATES):
        if following == command_states.PENDING:
            assert not may_follow(state, following)
        if following == command_states.DISPATCHED:
            assert may_follow(state, following) == (state == command_states.PENDING)


def test_every_command_can_end_and_an_outcome_is_for_ever() -> None:
    for state in STATES:
        if state in OUTCOMES:
            assert not any(may_follow(state, other) for other in STATES)
        else:
            assert {command_states.CANCELLED, command_states.EXPIRED} <= TRANSITIONS[state]
    for sent in set(TRANSITIONS) - {command_states.PENDING}:
        assert TRANSITIONS[sent] >= OUTCOMES


class Aborted(Exception):
    """What a fake context raises, as gRPC's does."""


class Context:
    """The side of a call that abort uses."""

    def set_trailing_metadata(self, metadata: object) -> None:
        self.metadata = metadata

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.ended = (code, details)
        raise Aborted


DELAYS_S = {
    "WORKER_UNAVAILABLE": 1,
    "WORKER_DRAINING": 1,
    "STORAGE_UNAVAILABLE": 1,
    "ISSUER_UNAVAILABLE": 1,
    "TOO_MANY_COMMANDS": 1,
    "TOO_MANY_CALLS": 1,
}


def details_of(error: FleetError) -> tuple[status_pb2.Status, dict[str, any_pb2.Any]]:
    """The status that a call ends with, and its details by type."""
    context = Context()
    with pytest.raises(Aborted):
        asyncio.run(abort(context, error))  # type: ignore[arg-type]  # the part of it that is used
    trailers = dict(context.metadata)  # type: ignore[call-overload]  # pairs
    assert sum(len(value) * 4 / 3 for value in trailers.values()) + 3 * len(error.message.encode()) < 8000
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert context.ended == (status_code(error.reason), error.message)
    assert status.code == status_code(error.reason).value[0]
    return status, {detail.type_url.rpartition(".")[2]: detail for detail in status.details}


@pytest.mark.parametrize("name", [name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()[1:]])
def test_every_reason_travels_with_its_details(name: str) -> None:
    error = FleetError(ErrorReason.Value(f"ERROR_REASON_{name}"), "a sentence", field="spec.hooks[1].name")
    status, details = details_of(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        name,
        "leasehold.dev",
        {"field": "spec.hooks[1].name"},
    )
    retry, bad = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    assert ("RetryInfo" in details) == (name in DELAYS_S)
    if name in DELAYS_S:
        assert details["RetryInfo"].Unpack(retry)
        assert retry.retry_delay.ToSeconds() == DELAYS_S[name]
    assert ("BadRequest" in details) == (status_code(error.reason) == grpc.StatusCode.INVALID_ARGUMENT)
    if "BadRequest" in details:
        assert details["BadRequest"].Unpack(bad)
        (violation,) = bad.field_violations
        assert (violation.field, violation.description) == ("spec.hooks[1].name", "a sentence")


def test_the_longest_refusal_fits_into_the_trailers() -> None:
    details_of(invalid("x" * 900, "é" * 5000))


def test_named_gpus_leave_room_for_what_is_promised() -> None:
    a = candidate("a", True, True, promised=1)
    assert check_named_gpus([a], ["GPU-a0"], Resources()) is a
    with pytest.raises(FleetError, match="commands under way") as error:
        check_named_gpus([a], ["GPU-a0", "GPU-a1"], Resources())
    assert error.value.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU


def test_a_watcher_that_missed_a_change_is_told_nothing_that_came_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(change_hub, "BACKLOG_LIMIT", 2)

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        told: list[str] = []

        async def watch_on(subscription: Subscription[Workload]) -> None:
            async for change in subscription.changes():
                assert change is not None
                told.append(change.message.name)
                hub.publish("a", named("after the gap"))

        with hub.subscribe() as subscription:
            for message in ("1", "2", "missed"):
                hub.publish("a", named(message))
            with pytest.raises(FleetError, match="behind"):
                await watch_on(subscription)
        assert told == ["1", "2"]

    asyncio.run(scenario())


def test_a_watcher_may_take_longer_over_a_change_than_the_time_between_bookmarks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(change_hub, "BOOKMARK_INTERVAL_S", 0.01)

    async def scenario() -> None:
        hub: Hub[Workload] = Hub()
        with hub.subscribe() as subscription:
            hub.publish("a", named("1"))
            async for change in subscription.changes():
                assert change is not None
                await asyncio.sleep(0.05)  # longer than the bookmarks are apart
                break

    asyncio.run(scenario())


@pytest.mark.parametrize("digits", ["", "-1", "x", "1" * 5000, "²", "1.0"])
def test_a_token_of_this_start_that_was_never_given_out(digits: str) -> None:
    hub: Hub[Workload] = Hub()
    hub.publish("a", named("1"))
    instance = hub.token(0).partition(".")[0]
    with pytest.raises(FleetError) as error:
        hub.since(f"{instance}.{digits}")
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_TOKEN
