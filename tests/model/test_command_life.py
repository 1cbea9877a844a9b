"""Both ledgers of commands under every order of loss, crash and return that hypothesis comes upon.

Coordinator and worker are the real ledgers. Disk, network and world are simulated: writes wait for a batch,
which goes to disk as a whole, a crash forgets everything else between any two effects, a session that breaks
loses what is in flight, frames of older sessions may still arrive, and in a session frames may come twice.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.operation_pb2 import Operation, StopOperation
from leasehold.worker.v1.session_pb2 import CommandFrame, CommandUpdate
from leasehold_coordinator.core import command_ledger as coordinator
from leasehold_coordinator.core.command_effects import (
    Acknowledge,
    Effect,
    Note,
    Send,
    Store,
    StoredCommand,
    frame_of,
)
from leasehold_coordinator.core.command_states import is_terminal
from leasehold_worker.commands import ledger as worker

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
class Chain:
    """What the coordinator does one after the other, beside other chains."""

    effects: deque[Effect]
    waits: bool = False
    """Its last write is not on disk yet."""


@dataclass
class Write:
    """A write of the worker that waits for its batch, and what follows once it is on disk."""

    write: Callable[[], object]
    following: list[worker.Effect] = field(default_factory=list)
    later: bool = False
    """Nothing waits for it."""


@dataclass
class Stream:
    """One session: frames in order each way, until it breaks."""

    epoch: int
    down: deque[CommandFrame | str] = field(default_factory=deque)
    """Commands, or the id of one whose outcome is acknowledged."""
    up: deque[CommandUpdate] = field(default_factory=deque)


class CommandLife(RuleBasedStateMachine):
    """The two sides, the network between them, and the world in which commands are done."""

    waits_for_batches = True
    """Mutants do not."""

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
        self.chains: list[Chain] = []
        self.session_chain: Chain | None = None
        """What follows from the last frame of the session, which is read before the next one."""
        self.coordinator_batch: list[tuple[StoredCommand, Chain | None]] = []
        self.noted: set[str] = set()
        self.worker_batch: list[Write] = []

    # The world.

    def timestamp(self) -> Timestamp:
        moment = Timestamp()
        moment.FromNanoseconds(round(self.now_s * 1e9))
        return moment

    # Carrying out effects one at a time, so that a crash may come between any two.

    def begin(self, effects: Iterable[Effect]) -> Chain:
        chain = Chain(deque(effects))
        self.chains.append(chain)
        return chain

    def ready_chains(self) -> list[Chain]:
        self.chains = [chain for chain in self.chains if chain.effects or chain.waits]
        return [chain for chain in self.chains if chain.effects and not chain.waits]

    def being_ended(self) -> set[str]:
        """Commands whose outcome is on its way to disk: what is said of them waits for that."""
        stores = [effect for chain in self.chains for effect in chain.effects]
        afters = [effect.after for effect in stores if isinstance(effect, Store)]
        afters += [stored for stored, _ in self.coordinator_batch]
        return {one.command.command_id for one in afters if is_terminal(one.command.state)}

    def step_coordinator(self, chain: Chain) -> None:
        effect = chain.effects.popleft()
        match effect:
            case Store():
                stored = self.coordinator.current(effect)
                if stored is not None:
                    self.coordinator_batch.append((stored, chain))
                    chain.waits = self.waits_for_batches
            case Note(stored):
                self.noted.add(stored.command.command_id)
            case Send(stored):
                assert stored.command.command_id in self.coordinator_disk.rows, "sent, and not on disk"
                if self.stream is not None and stored.command.command_id in self.coordinator.commands:
                    frame = frame_of(effect, self.stream.epoch, self.timestamp())
                    self.stream.down.append(frame)
            case Acknowledge(_, command_id):
                on_disk = self.coordinator_disk.rows[command_id].command
                assert is_terminal(on_disk.state), "acknowledged, and not on disk"
                if self.stream is not None:
                    self.stream.down.append(command_id)

    def commit_coordinator(self) -> None:
        for stored, chain in self.coordinator_batch:
            self.coordinator_disk.rows[stored.command.command_id] = stored
            self.coordinator.kept(stored)
            if chain is not None:
                chain.waits = False
        self.coordinator_batch.clear()

    def settle_coordinator(self) -> None:
        while self.coordinator_batch or self.ready_chains():
            for chain in self.ready_chains():
                self.step_coordinator(chain)
            self.commit_coordinator()

    def take(self, effects: list[worker.Effect]) -> None:
        """What follows a Keep waits for its batch, and all else but a refusal for what was put before it."""
        match effects:
            case []:
                pass
            case [worker.Keep(entry), *following]:
                rows = self.worker_disk.rows
                write = partial(rows.__setitem__, entry.command_id, entry)
                self.worker_batch.append(Write(write, following, later=entry.acknowledged_s is not None))
            case [worker.Refuse(), *_]:
                self.do(effects)
            case _ if all(waiting.later for waiting in self.worker_batch):
                self.do(effects)
            case _:
                self.worker_batch.append(Write(bool, effects))

    def commit_worker(self, effects_before_a_crash: int | None = None) -> None:
        batch, self.worker_batch = self.worker_batch, []
        following = [effect for write in batch for effect in write.following]
        if self.waits_for_batches:
            for write in batch:
                write.write()
        self.do(following[:effects_before_a_crash])
        if effects_before_a_crash is not None:
            self.crash_worker()

    def do(self, effects: list[worker.Effect]) -> None:
        for effect in effects:
            match effect:
                case worker.Keep():
                    raise ValueError("a Keep comes first")
                case worker.Tell(update) | worker.Refuse(update):
                    if isinstance(effect, worker.Tell):
                        kept = self.worker_disk.rows.get(update.command_id)
                        assert kept is not None, "told, and not on disk"
                        assert kept.state == update.state or not is_terminal(update.state), "told otherwise"
                    if self.stream is not None:
                        self.stream.up.append(update)
                case worker.Start(entry):
                    assert entry.command_id in self.worker_disk.rows, "begun, and not on disk"
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
                        forget = partial(self.worker_disk.rows.pop, command_id)
                        self.worker_batch.append(Write(forget, later=True))

    def end(self, command_id: str, state: command_pb2.CommandState.ValueType) -> None:
        self.running.discard(command_id)
        self.take(self.worker.finish(CommandUpdate(command_id=command_id, state=state)))

    # What people do.

    @precondition(lambda self: len(self.coordinator.commands) < 2)
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
        self.begin(self.coordinator.create(command, self.timestamp(), instance))

    @precondition(lambda self: self.coordinator.commands and self.asked % 3 == 0)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.coordinator.commands)))
        self.begin(self.coordinator.cancel(command_id, self.timestamp()))

    @precondition(lambda self: self.coordinator.commands)
    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        instance = f"i{self.instance}" if self.stream is not None else None
        for step in self.coordinator.tick(self.timestamp(), lambda _: instance, lambda _: True):
            self.begin(step)

    # What the machines do.

    @precondition(lambda self: self.ready_chains())
    @rule(data=st.data())
    def coordinator_goes_on(self, data: st.DataObject) -> None:
        chains = self.ready_chains()
        self.step_coordinator(chains[data.draw(st.integers(0, len(chains) - 1))])

    @precondition(lambda self: self.coordinator_batch)
    @rule()
    def coordinator_commits(self) -> None:
        self.commit_coordinator()

    @precondition(lambda self: self.noted)
    @rule()
    def coordinator_stores_what_it_noted(self) -> None:
        stored = self.coordinator.unstored(sorted(self.noted))
        self.noted.clear()
        self.coordinator_batch += [(one, None) for one in stored]

    @precondition(lambda self: self.worker_batch)
    @rule()
    def worker_commits(self) -> None:
        self.commit_worker()

    @precondition(lambda self: self.worker_batch)
    @rule(effects=st.integers(0, 3))
    def worker_commits_and_crashes_before_it_has_told_all(self, effects: int) -> None:
        self.commit_worker(effects)

    @precondition(lambda self: self.running - self.intended)
    @rule(data=st.data())
    def worker_intends(self, data: st.DataObject) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.running - self.intended)))
        self.worker_batch.append(Write(partial(self.intended.add, command_id)))

    @precondition(lambda self: self.running & self.intended)
    @rule(data=st.data(), crash=st.booleans())
    def worker_does_it(self, data: st.DataObject, crash: bool) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.running & self.intended)))
        self.done[command_id] = self.done.get(command_id, 0) + 1
        if crash:
            self.crash_worker()
        else:
            self.take(self.worker.progress(command_id, ""))
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
            self.take(self.worker.acknowledge(frame, self.now_s))
        else:
            self.take(self.worker.receive(frame, self.worker_disk.epoch, self.now_s))

    def can_be_read(self) -> bool:
        """Whether the next frame that came up is read now."""
        if self.stream is None or not self.stream.up:
            return False
        self.ready_chains()
        is_busy = any(chain is self.session_chain for chain in self.chains)
        return not is_busy and self.stream.up[0].command_id not in self.being_ended()

    @precondition(lambda self: self.can_be_read())
    @rule()
    def frame_arrives_up(self) -> None:
        assert self.stream is not None
        update = self.stream.up.popleft()
        self.session_chain = self.begin(self.coordinator.update(WORKER, update, self.timestamp()))

    # What goes wrong.

    @precondition(lambda self: self.stream)
    @rule()
    def session_breaks(self) -> None:
        assert self.stream is not None
        self.old_frames = list(self.stream.down)[:3]
        self.stream = None
        self.session_chain = None

    @precondition(lambda self: self.asked)
    @rule(luck=st.integers(0, 2))
    def coordinator_crashes(self, luck: int) -> None:
        if luck:
            return
        if self.stream is not None:
            self.session_breaks()
        self.chains.clear()
        self.coordinator_batch.clear()
        self.noted.clear()
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
        self.worker_batch.clear()
        self.running.clear()
        self.instance += 1
        self.worker = worker.CommandLedger(self.worker_disk.rows.values())
        self.settle()

    def settle(self) -> None:
        """What an earlier start left open: begun ones end as they are found, others begin."""
        for entry in self.worker.open_entries:
            if entry.command_id in self.intended:
                self.take(self.worker.progress(entry.command_id, "settle"))
                self.end(entry.command_id, SUCCEEDED if entry.command_id in self.done else FAILED)
            else:
                self.take([worker.Start(entry)])

    @precondition(lambda self: self.stream is None)
    @rule()
    def worker_connects(self) -> None:
        while self.worker_batch:  # hello waits for the journal
            self.commit_worker()
        epoch = max(self.coordinator_disk.epoch, self.worker_disk.epoch) + 1
        self.coordinator_disk.epoch = epoch
        held = {entry.command_id for entry in self.worker.open_entries}
        held |= {update.command_id for update in self.worker.unacknowledged}
        self.worker_disk.epoch = epoch
        self.stream = Stream(epoch)
        self.stream.up.extend(self.worker.unacknowledged)
        earlier = frozenset(self.coordinator.stored_of_worker(WORKER))
        effects = self.coordinator.welcome(
            WORKER, f"i{self.instance}", held, self.timestamp(), earlier, can_ask=True
        )
        self.session_chain = self.begin(effects)

    @precondition(lambda self: self.stream is not None)
    @rule()
    def it_is_the_turn_of_a_command_that_waits(self) -> None:
        steps = self.coordinator.advance(WORKER, f"i{self.instance}", self.timestamp())
        self.begin(next(steps, []))

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
            self.settle_coordinator()
            if self.stream is None:
                self.worker_connects()
                self.settle_coordinator()
            self.it_is_the_turn_of_a_command_that_waits()
            self.settle_coordinator()
            while self.worker_batch:
                self.commit_worker()
            for command_id in sorted(self.running):
                self.intended.add(command_id)
                self.done[command_id] = self.done.get(command_id, 0) + 1
                self.take(self.worker.progress(command_id, ""))
                self.end(command_id, SUCCEEDED)
            assert self.stream is not None
            if self.stream.down:
                self.deliver_down(self.stream.down.popleft())
            elif self.stream.up:
                self.frame_arrives_up()
            elif not self.worker_batch:
                break
        self.nothing_is_done_twice()
        self.what_is_known_agrees_with_the_world()
        assert not self.coordinator.commands, "a command never ended"
        assert not self.worker.unacknowledged, "an outcome was never acknowledged"


SETTINGS = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.long
def test_every_command_ends_once_as_the_world_says() -> None:
    run_machine(CommandLife, settings=SETTINGS)


@pytest.mark.long
def test_a_large_sample_ends_once_as_the_world_says() -> None:
    run_machine(seed(environment.seed())(CommandLife), settings=settings(SETTINGS, max_examples=1000))


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

    def mutant(*arguments: Any) -> list[Effect]:
        return update(*arguments)[::-1]

    monkeypatch.setattr(coordinator.CommandLedger, "update", mutant)


def sends_before_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    create = coordinator.CommandLedger.create

    def mutant(*arguments: Any) -> list[Effect]:
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
        earlier: frozenset[str],
        *,
        can_ask: bool,
    ) -> list[Effect]:
        return welcome(self, worker_id, instance_id, set(), now, earlier)

    monkeypatch.setattr(coordinator.CommandLedger, "welcome", mutant)


def sends_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send = coordinator.CommandLedger._send

    def mutant(self: coordinator.CommandLedger, stored: StoredCommand, *others: Any) -> list[Effect]:
        return [] if stored.instance_id else send(self, stored, *others)

    monkeypatch.setattr(coordinator.CommandLedger, "_send", mutant)


def tells_before_its_batch_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommandLife, "waits_for_batches", False)


def tells_an_outcome_before_its_batch_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    update = coordinator.CommandLedger.update

    def mutant(*arguments: Any) -> list[Effect]:
        effects = update(*arguments)
        return [Note(effect.after) if isinstance(effect, Store) else effect for effect in effects]

    monkeypatch.setattr(coordinator.CommandLedger, "update", mutant)


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
        tells_before_its_batch_is_on_disk,
        tells_an_outcome_before_its_batch_is_on_disk,
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
