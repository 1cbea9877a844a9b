"""The coordinator's pure ledger of commands, step by step."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.operation_pb2 import Move, Operation, RemapOperation, SuspendOperation
from leasehold.worker.v1.session_pb2 import CommandUpdate
from leasehold_coordinator.core.command_effects import (
    Acknowledge,
    Effect,
    Note,
    Send,
    Store,
    StoredCommand,
    frame_of,
)
from leasehold_coordinator.core.command_ledger import UNFINISHED_LIMIT, CommandLedger
from leasehold_coordinator.core.command_states import (
    ACCEPTED,
    CANCELLED,
    DISPATCHED,
    EXPIRED,
    FAILED,
    PENDING,
    REJECTED,
    RUNNING,
    SUCCEEDED,
    UNKNOWN,
)
from leasehold_coordinator.core.request_ids import scoped

ALPHA, INSTANCE = "worker-alpha", "instance-1"


def at(seconds: float) -> Timestamp:
    moment = Timestamp()
    moment.FromNanoseconds(round(seconds * 1e9))
    return moment


def command(command_id: str = "c1", timeout_s: float = 60, **fields: str) -> Command:
    made = Command(
        command_id=command_id,
        worker_id=ALPHA,
        workload_id="w1",
        operation=Operation(suspend=SuspendOperation()),
        **fields,  # type: ignore[arg-type]  # fields by name
    )
    made.timeout.FromNanoseconds(round(timeout_s * 1e9))
    return made


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def state(ledger: CommandLedger) -> CommandState.ValueType:
    return ledger.commands["c1"].command.state


def kept(ledger: CommandLedger, effects: list[Effect]) -> list[Effect]:
    """The effects, of which all that is to be stored is on disk now."""
    for effect in effects:
        if isinstance(effect, Store):
            ledger.kept(effect.after)
    return effects


def told(ledger: CommandLedger, new: CommandState.ValueType, phase: str = "") -> list[Effect]:
    return ledger.update(ALPHA, CommandUpdate(command_id="c1", state=new, phase=phase), at(2))


def sent() -> CommandLedger:
    return created(INSTANCE)


def created(instance_id: str | None) -> CommandLedger:
    ledger = CommandLedger()
    kept(ledger, ledger.create(command(), at(0), instance_id))
    return ledger


def outcome(effects: list[Effect]) -> Command:
    (store,) = [effect for effect in effects if isinstance(effect, Store)]
    return store.after.command


def test_a_command_is_stored_as_sent_before_it_is_sent() -> None:
    ledger = CommandLedger()
    assert kinds(ledger.create(command(), at(0), INSTANCE)) == [Store, Send]
    assert state(ledger) == DISPATCHED


def test_a_command_without_its_worker_waits() -> None:
    ledger = CommandLedger()
    assert kinds(kept(ledger, ledger.create(command(), at(0), None))) == [Store]
    assert state(ledger) == PENDING
    assert ledger.welcome(ALPHA, INSTANCE, set(), at(1)) == []
    assert [kinds(effects) for effects in ledger.advance(ALPHA, INSTANCE, at(1))] == [[Store, Send]]
    assert state(ledger) == DISPATCHED


def queued(ledger: CommandLedger, numbers: range, client: str, *, is_operator: bool = False) -> None:
    for number in numbers:
        made = command(f"{client}{number}")
        made.workload_id = f"w-{client}{number}"
        kept(ledger, ledger.create(made, at(number), INSTANCE, client, is_operator=is_operator))


def now_sent(ledger: CommandLedger) -> list[str]:
    """Ids of the commands that are sent, oldest first."""
    unfinished = ledger.of_worker(ALPHA)
    return [stored.command.command_id for stored in unfinished if stored.command.state != PENDING]


def next_sent(ledger: CommandLedger, *ended: str) -> list[str]:
    """Ids of the commands that are sent once others have ended."""
    for command_id in ended:
        done = CommandUpdate(command_id=command_id, state=SUCCEEDED)
        kept(ledger, ledger.update(ALPHA, done, at(100)))
    steps = [kept(ledger, effects) for effects in ledger.advance(ALPHA, INSTANCE, at(100))]
    return [effect.stored.command.command_id for step in steps for effect in step if isinstance(effect, Send)]


def test_commands_wait_for_their_turn_in_order() -> None:
    ledger = CommandLedger()
    queued(ledger, range(12), "a", is_operator=True)
    states = [stored.command.state for stored in ledger.of_worker(ALPHA)]
    assert states == [DISPATCHED] * 8 + [PENDING] * 4
    assert next_sent(ledger) == []
    assert next_sent(ledger, "a3", "a5") == ["a8", "a9"]
    assert next_sent(ledger, "a0", "a1", "a2") == ["a10", "a11"]


def test_the_client_that_has_the_fewest_sent_goes_first() -> None:
    ledger = CommandLedger()
    queued(ledger, range(20), "a", is_operator=True)
    queued(ledger, range(3), "b", is_operator=True)
    assert next_sent(ledger, "a0", "a1") == ["b0", "b1"]
    assert next_sent(ledger, "a2", "a3", "a4") == ["b2", "a8", "a9"]


def test_a_user_leaves_places_at_a_worker_for_others() -> None:
    ledger = CommandLedger()
    queued(ledger, range(6), "a")
    assert now_sent(ledger) == ["a0", "a1", "a2", "a3"]
    queued(ledger, range(3), "b")
    queued(ledger, range(2), "c")
    queued(ledger, range(1), "d")
    assert now_sent(ledger) == ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
    queued(ledger, range(2), "operator", is_operator=True)
    assert next_sent(ledger) == []
    assert now_sent(ledger)[-1] == "operator0", "the last place is kept for operators"
    assert next_sent(ledger, "a0", "operator0") == ["d0", "operator1"]
    assert next_sent(ledger, "a1") == []
    assert next_sent(ledger, "b0", "c0") == ["c1"]
    assert next_sent(ledger, "operator1", "d0", "a2", "a3") == ["a4", "a5", "b2"]


def test_a_user_has_no_more_places_after_a_restart() -> None:
    ledger = CommandLedger()
    for number in range(6):
        made = command(f"a{number}", actor="a")
        made.workload_id = f"w-a{number}"
        kept(ledger, ledger.create(made, at(number), INSTANCE, "a"))
    again = CommandLedger(ledger.of_worker(ALPHA))
    queued(again, range(1), "b")
    assert now_sent(again) == ["a0", "a1", "a2", "a3", "b0"]
    assert next_sent(again, "a0", "a1") == ["a4"]


def test_a_command_on_behalf_of_a_user_is_no_operators_after_a_restart() -> None:
    ledger = CommandLedger()
    for number, user in enumerate(("user/ann", "")):
        made = command(f"c{number}", actor="service/ci", on_behalf_of=user)
        made.workload_id = f"w{number}"
        kept(ledger, ledger.create(made, at(number), None, "service/ci"))
    again = CommandLedger(ledger.of_worker(ALPHA))
    again.note_operators(lambda actor: actor == "service/ci")
    queued(again, range(4), "a")
    queued(again, range(2), "b")
    queued(again, range(1), "d")
    assert len(now_sent(again)) == 7
    assert next_sent(again) == ["c1"]


def test_a_client_leaves_room_for_others() -> None:
    ledger = CommandLedger()
    count = 0
    while ledger.has_room(ALPHA, "a"):
        queued(ledger, range(count, count + 1), "a")
        count += 1
    assert count == UNFINISHED_LIMIT // 2
    assert ledger.has_room(ALPHA, "b")
    assert ledger.has_room("worker-beta", "a")


def test_an_outcome_is_stored_before_it_is_acknowledged_and_only_once() -> None:
    ledger = sent()
    assert kinds(kept(ledger, told(ledger, ACCEPTED))) == [Note]
    assert kinds(kept(ledger, told(ledger, RUNNING, "lock"))) == [Note]
    assert kinds(kept(ledger, told(ledger, SUCCEEDED))) == [Store, Acknowledge]
    assert kinds(told(ledger, SUCCEEDED)) == [Acknowledge]
    assert kinds(told(ledger, FAILED)) == [Acknowledge]
    assert kinds(told(ledger, RUNNING)) == []
    assert not ledger.commands


def test_another_worker_has_no_say() -> None:
    ledger = sent()
    update = CommandUpdate(command_id="c1", state=SUCCEEDED)
    assert ledger.update("worker-beta", update, at(1)) == []
    assert state(ledger) == DISPATCHED


def test_what_is_open_is_sent_again_and_not_stored_again() -> None:
    ledger = sent()
    assert kinds(ledger.welcome(ALPHA, INSTANCE, {"c1"}, at(1))) == [Send]
    assert kinds(kept(ledger, ledger.welcome(ALPHA, "instance-2", set(), at(2)))) == [Store, Send]
    assert kinds(ledger.welcome(ALPHA, "instance-2", set(), at(3))) == [Send]


def test_what_never_reached_its_worker_in_time_has_expired_for_certain() -> None:
    ledger = sent()
    assert kinds(ledger.welcome(ALPHA, INSTANCE, {"c1"}, at(61))) == [Send], "the worker has it"
    ended = outcome(ledger.welcome(ALPHA, INSTANCE, set(), at(61)))
    assert (ended.state, ended.error.reason) == (EXPIRED, errors_pb2.ERROR_REASON_EXPIRED)


def test_what_was_accepted_and_is_gone_from_the_journal_is_never_sent_again() -> None:
    ledger = sent()
    told(ledger, ACCEPTED)
    ended = outcome(ledger.welcome(ALPHA, "instance-2", set(), at(3)))
    assert (ended.state, ended.error.reason) == (FAILED, errors_pb2.ERROR_REASON_INTERRUPTED)


def test_a_worker_is_asked_for_what_its_hello_lacks_where_it_may_have_ended() -> None:
    ledger = sent()
    _, effect = ledger.welcome(ALPHA, INSTANCE, set(), at(90), is_restored=True, can_ask=True)
    assert isinstance(effect, Send)
    frame = frame_of(effect, 7, at(90))
    assert (frame.ask, frame.cancel, state(ledger)) == (True, False, DISPATCHED)
    (effect,) = ledger.welcome(ALPHA, INSTANCE, set(), at(90), can_ask=True)
    assert isinstance(effect, Send)
    assert effect.ask, "it may have ended there, so it is never sent again"
    *_, effect = ledger.welcome(ALPHA, INSTANCE, {"c1"}, at(90), is_restored=True, can_ask=True)
    assert isinstance(effect, Send)
    assert not effect.ask


def test_a_waiting_command_of_an_older_store_is_asked_for_and_not_sent() -> None:
    """The worker may have ended it after the backup, and the first answer counts."""
    ledger = created(None)
    effects = ledger.welcome(ALPHA, INSTANCE, set(), at(1), is_restored=True, can_ask=True)
    assert kinds(kept(ledger, effects)) == [Store, Send]
    assert state(ledger) == DISPATCHED
    assert list(ledger.advance(ALPHA, INSTANCE, at(1))) == []
    (effect,) = ledger.welcome(ALPHA, INSTANCE, set(), at(2), can_ask=True)
    assert isinstance(effect, Send)
    assert effect.ask


def test_a_waiting_command_whose_question_could_not_be_stored_is_asked_for_later() -> None:
    ledger = created(None)
    store, _ = ledger.welcome(ALPHA, INSTANCE, set(), at(1), is_restored=True, can_ask=True)
    assert isinstance(store, Store)
    ledger.revert(store)
    assert list(ledger.advance(ALPHA, INSTANCE, at(1))) == []
    assert tick(ledger, 90, INSTANCE) == [], "it may have been executed, so it does not expire"
    _, effect = ledger.welcome(ALPHA, INSTANCE, set(), at(2), can_ask=True)
    assert isinstance(effect, Send)
    assert effect.ask


def test_the_cancellation_of_a_command_that_may_have_been_executed_is_for_its_worker() -> None:
    ledger = created(None)
    store, _ = ledger.welcome(ALPHA, INSTANCE, set(), at(1), is_restored=True, can_ask=True)
    assert isinstance(store, Store)
    ledger.revert(store)
    assert kinds(ledger.cancel("c1", at(1))) == [Store, Send]


def test_a_waiting_command_that_can_not_be_stored_as_sent_has_one_turn_in_a_tick() -> None:
    ledger = CommandLedger()
    for number in range(3):
        waiting = command()
        waiting.command_id = f"c{number}"
        kept(ledger, ledger.create(waiting, at(0), None))
    for turn, effects in enumerate(ledger.tick(at(1), lambda _: INSTANCE, lambda _: False)):
        assert turn == 0
        for effect in effects:
            if isinstance(effect, Store):
                ledger.revert(effect)


def test_a_command_that_the_journal_does_not_have_is_interrupted() -> None:
    ledger = sent()
    update = CommandUpdate(command_id="c1", state=REJECTED)
    update.error.reason = errors_pb2.ERROR_REASON_UNKNOWN_COMMAND
    ended = outcome(ledger.update(ALPHA, update, at(3)))
    assert (ended.state, ended.error.reason) == (FAILED, errors_pb2.ERROR_REASON_INTERRUPTED)


def test_the_timeout_that_is_sent_is_what_is_left() -> None:
    stored = sent().commands["c1"]
    for now_s, left_s in ((0, 60), (45, 15), (100, 0.001)):
        frame = frame_of(Send(stored), 7, at(now_s))

        assert frame.command.timeout.ToNanoseconds() == round(left_s * 1e9)
        assert frame.epoch == 7
    assert stored.command.timeout.seconds == 60


def test_a_cancellation_is_remembered_until_the_worker_comes() -> None:
    ledger = sent()
    before = ledger.commands["c1"].command
    assert not before.cancel_requested
    assert kinds(ledger.cancel("c1", at(1))) == [Store, Send]
    asked = ledger.commands["c1"].command
    assert (asked.cancel_requested, asked.state) == (True, before.state)
    assert asked.revision == before.revision + 1
    again = CommandLedger(ledger.commands.values())
    effects = again.welcome(ALPHA, INSTANCE, set(), at(2))
    assert [effect.cancel for effect in effects if isinstance(effect, Send)] == [False, True]


def test_what_was_not_sent_is_cancelled_at_once() -> None:
    ledger = created(None)
    assert outcome(ledger.cancel("c1", at(1))).state == CANCELLED
    assert ledger.cancel("c1", at(2)) == []


def tick(
    ledger: CommandLedger, now_s: float, instance: str | None = None, away: bool = False
) -> list[Effect]:
    steps = ledger.tick(at(now_s), lambda _: instance, lambda _: away)
    return [effect for step in steps for effect in step]


def test_time_ends_what_was_never_sent() -> None:
    ledger = created(None)
    assert tick(ledger, 59) == []
    assert outcome(tick(ledger, 61)).state == EXPIRED


def test_what_could_not_be_stored_as_sent_is_sent_by_the_next_tick() -> None:
    ledger = created(None)
    assert kinds(tick(ledger, 1, INSTANCE)) == [Store, Send]


def test_what_is_out_of_contact_is_unknown_until_it_returns() -> None:
    ledger = sent()
    assert tick(ledger, 1) == []
    assert tick(ledger, 100, INSTANCE) == [], "the worker has its own clock"
    unknown = outcome(tick(ledger, 1, away=True))
    assert (unknown.state, unknown.error.reason) == (UNKNOWN, errors_pb2.ERROR_REASON_OUTCOME_UNKNOWN)
    assert tick(ledger, 2, away=True) == []
    assert outcome(told(ledger, SUCCEEDED)).state == SUCCEEDED


def test_a_step_that_could_not_be_stored_is_taken_back() -> None:
    ledger = CommandLedger()
    (store, _) = ledger.create(command(request_id="r1"), at(0), INSTANCE)
    assert isinstance(store, Store)
    assert ledger.of_request(scoped("", "", "r1")) is not None
    ledger.revert(store)
    assert not ledger.commands
    assert ledger.of_request(scoped("", "", "r1")) is None
    assert ledger.of_worker(ALPHA) == ledger.of_workload("w1") == []
    ledger = sent()
    before = ledger.commands["c1"]
    (store, _) = told(ledger, REJECTED)
    assert isinstance(store, Store)
    ledger.revert(store)
    assert ledger.commands["c1"] == before


def test_a_command_that_is_taken_back_is_still_that_of_its_client() -> None:
    ledger = CommandLedger()
    kept(ledger, ledger.create(command(), at(0), None, "operator", is_operator=True))
    (store,) = ledger.cancel("c1", at(1))
    assert isinstance(store, Store)
    ledger.revert(store)
    for user in ("u", "v", "w", "x"):
        queued(ledger, range(4), user)
    assert len(now_sent(ledger)) == 7
    assert next_sent(ledger) == ["c1"], "the last place is kept for operators"
    kept(ledger, ledger.update(ALPHA, CommandUpdate(command_id="c1", state=SUCCEEDED), at(200)))
    assert "c1" not in ledger._clients
    assert "c1" not in ledger._of_operators


@pytest.mark.parametrize(
    ("steps", "is_accepted"),
    [([ACCEPTED, SUCCEEDED], True), ([RUNNING, CANCELLED], True), ([FAILED], True), ([REJECTED], False)],
    ids=["accepted", "running", "ended at once", "refused"],
)
def test_a_command_whose_outcome_could_not_be_stored_stays_accepted(
    steps: list[CommandState.ValueType], is_accepted: bool
) -> None:
    ledger = sent()
    (store, _) = [told(ledger, new) for new in steps][-1]
    assert isinstance(store, Store)
    ledger.revert(store)
    assert state(ledger) == DISPATCHED
    assert [each.accepted for each in ledger.unstored(["c1"])] == [True] * is_accepted
    (effect,) = ledger.welcome(ALPHA, INSTANCE, set(), at(3), can_ask=True)
    assert isinstance(effect, Send)
    assert effect.ask == is_accepted, "an accepted command is never sent again, also if the journal is lost"


def test_what_has_gone_on_is_not_taken_back_and_stored_as_it_is() -> None:
    ledger = sent()
    (store,) = tick(ledger, 1, away=True)
    assert isinstance(store, Store)
    told(ledger, ACCEPTED)
    now = ledger.commands["c1"]
    assert ledger.current(store) == now
    ledger.revert(store)
    assert ledger.commands["c1"] == now
    told(ledger, SUCCEEDED)
    assert ledger.current(store) is None


def test_a_remap_is_found_by_each_of_its_workloads() -> None:
    remap = command()
    moves = [Move(workload_id="w1"), Move(workload_id="w2")]
    remap.operation.CopyFrom(Operation(remap=RemapOperation(moves=moves)))
    ledger = CommandLedger([StoredCommand(remap)])
    assert ledger.of_workload("w2") == ledger.of_workload("w1") == [StoredCommand(remap)]


def test_what_is_not_on_disk_is_not_sent_nor_ended() -> None:
    ledger = CommandLedger()
    effects = ledger.create(command(), at(0), INSTANCE)
    assert ledger.stored_of_worker(ALPHA) == []
    assert tick(ledger, 61, INSTANCE) == tick(ledger, 61, away=True) == []
    assert ledger.cancel("c1", at(1)) == told(ledger, SUCCEEDED) == []
    assert state(ledger) == DISPATCHED
    kept(ledger, effects)
    assert ledger.stored_of_worker(ALPHA) == ["c1"]
    assert kinds(tick(ledger, 61, away=True)) == [Store]


def test_what_is_not_on_disk_as_sent_is_stored_again_before_it_is_sent_again() -> None:
    ledger = created(None)
    assert kinds(tick(ledger, 1, INSTANCE)) == [Store, Send]
    assert kinds(ledger.welcome(ALPHA, INSTANCE, set(), at(2))) == [Store, Send]


def test_a_hello_says_nothing_of_commands_that_came_after_it() -> None:
    ledger = sent()
    assert ledger.welcome(ALPHA, INSTANCE, set(), at(61), earlier=()) == []
    assert outcome(ledger.welcome(ALPHA, INSTANCE, set(), at(61), earlier={"c1"})).state == EXPIRED


def test_a_tick_takes_each_step_when_it_is_asked_for() -> None:
    ledger = sent()
    steps = ledger.tick(at(100), lambda _: None, lambda _: True)
    assert state(ledger) == DISPATCHED
    assert kinds(next(steps)) == [Store]
    assert state(ledger) == UNKNOWN


def test_a_step_back_leads_to_what_is_on_disk() -> None:
    ledger = sent()
    (unknown,) = tick(ledger, 1, away=True)
    (cancelled, _) = ledger.cancel("c1", at(2))
    for effect in (unknown, cancelled):
        assert isinstance(effect, Store)
        ledger.revert(effect)
    assert state(ledger) == DISPATCHED
    assert not ledger.commands["c1"].cancel_requested


def test_of_steps_that_nothing_waits_for_the_last_is_to_be_stored() -> None:
    ledger = sent()
    told(ledger, ACCEPTED)
    (running,) = told(ledger, RUNNING)
    assert isinstance(running, Note)
    assert ledger.unstored(["c1", "c2"]) == [running.after]
    assert ledger.on_disk["c1"].command.state == DISPATCHED
    ledger.kept(running.after)
    assert ledger.unstored(["c1"]) == []
    told(ledger, RUNNING, "lock")
    (late,) = ledger.unstored(["c1"])
    kept(ledger, told(ledger, SUCCEEDED))
    assert ledger.unstored(["c1"]) == []
    ledger.kept(late)
    assert not ledger.on_disk, "its outcome is on disk"


def test_a_duplicate_of_no_known_command_is_acknowledged() -> None:
    update = CommandUpdate(command_id="c9", state=command_pb2.COMMAND_STATE_SUCCEEDED)
    assert CommandLedger().update(ALPHA, update, at(0)) == [Acknowledge(ALPHA, "c9")]


@pytest.mark.parametrize(
    ("cancel_requested", "told"),
    [
        (False, "command c-1 has not ended: wait for it, or `leasehold cancel c-1`"),
        (True, "command c-1 has not ended, and its cancellation is requested: wait for its end"),
    ],
)
def test_a_busy_workload_names_its_command_and_no_second_cancellation(
    cancel_requested: bool, told: str
) -> None:
    stored = StoredCommand(Command(command_id="c-1"), cancel_requested=cancel_requested)
    error = stored.busy_error()
    assert (error.reason, error.message) == (errors_pb2.ERROR_REASON_WORKLOAD_BUSY, told)
    assert error.metadata == {"command_id": "c-1"}
