"""Each caller has bounds of its own, and nobody uses up those of others."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED, Command
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.core.command_effects import StoredCommand
from leasehold_coordinator.core.command_ledger import SENT_LIMIT, CommandLedger
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import caller_bounds
from leasehold_coordinator.fleet.caller_bounds import CallerBounds, CallerLimits
from leasehold_coordinator.fleet.callers import note_caller

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.storage.test_store import Clock

ALICE, BOB = (Caller(Identity(Kind.USER, name), "ipv4:192.0.2.1") for name in ("alice", "bob"))
BATCH = Caller(Identity(Kind.SERVICE, "batch"), "ipv4:192.0.2.2", on_behalf_of=ALICE.identity)
OPERATOR = Caller(Identity(Kind.USER, "olga"), "ipv4:192.0.2.3", role=Role.OPERATOR)
ADMIN = Caller(Identity(Kind.LOCAL, "root"), "unix", is_local_admin=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock, which stands still unless a test moves it."""
    stopped = Clock(monkeypatch)
    monkeypatch.setattr(time, "monotonic", lambda: 1_000.0 + stopped.served_s)
    return stopped


def admitted(bounds: CallerBounds, caller: Caller, wanted: int = 1_000) -> int:
    """How many requests of a caller are admitted, up to the first refusal."""
    for number in range(wanted):
        try:
            bounds.admit(caller)
            bounds.admit_user(caller)
        except FleetError:
            return number
    return wanted


def refused(bounds: CallerBounds, caller: Caller) -> FleetError:
    with pytest.raises(FleetError) as error:
        bounds.admit(caller)
    assert error.value.reason == errors_pb2.ERROR_REASON_TOO_MANY_CALLS
    return error.value


def test_a_costly_refusal_counts_as_many_requests(clock: Clock) -> None:
    bounds = CallerBounds(CallerLimits())
    costly = FleetError(errors_pb2.ERROR_REASON_NO_FREE_GPU, "no room")
    costly.cost_requests = 250
    for caller in (BATCH, ADMIN):
        bounds.charge_refusal(caller, costly)
    assert admitted(bounds, ALICE) == 0
    assert admitted(bounds, BOB) == 200
    assert admitted(bounds, ADMIN) == 1_000
    clock.served_s += 2
    assert admitted(bounds, ALICE) == 50


def test_a_caller_makes_one_list_at_a_time_also_if_it_leaves() -> None:
    async def scenario() -> None:
        bounds = CallerBounds(CallerLimits())
        begun: list[str] = []
        opened = asyncio.Event()

        async def make(name: str) -> str:
            begun.append(name)
            await opened.wait()
            return name

        def ask(caller: Caller, name: str) -> asyncio.Task[str]:
            return asyncio.create_task(bounds.list_in_turn(caller, lambda: make(name)))

        leaving = ask(ALICE, "first")
        others = [ask(ALICE, "second"), ask(BOB, "his"), ask(ADMIN, "one"), ask(ADMIN, "two")]
        waiting = ask(ALICE, "third")
        await asyncio.sleep(0.05)
        for one in (leaving, waiting):  # the calls have ended, and the read of the first goes on
            one.cancel()
        await asyncio.wait([leaving, waiting])
        assert sorted(begun) == ["first", "his", "one", "two"]
        opened.set()
        assert await asyncio.gather(*others) == ["second", "his", "one", "two"]
        assert begun[4:] == ["second"]

    asyncio.run(scenario())


def test_lists_take_their_share_of_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    async def rest(time_s: float) -> None:
        rests.append(time_s)
        clock.served_s += time_s

    monkeypatch.setattr(asyncio, "sleep", rest)

    async def scenario() -> None:
        bounds = CallerBounds(CallerLimits())

        async def make() -> None:
            clock.served_s += 1.0

        for _ in range(5):
            await bounds.list_in_turn(ALICE, make)
        await bounds.list_in_turn(BOB, make)

    asyncio.run(scenario())
    assert rests == pytest.approx([1.0, 2.0])


def test_requests_have_a_burst_and_a_rate(clock: Clock) -> None:
    bounds = CallerBounds(CallerLimits())
    assert admitted(bounds, ALICE) == 200
    refusal = refused(bounds, ALICE)
    assert refusal.metadata == {"bound": "caller_requests_per_s"}
    assert refusal.retry_after_s == pytest.approx(0.02)
    assert admitted(bounds, BOB) == 200, "others have their own"
    clock.served_s += 1.001
    assert admitted(bounds, ALICE) == 50
    assert admitted(bounds, ADMIN) == 1_000


def test_a_call_on_behalf_of_a_user_counts_for_both(clock: Clock) -> None:
    bounds = CallerBounds(CallerLimits())
    assert admitted(bounds, ALICE, 150) == 150
    assert admitted(bounds, BATCH) == 50
    assert admitted(bounds, ALICE) == 0


def test_bytes_that_were_read_are_paid_for_before_the_next_request(clock: Clock) -> None:
    bounds = CallerBounds(CallerLimits())
    bounds.charge(ALICE, 16 * 2**20)
    bounds.admit(ALICE)
    bounds.charge(ALICE, 2**20)
    refusal = refused(bounds, ALICE)
    assert refusal.metadata == {"bound": "caller_bytes_per_s"}
    assert refusal.retry_after_s == pytest.approx(0.25)
    bounds.admit(BOB)
    clock.served_s += 0.26
    bounds.admit(ALICE)


def test_refusals_above_a_rate_are_held_back_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_bounds, "HELD_LIMIT", 3)
    monkeypatch.setattr(caller_bounds, "HOLD_S", 7200)

    async def scenario() -> None:
        bounds = CallerBounds(CallerLimits(requests_per_s=1 / 3600))
        refusal = FleetError(errors_pb2.ERROR_REASON_TOO_MANY_CALLS, "", bound="caller_requests_per_s")
        held = [asyncio.create_task(bounds.hold(refusal, "user/a")) for _ in range(3)]
        await asyncio.sleep(0)
        assert 7190 < bounds._answers["user/a"] - time.monotonic() <= 7200
        await bounds.hold(refusal, "user/b")
        assert not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.wait(held)
        streams = FleetError(errors_pb2.ERROR_REASON_TOO_MANY_CALLS, "", bound="caller_streams")
        await bounds.hold(streams, "user/a")
        assert (bounds._held, bounds._answers) == (0, {})

    asyncio.run(scenario())


def test_streams_are_counted_until_they_end() -> None:
    bounds = CallerBounds(CallerLimits(streams=2))
    leave = [bounds.open_stream(ALICE) for _ in range(2)]
    for caller in (ALICE, BATCH):
        with pytest.raises(FleetError) as error:
            bounds.open_stream(caller)
        assert error.value.metadata == {"bound": "caller_streams"}
    bounds.open_stream(BOB)()
    leave[0]()
    bounds.open_stream(BATCH)
    for _ in range(3):
        bounds.open_stream(ADMIN)


def test_addresses_without_identity_are_bounded_and_use_up_nothing_of_identities(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_bounds, "KEY_LIMIT", 8)
    bounds = CallerBounds(CallerLimits(requests_per_s=1))
    for number in range(100):
        with suppress(FleetError):
            bounds.admit_unknown(f"ipv6:[2001:db8::{number}]")
    assert len(bounds._unknown._by_key) <= 9
    assert admitted(bounds, ALICE) == 4
    clock.served_s += 10
    bounds.admit_unknown("ipv4:192.0.2.9")
    assert len(bounds._unknown._by_key) < 9, "idle callers take no memory"


def test_unfinished_commands_of_a_caller_are_bounded_over_all_workers(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        dispatcher = Dispatcher(bench.fleet, 3)

        async def create(number: int, caller: Caller) -> None:
            note_caller(caller)
            dispatcher.check_room(f"worker-{number}", [])
            await dispatcher.create(
                Command(
                    command_id=f"c-{number}",
                    actor=str(caller.identity),
                    worker_id=f"worker-{number}",
                    workload_id=f"w-{number}",
                    operation=Operation(suspend=SuspendOperation()),
                )
            )

        for number in range(3):
            await asyncio.create_task(create(number, ALICE))
        with pytest.raises(FleetError) as error:
            await asyncio.create_task(create(3, ALICE))
        assert error.value.reason == errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS
        assert error.value.metadata == {"bound": "caller_commands"}
        await asyncio.create_task(create(3, BOB))
        await dispatcher.cancel(bench.fleet.ledger.commands["c-0"].command)
        await asyncio.create_task(create(4, ALICE))

    on_bench(tmp_path, scenario)


def test_commands_of_one_user_leave_places_at_the_worker_for_others(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async def send(name: str, caller: Caller) -> None:
            note_caller(caller)
            await bench.send(f"c-{name}", workload_id=f"w-{name}")

        for number in range(SENT_LIMIT):
            await asyncio.create_task(send(f"alice-{number}", ALICE))
        await asyncio.create_task(send("bob", BOB))
        sent = [frame.command.command.command_id for frame in bench.sent()]
        assert sent == ["c-alice-0", "c-alice-1", "c-alice-2", "c-alice-3", "c-bob"]
        for number in range(SENT_LIMIT):
            await asyncio.create_task(send(f"operator-{number}", OPERATOR))
        sent = [frame.command.command.command_id for frame in bench.sent()]
        assert sent == ["c-operator-0", "c-operator-1", "c-operator-2"]

    on_bench(tmp_path, scenario)


def test_commands_of_a_caller_are_counted_after_a_restart() -> None:
    stored = [StoredCommand(Command(command_id=f"c-{number}", actor="user/alice")) for number in range(2)]
    ledger = CommandLedger(stored)
    assert (ledger.of_actor("user/alice"), ledger.of_actor("user/bob")) == (2, 0)
    ended = StoredCommand(Command(command_id="c-0", actor="user/alice", state=COMMAND_STATE_SUCCEEDED))
    ledger._drop(ended)
    ledger._drop(ended)
    assert ledger.of_actor("user/alice") == 1
