"""Both ledgers of commands under every order of loss, crash and return that hypothesis comes upon.

Coordinator and worker are the real ledgers. Disk, network and world are simulated: a disk keeps what was put
on it, a crash forgets everything else between any two effects, a session that breaks loses what is in flight,
frames of older sessions may still arrive, and in a session frames may come twice.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import Command, Operation, StopOperation
from leasehold.v1.worker_session_pb2 import CommandFrame, CommandUpdate
from leasehold_coordinator import command_ledger as coordinator
from leasehold_coordinator.command_states import is_terminal
from leasehold_worker import command_ledger as worker

from tests import environment

WORKER = "worker-1"
SUCCEEDED, FAILED, CANCELLED = (
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_CANCELLED,
)
TIMEOUT_S = 30.0


@dataclass
class Disk:
    """What survives a crash."""

    rows: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0


@dataclass
class Stream:
    """One session: frames in order each way, until it breaks."""

    epoch: int
    down: deque[CommandFrame | str] = field(default_factory=deque)
    """Commands, or the id of one whose outcome is acknowledged."""
    up: deque[CommandUpdate] = field(default_factory=deque)


class CommandLife(RuleBasedStateMachine):
    """The two sides, the network between them, and the world in which commands are done."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.asked = 0
        self.done: dict[str, int] = {}
        """How often each command was done in the world."""
        self.intended: set[str] = set()
        """Commands whose intent is on the worker's disk."""
        self.coordinator_disk, self.worker_disk = Disk(), Disk()
        self.coordinator = coordinator.CommandLedger()
        self.worker = worker.CommandLedger()
        self.instance = 1
        self.stream: Stream | None = None
        self.old_frames: list[CommandFrame | str] = []
        self.running: set[str] = set()
        self.coordinator_effects: deque[coordinator.Effect] = deque()
        self.worker_effects: deque[worker.Effect] = deque()

    # The world.

    def timestamp(self) -> Timestamp:
        moment = Timestamp()
        moment.FromNanoseconds(round(self.now_s * 1e9))
        return moment

    # Carrying out effects one at a time, so that a crash may come between any two.

    def step_coordinator(self) -> None:
        effect = self.coordinator_effects.popleft()
        match effect:
            case coordinator.Store():
                stored = self.coordinator.current(effect)
                if stored is not None:
                    self.coordinator_disk.rows[stored.command.command_id] = stored
                    self.coordinator.kept(stored)
            case coordinator.Send(stored):
                assert stored.command.command_id in self.coordinator_disk.rows, "sent, and not on disk"
                if self.stream is not None and stored.command.command_id in self.coordinator.commands:
                    frame = coordinator.frame_of(effect, self.stream.epoch, self.timestamp())
                    self.stream.down.append(frame)
            case coordinator.Acknowledge(_, command_id):
                on_disk = self.coordinator_disk.rows[command_id].command
                assert is_terminal(on_disk.state), "acknowledged, and not on disk"
                if self.stream is not None:
                    self.stream.down.append(command_id)

    def step_worker(self) -> None:
        effect = self.worker_effects.popleft()
        match effect:
            case worker.Keep(entry):
                self.worker_disk.rows[entry.command_id] = entry
            case worker.Tell(update) | worker.Refuse(update):
                if isinstance(effect, worker.Tell):
                    kept = self.worker_disk.rows.get(update.command_id)
                    assert kept is not None, "told, and not on disk"
                    assert kept.state == update.state or not is_terminal(update.state), "told otherwise"
                if self.stream is not None:
                    self.stream.up.append(update)
            case worker.Start(entry):
                assert entry.epoch <= self.worker_disk.epoch
                assert entry.command_id not in self.running, "begun twice"
                self.running.add(entry.command_id)
                if entry.cancel_requested:
                    self.end(entry.command_id, CANCELLED)
            case worker.Cancel(command_id):
                if command_id in self.running and command_id not in self.intended:
                    self.end(command_id, CANCELLED)
            case worker.Forget(command_ids):
                for command_id in command_ids:
                    del self.worker_disk.rows[command_id]

    def end(self, command_id: str, state: command_pb2.CommandState.ValueType) -> None:
        self.running.discard(command_id)
        self.worker_effects.extend(self.worker.finish(CommandUpdate(command_id=command_id, state=state)))

    # What people do.

    @precondition(lambda self: len(self.coordinator.commands) < 2 and not self.coordinator_effects)
    @rule()
    def ask(self) -> None:
        workload_id = f"w{self.asked}"
        self.asked += 1
        command = Command(
            command_id=f"c{self.asked}",
            worker_id=WORKER,
            workload_id=workload_id,
            operation=Operation(stop=StopOperation()),
        )
        command.timeout.FromNanoseconds(round(TIMEOUT_S * 1e9))
        instance = f"i{self.instance}" if self.stream is not None else None
        self.coordinator_effects.extend(self.coordinator.create(command, self.timestamp(), instance))

    @precondition(lambda self: self.coordinator.commands and self.asked % 3 == 0)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.coordinator.commands)))
        self.coordinator_effects.extend(self.coordinator.cancel(command_id, self.timestamp()))

    @precondition(lambda self: self.coordinator.commands)
    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        instance = f"i{self.instance}" if self.stream is not None else None
        for step in self.coordinator.tick(self.timestamp(), lambda _: instance, lambda _: True):
            self.coordinator_effects.extend(step)

    # What the machines do.

    @precondition(lambda self: self.coordinator_effects)
    @rule()
    def coordinator_goes_on(self) -> None:
        self.step_coordinator()

    @precondition(lambda self: self.worker_effects)
    @rule()
    def worker_goes_on(self) -> None:
        self.step_worker()

    @precondition(lambda self: self.running - self.intended)
    @rule(data=st.data())
    def worker_intends(self, data: st.DataObject) -> None:
        self.intended.add(data.draw(st.sampled_from(sorted(self.running - self.intended))))

    @precondition(lambda self: self.running & self.intended)
    @rule(data=st.data(), crash=st.booleans())
    def worker_does_it(self, data: st.DataObject, crash: bool) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.running & self.intended)))
        self.done[command_id] = self.done.get(command_id, 0) + 1
        if crash:
            self.crash_worker()
        else:
            self.worker.progress(command_id, "")
            self.end(command_id, SUCCEEDED)

    @precondition(lambda self: self.stream and self.stream.down)
    @rule(twice=st.booleans())
    def frame_arrives_down(self, twice: bool) -> None:
        assert self.stream is not None
        frame = self.stream.down[0] if twice else self.stream.down.popleft()
        self.deliver_down(frame)

    @precondition(lambda self: self.old_frames)
    @rule(data=st.data())
    def frame_of_an_old_session_arrives(self, data: st.DataObject) -> None:
        """The worker reads one stream at a time, and yet: the epoch must be enough."""
        frame = data.draw(st.sampled_from(self.old_frames))
        if not isinstance(frame, str) and frame.epoch < self.worker_disk.epoch:
            before = set(self.worker_disk.rows), len(self.worker.open_entries)
            effects = self.worker.receive(frame, self.worker_disk.epoch, self.now_s)
            assert not any(isinstance(effect, worker.Start) for effect in effects), "obeyed an older epoch"
            assert before == (set(self.worker_disk.rows), len(self.worker.open_entries))

    def deliver_down(self, frame: CommandFrame | str) -> None:
        if isinstance(frame, str):
            self.worker_effects.extend(self.worker.acknowledge(frame, self.now_s))
        else:
            self.worker_effects.extend(self.worker.receive(frame, self.worker_disk.epoch, self.now_s))

    @precondition(lambda self: self.stream and self.stream.up)
    @rule()
    def frame_arrives_up(self) -> None:
        assert self.stream is not None
        update = self.stream.up.popleft()
        self.coordinator_effects.extend(self.coordinator.update(WORKER, update, self.timestamp()))

    # What goes wrong.

    @precondition(lambda self: self.stream)
    @rule()
    def session_breaks(self) -> None:
        assert self.stream is not None
        self.old_frames = list(self.stream.down)[:3]
        self.stream = None

    @precondition(lambda self: self.asked)
    @rule(luck=st.integers(0, 2))
    def coordinator_crashes(self, luck: int) -> None:
        if luck:
            return
        if self.stream is not None:
            self.session_breaks()
        self.coordinator_effects.clear()
        rows = [row for row in self.coordinator_disk.rows.values() if not is_terminal(row.command.state)]
        self.coordinator = coordinator.CommandLedger(rows)

    @precondition(lambda self: self.asked)
    @rule(luck=st.integers(0, 2))
    def worker_crashes(self, luck: int) -> None:
        if not luck:
            self.crash_worker()

    def crash_worker(self) -> None:
        if self.stream is not None:
            self.session_breaks()
        self.worker_effects.clear()
        self.running.clear()
        self.instance += 1
        self.worker = worker.CommandLedger(self.worker_disk.rows.values())
        self.settle()

    def settle(self) -> None:
        """What an earlier start left open: begun ones end as they are found, others begin."""
        for entry in self.worker.open_entries:
            if entry.command_id in self.intended:
                self.worker.progress(entry.command_id, "settle")
                self.end(entry.command_id, SUCCEEDED if entry.command_id in self.done else FAILED)
            else:
                self.worker_effects.append(worker.Start(entry))

    @precondition(lambda self: self.stream is None and not self.coordinator_effects)
    @rule()
    def worker_connects(self) -> None:
        while self.worker_effects:  # hello waits for the journal
            self.step_worker()
        epoch = max(self.coordinator_disk.epoch, self.worker_disk.epoch) + 1
        self.coordinator_disk.epoch = epoch
        held = {entry.command_id for entry in self.worker.open_entries}
        held |= {update.command_id for update in self.worker.unacknowledged}
        self.worker_disk.epoch = epoch
        self.stream = Stream(epoch)
        self.stream.up.extend(self.worker.unacknowledged)
        instance = f"i{self.instance}"
        effects = self.coordinator.welcome(WORKER, instance, held, self.timestamp(), can_ask=True)
        self.coordinator_effects.extend(effects)

    @precondition(lambda self: self.stream is not None and not self.coordinator_effects)
    @rule()
    def it_is_the_turn_of_a_command_that_waits(self) -> None:
        steps = self.coordinator.advance(WORKER, f"i{self.instance}", self.timestamp())
        self.coordinator_effects.extend(next(steps, []))

    # What must hold.

    @invariant()
    def nothing_is_done_twice(self) -> None:
        assert all(times == 1 for times in self.done.values()), self.done

    @invariant()
    def what_is_known_agrees_with_the_world(self) -> None:
        for command_id, stored in self.coordinator_disk.rows.items():
            state = stored.command.state
            if state == SUCCEEDED:
                assert self.done.get(command_id) == 1, f"{command_id} succeeded, and was not done"
            elif is_terminal(state):
                assert command_id not in self.done, f"{command_id} was done, and is told {state}"

    def teardown(self) -> None:
        """Everything heals, and then every command has ended, as the world says."""
        for _ in range(1000):
            if self.stream is None and not self.coordinator_effects:
                self.worker_connects()
            while self.coordinator_effects:
                self.step_coordinator()
            if self.stream is not None:
                self.it_is_the_turn_of_a_command_that_waits()
                while self.coordinator_effects:
                    self.step_coordinator()
            while self.worker_effects:
                self.step_worker()
            for command_id in sorted(self.running):
                self.intended.add(command_id)
                self.done[command_id] = self.done.get(command_id, 0) + 1
                self.worker.progress(command_id, "")
                self.end(command_id, SUCCEEDED)
            if self.stream is not None and self.stream.down:
                self.deliver_down(self.stream.down.popleft())
            elif self.stream is not None and self.stream.up:
                self.frame_arrives_up()
            elif self.stream is not None and not self.worker_effects and not self.coordinator_effects:
                break
        self.nothing_is_done_twice()
        self.what_is_known_agrees_with_the_world()
        assert not self.coordinator.commands, "a command never ended"
        assert not self.worker.unacknowledged, "an outcome was never acknowledged"


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_every_command_ends_once_as_the_world_says() -> None:
    run_machine(CommandLife, settings=SETTINGS)


@pytest.mark.long
def test_a_large_sample_ends_once_as_the_world_says() -> None:
    run_machine(seed(environment.seed())(CommandLife), settings=settings(SETTINGS, max_examples=2000))


def tells_before_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    take_in = worker.CommandLedger._take_in

    def mutant(*arguments: Any) -> list[worker.Effect]:
        return [effect for effect in take_in(*arguments) if not isinstance(effect, worker.Keep)]

    monkeypatch.setattr(worker.CommandLedger, "_take_in", mutant)


def obeys_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = worker.CommandLedger.receive

    def mutant(
        self: worker.CommandLedger, frame: CommandFrame, epoch: int, now_s: float
    ) -> list[worker.Effect]:
        return receive(self, frame, frame.epoch, now_s)

    monkeypatch.setattr(worker.CommandLedger, "receive", mutant)


def begins_again_what_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = worker.CommandLedger.receive

    def mutant(
        self: worker.CommandLedger, frame: CommandFrame, epoch: int, now_s: float
    ) -> list[worker.Effect]:
        self._open.pop(frame.command.command_id, None)
        return receive(self, frame, epoch, now_s)

    monkeypatch.setattr(worker.CommandLedger, "receive", mutant)


def acknowledges_before_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    update = coordinator.CommandLedger.update

    def mutant(*arguments: Any) -> list[coordinator.Effect]:
        return update(*arguments)[::-1]

    monkeypatch.setattr(coordinator.CommandLedger, "update", mutant)


def sends_before_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    create = coordinator.CommandLedger.create

    def mutant(*arguments: Any) -> list[coordinator.Effect]:
        return create(*arguments)[::-1]

    monkeypatch.setattr(coordinator.CommandLedger, "create", mutant)


def expires_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = coordinator.CommandLedger.welcome

    def mutant(
        self: coordinator.CommandLedger,
        worker_id: str,
        instance_id: str,
        held: set[str],
        now: Timestamp,
        *,
        can_ask: bool,
    ) -> list[coordinator.Effect]:
        return welcome(self, worker_id, instance_id, set(), now)

    monkeypatch.setattr(coordinator.CommandLedger, "welcome", mutant)


def sends_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send = coordinator.CommandLedger._send

    def mutant(
        self: coordinator.CommandLedger, stored: coordinator.StoredCommand, *others: Any
    ) -> list[coordinator.Effect]:
        return [] if stored.instance_id else send(self, stored, *others)

    monkeypatch.setattr(coordinator.CommandLedger, "_send", mutant)


@pytest.mark.long
@pytest.mark.parametrize(
    "mutate",
    [
        tells_before_it_keeps,
        obeys_every_epoch,
        begins_again_what_comes_twice,
        acknowledges_before_it_stores,
        sends_before_it_stores,
        expires_what_was_sent,
        sends_only_once,
    ],
)
def test_the_model_finds_what_is_wrong(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    found = settings(
        SETTINGS,
        max_examples=20_000,
        stateful_step_count=30,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_machine(CommandLife, settings=found)
