"""The pure ledger of commands, step by step."""

import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.operation_pb2 import Move, Operation, RemapOperation, SuspendOperation
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandSpec, CommandUpdate
from leasehold_worker.commands.ledger import (
    ACKNOWLEDGED_LIMIT,
    LOCAL_PREFIX,
    REFUSED_LIMIT,
    RETENTION_S,
    UNACKNOWLEDGED_LIMIT,
    UNFINISHED_LIMIT,
    Cancel,
    CommandLedger,
    Effect,
    Entry,
    Forget,
    Keep,
    Refuse,
    Start,
    Tell,
)
from leasehold_worker.errors import OperationError

EPOCH = 3
ACCEPTED, RUNNING, SUCCEEDED, REJECTED, CANCELLED = (
    command_pb2.COMMAND_STATE_ACCEPTED,
    command_pb2.COMMAND_STATE_RUNNING,
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_REJECTED,
    command_pb2.COMMAND_STATE_CANCELLED,
)


def frame(
    command_id: str = "c1", workload_id: str = "w1", *, epoch: int = EPOCH, cancel: bool = False
) -> CommandFrame:
    command = CommandSpec(
        command_id=command_id,
        workload_id=workload_id,
        timeout=duration_pb2.Duration(seconds=60),
        operation=Operation(suspend=SuspendOperation()),
    )
    return CommandFrame(epoch=epoch, command=command, cancel=cancel)


def question(command_id: str = "c1") -> CommandFrame:
    return CommandFrame(epoch=EPOCH, command=CommandSpec(command_id=command_id), ask=True)


def told(effects: list[Effect]) -> list[tuple[int, int]]:
    """States and reasons that are told."""
    return [(e.update.state, e.update.error.reason) for e in effects if isinstance(e, Tell | Refuse)]


def outcome(command_id: str = "c1", state: command_pb2.CommandState.ValueType = SUCCEEDED) -> CommandUpdate:
    return CommandUpdate(command_id=command_id, state=state)


def on_disk(*steps: list[Effect]) -> list[Entry]:
    """What a start after these effects finds."""
    kept: dict[str, Entry] = {}
    for effects in steps:
        for effect in effects:
            if isinstance(effect, Keep):
                kept[effect.entry.command_id] = effect.entry
            elif isinstance(effect, Forget):
                for command_id in effect.command_ids:
                    del kept[command_id]
    return list(kept.values())


def test_a_command_is_kept_then_told_then_begun() -> None:
    effects = CommandLedger().receive(frame(), EPOCH, 0.0)
    assert [type(effect) for effect in effects] == [Keep, Tell, Start]
    assert told(effects) == [(ACCEPTED, 0)]


def test_an_outcome_is_kept_before_it_is_told() -> None:
    ledger = CommandLedger()
    ledger.receive(frame(), EPOCH, 0.0)
    ledger.progress("c1", "lock")
    effects = ledger.finish(outcome())
    assert [type(effect) for effect in effects] == [Keep, Tell]
    assert ledger.unacknowledged == [outcome()]


def test_a_repeated_command_is_answered_and_not_begun_again() -> None:
    ledger = CommandLedger()
    ledger.receive(frame(), EPOCH, 0.0)
    assert told(ledger.receive(frame(), EPOCH, 1.0)) == [(ACCEPTED, 0)]
    ledger.progress("c1", "lock")
    (effect,) = ledger.receive(frame(), EPOCH, 1.0)
    assert isinstance(effect, Tell)
    assert effect.update.phase == "lock"
    ledger.finish(outcome())
    assert told(ledger.receive(frame(), EPOCH, 1.0)) == [(SUCCEEDED, 0)]
    ledger.acknowledge("c1", 2.0)
    assert told(ledger.receive(frame(), EPOCH, 3.0)) == [(SUCCEEDED, 0)]
    assert told(ledger.receive(frame(cancel=True), EPOCH, 3.0)) == [(SUCCEEDED, 0)]


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_another_epoch_is_not_obeyed_and_not_remembered(epoch: int) -> None:
    ledger = CommandLedger()
    effects = ledger.receive(frame(epoch=epoch), EPOCH, 0.0)
    assert told(effects) == [(REJECTED, errors_pb2.ERROR_REASON_STALE_EPOCH)]
    assert told(ledger.receive(frame(), EPOCH, 0.0)) == [(ACCEPTED, 0)]


@pytest.mark.parametrize("cancel", [False, True])
def test_a_known_command_of_another_epoch_is_told_as_it_is_and_never_refused(cancel: bool) -> None:
    ledger = CommandLedger()
    ledger.receive(frame(), EPOCH, 0.0)
    ledger.progress("c1", "lock")
    (effect,) = ledger.receive(frame(epoch=EPOCH - 1, cancel=cancel), EPOCH, 1.0)
    assert isinstance(effect, Tell), "an outcome may wait for its disk"
    assert effect.update.state == RUNNING
    assert ledger.open_entries[0].cancel_requested is False


def test_a_cancellation_is_kept_and_passed_on_once() -> None:
    ledger = CommandLedger()
    ledger.receive(frame(), EPOCH, 0.0)
    effects = ledger.receive(frame(cancel=True), EPOCH, 0.0)
    assert [type(effect) for effect in effects] == [Keep, Cancel]
    assert on_disk(effects)[0].cancel_requested
    assert told(ledger.receive(frame(cancel=True), EPOCH, 0.0)) == [(ACCEPTED, 0)]


def test_a_cancellation_that_comes_first_ends_the_command_that_comes_later() -> None:
    ledger = CommandLedger()
    effects = ledger.receive(frame(cancel=True), EPOCH, 0.0)
    assert told(effects) == [(CANCELLED, errors_pb2.ERROR_REASON_CANCELLED)]
    assert not any(isinstance(effect, Start) for effect in effects)
    assert told(ledger.receive(frame(), EPOCH, 0.0)) == [(CANCELLED, errors_pb2.ERROR_REASON_CANCELLED)]


def test_a_workload_has_one_command_at_a_time() -> None:
    ledger = CommandLedger()
    moves = [Move(workload_id="w1"), Move(workload_id="w2")]
    remap = frame("c1")
    remap.command.operation.CopyFrom(Operation(remap=RemapOperation(moves=moves)))
    ledger.receive(remap, EPOCH, 0.0)
    for number, workload_id in enumerate(("w1", "w2")):
        effects = ledger.receive(frame(f"x{number}", workload_id), EPOCH, 0.0)
        assert told(effects) == [(REJECTED, errors_pb2.ERROR_REASON_WORKLOAD_BUSY)]
    assert told(ledger.receive(frame("c3", "w3"), EPOCH, 0.0)) == [(ACCEPTED, 0)]


def test_what_is_unfinished_is_bounded() -> None:
    ledger = CommandLedger()
    for number in range(UNFINISHED_LIMIT):
        ledger.receive(frame(f"c{number}", f"w{number}"), EPOCH, 0.0)
    effects = ledger.receive(frame("one-more", "w"), EPOCH, 0.0)
    assert told(effects) == [(REJECTED, errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS)]


def test_outcomes_that_nobody_acknowledges_are_bounded() -> None:
    ledger = CommandLedger()
    for number in range(UNACKNOWLEDGED_LIMIT):
        ledger.receive(frame(f"c{number}", f"w{number}"), EPOCH, 0.0)
        ledger.progress(f"c{number}", "")
        ledger.finish(outcome(f"c{number}"))
    effects = ledger.receive(frame("one-more", "w"), EPOCH, 0.0)
    assert told(effects) == [(REJECTED, errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS)]


def test_acknowledged_commands_are_forgotten_by_age_and_by_number() -> None:
    ledger = CommandLedger()

    def done(number: int, now_s: float) -> list[Effect]:
        ledger.receive(frame(f"c{number}", f"w{number}"), EPOCH, now_s)
        ledger.progress(f"c{number}", "")
        ledger.finish(outcome(f"c{number}"))
        return ledger.acknowledge(f"c{number}", now_s)

    assert not any(isinstance(effect, Forget) for effect in done(0, 0.0))
    assert done(1, RETENTION_S + 1)[-1] == Forget(("c0",))
    for number in range(2, ACKNOWLEDGED_LIMIT + 1):
        done(number, RETENTION_S + 2)
    assert done(ACKNOWLEDGED_LIMIT + 1, RETENTION_S + 3)[-1] == Forget(("c1",))


def test_an_open_command_is_not_acknowledged() -> None:
    ledger = CommandLedger()
    ledger.receive(frame(), EPOCH, 0.0)
    assert ledger.acknowledge("c1", 1.0) == []
    assert ledger.acknowledge("c2", 1.0) == []


def test_what_could_not_be_kept_is_taken_back() -> None:
    ledger = CommandLedger()
    ledger.receive(frame(), EPOCH, 0.0)
    full = OperationError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "the disk is full")
    assert told(ledger.refuse("c1", full)) == [(REJECTED, errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE)]
    assert not ledger.open_entries
    again = ledger.receive(frame(), EPOCH, 1.0)
    assert told(again) == [(REJECTED, errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE)], "it was told so"


def test_refusals_are_remembered_within_bounds_and_wait_for_nobody() -> None:
    ledger = CommandLedger()
    full = OperationError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "the disk is full")
    for number in range(REFUSED_LIMIT + 1):
        ledger.receive(frame(f"c{number}", cancel=number % 2 == 1), EPOCH, 0.0, full)
    assert ledger.unacknowledged == []
    assert ledger.acknowledge("c2", 1.0) == [], "nothing was done, so nothing is kept"
    assert told(ledger.receive(frame("c1"), EPOCH, 1.0)) == [(CANCELLED, errors_pb2.ERROR_REASON_CANCELLED)]
    assert told(ledger.receive(frame("c2"), EPOCH, 1.0))[0][0] == REJECTED
    assert told(ledger.receive(frame("c0"), EPOCH, 1.0)) == [(ACCEPTED, 0)], "the oldest is forgotten"


def test_a_restart_brings_back_what_was_kept() -> None:
    ledger = CommandLedger()
    steps = [ledger.receive(frame(), EPOCH, 5.0), ledger.receive(frame("c2", "w2"), EPOCH, 6.0)]
    ledger.progress("c2", "lock")
    steps.append(ledger.finish(outcome("c2")))
    again = CommandLedger(on_disk(*steps))
    assert [entry.command_id for entry in again.open_entries] == ["c1"]
    assert again.open_entries[0].received_s == 5.0
    assert again.unacknowledged == [outcome("c2")]
    assert told(again.receive(frame(epoch=EPOCH + 1), EPOCH + 1, 7.0)) == [(ACCEPTED, 0)]


def test_a_command_ends_once() -> None:
    ledger = CommandLedger()
    ledger.receive(frame(), EPOCH, 0.0)
    ledger.progress("c1", "")
    ledger.finish(outcome())
    with pytest.raises(ValueError, match="SUCCEEDED to COMMAND_STATE_CANCELLED"):
        ledger.finish(outcome(state=CANCELLED))


def test_commands_of_the_workers_own_need_no_acknowledgement() -> None:
    ended = [
        Entry(CommandSpec(command_id=f"{prefix}{number}"), 0, 0.0, outcome(f"{prefix}{number}"))
        for prefix, count in ((LOCAL_PREFIX, 3), ("c", UNACKNOWLEDGED_LIMIT))
        for number in range(count)
    ]
    ledger = CommandLedger(ended)
    assert told(ledger.receive(frame("c-new"), EPOCH, 1.0))[0][0] == REJECTED
    own = ledger.receive(frame(f"{LOCAL_PREFIX}new", epoch=0), 0, 1.0)
    assert told(own) == [(ACCEPTED, 0)], "a coordinator that stores nothing does not stop the worker's own"


def done(ledger: CommandLedger, command_id: str, epoch: int = EPOCH) -> list[list[Effect]]:
    """A command from its arrival to its acknowledgement."""
    received = ledger.receive(frame(command_id, epoch=epoch), epoch, 1.0)
    ledger.progress(command_id, "")
    return [received, ledger.finish(outcome(command_id)), ledger.acknowledge(command_id, 2.0)]


def test_commands_of_the_workers_own_take_no_place_of_acknowledged_ones() -> None:
    ledger = CommandLedger()
    kept = done(ledger, "c1")
    for number in range(ACKNOWLEDGED_LIMIT + 1):
        own = done(ledger, f"{LOCAL_PREFIX}{number}", epoch=0)
        assert on_disk(*own) == []
    assert told(ledger.receive(frame("c1"), EPOCH, 3.0)) == [(SUCCEEDED, 0)], "it runs once"
    assert [entry.command_id for entry in on_disk(*kept)] == ["c1"]


def test_refusals_of_the_workers_own_commands_take_no_place_of_others() -> None:
    ledger = CommandLedger()
    full = OperationError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "the disk is full")
    ledger.receive(frame("c1"), EPOCH, 0.0, full)
    for number in range(REFUSED_LIMIT):
        ledger.receive(frame(f"{LOCAL_PREFIX}{number}", epoch=0), 0, 1.0, full)
    assert told(ledger.receive(frame("c1"), EPOCH, 2.0))[0][0] == REJECTED


def test_a_restart_forgets_ended_commands_of_the_workers_own() -> None:
    ledger = CommandLedger()
    steps = [*done(ledger, "c1"), *done(ledger, f"{LOCAL_PREFIX}told", epoch=0)[:-1]]
    steps.append(ledger.receive(frame(f"{LOCAL_PREFIX}open", epoch=0), 0, 1.0))
    entries = on_disk(*steps)
    [told_entry] = [entry for entry in entries if entry.command_id == f"{LOCAL_PREFIX}told"]
    earlier = Entry(
        CommandSpec(command_id=f"{LOCAL_PREFIX}earlier"),
        0,
        0.0,
        outcome(f"{LOCAL_PREFIX}earlier"),
        False,
        1.0,
    )
    again = CommandLedger([*entries, earlier])
    assert again.forget_local() == [Forget((told_entry.command_id, earlier.command_id))]
    assert again.forget_local() == []
    assert [entry.command_id for entry in again.open_entries] == [f"{LOCAL_PREFIX}open"]
    assert told(again.receive(frame("c1"), EPOCH, 3.0)) == [(SUCCEEDED, 0)]


def test_a_question_begins_nothing() -> None:
    ledger = CommandLedger()
    unknown = [(REJECTED, errors_pb2.ERROR_REASON_UNKNOWN_COMMAND)]
    assert told(ledger.receive(question(), EPOCH, 0.0)) == unknown
    assert told(ledger.receive(frame(), EPOCH, 0.0)) == [(ACCEPTED, 0)], "the answer is not remembered"
    assert told(ledger.receive(question(), EPOCH, 0.0)) == [(ACCEPTED, 0)]
    ledger.progress("c1", "lock")
    ledger.finish(outcome())
    ledger.acknowledge("c1", 1.0)
    assert told(ledger.receive(question(), EPOCH, 2.0)) == [(SUCCEEDED, 0)]
