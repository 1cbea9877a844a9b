"""Requests that come at once: decided one after the other, and stored together."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.fleet_service_pb2 import CordonRequest, DeleteWorkerRequest
from leasehold.v1.operation_pb2 import CordonOperation, Operation, SuspendOperation
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest, SuspendWorkerRequest
from leasehold.worker.v1.session_pb2 import CommandUpdate
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.commands import decisions, placement
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.commands.request_keys import RequestKey
from leasehold_coordinator.core import command_states
from leasehold_coordinator.core.command_ledger import SENT_LIMIT, UNFINISHED_LIMIT
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import current_caller, note_caller
from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.scheduling import planner
from leasehold_coordinator.scheduling.candidates import Candidate
from leasehold_coordinator.storage import schema

from tests.coordinator.bench import FULL, Bench, on_bench

Created = tuple[Workload, Command | None]


class Desk:
    """Requests to the bench's worker, whose writes of commands wait for a gate."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet = bench.fleet
        hello, session_id = bench.session.hello, bench.session.session_id
        bench.session.known = self.fleet.registry.welcome(
            hello, 1, session_id, time.monotonic(), time.time_ns()
        )
        self.requests = CommandCreation(bench.fleet, bench.dispatcher, bench.bounds)
        self.gate = bench.hold_writes(monkeypatch, schema.commands)

    def run(self, name: str = "", *, request_id: str = "", gpus: int = 0) -> asyncio.Task[Created]:
        """Begins to ask for a workload."""
        spec = WorkloadSpec(arguments=["true"], resources=Resources(gpu_count=gpus))
        request = CreateWorkloadRequest(name=name, request_id=request_id, spec=spec)
        return asyncio.create_task(self.requests.create_workload(request))

    def cordon(self) -> asyncio.Task[Command]:
        """Begins to ask for a command about the worker."""
        request = CordonRequest(worker="alpha")
        return asyncio.create_task(
            self.requests.operate_worker(
                request, Operation(cordon=CordonOperation(cordoned_by="me", reason="a test"))
            )
        )

    async def decided(self, count: int) -> None:
        """Waits until so many commands are taken in."""
        await self.until(lambda: len(self.fleet.ledger.commands) == count)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)


def at_desk(path: Path, scenario: Callable[[Bench, Desk], Awaitable[None]], failures: int = 0) -> None:
    """Plays a scenario. Of the writes, so many fail first."""

    async def play(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if failures:
                bench.fail_writes(monkeypatch, times=failures)
            await scenario(bench, Desk(bench, monkeypatch))

    on_bench(path, play)


async def reason(asked: "asyncio.Task[Created]") -> errors_pb2.ErrorReason.ValueType:
    """Why it is refused."""
    with pytest.raises(FleetError) as error:
        await asked
    return error.value.reason


def test_creations_are_decided_while_others_are_stored(tmp_path: Path) -> None:
    async def scenario(bench: Bench, desk: Desk) -> None:
        asked = [desk.run() for _ in range(3)]
        await desk.decided(3)
        assert not bench.sent()
        assert not any(one.done() for one in asked)
        desk.gate.opened.set()
        ids = [command.command_id for _, command in await asyncio.gather(*asked) if command]
        assert [frame.command.command.command_id for frame in bench.sent()] == ids
        for command_id in ids:
            await bench.stored(command_id)

    at_desk(tmp_path, scenario)


def test_requests_that_wait_for_a_decision_are_bounded_also_without_their_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "BEGUN_LIMIT", 8)

    async def scenario(bench: Bench, desk: Desk) -> None:
        async with desk.requests.decisions.alone():
            asked = [desk.run() for _ in range(4)]
            await asyncio.sleep(0.05)
            for one in asked:
                one.cancel()  # the call has ended, and the request waits
            await asyncio.wait(asked)
            assert await reason(desk.run()) == errors_pb2.ERROR_REASON_TOO_MANY_CALLS
        desk.gate.opened.set()
        await desk.until(lambda: len(bench.sent()) == 4)
        _, command = await desk.run()
        assert command is not None

    at_desk(tmp_path, scenario)


def test_a_costly_refusal_is_charged_also_without_its_caller_and_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "DESCRIBED_PER_REQUEST", 0.001)  # a description costs 1,000 requests
    described: list[str] = []
    describe = placement._candidate

    def count(fleet: FleetReader, known: KnownWorker, *, for_helper: bool) -> Candidate:
        described.append(str(current_caller()))
        return describe(fleet, known, for_helper=for_helper)

    monkeypatch.setattr(placement, "_candidate", count)
    alice, bob = (Caller(Identity(Kind.USER, name), "ipv4:192.0.2.1") for name in ("alice", "bob"))

    async def scenario(bench: Bench, desk: Desk) -> None:
        async with desk.requests.decisions.alone():
            note_caller(alice)
            leaving, waiting = desk.run(gpus=9), desk.run(gpus=9)
            await asyncio.sleep(0.05)
            leaving.cancel()  # the call has ended, and the request waits
        assert await reason(waiting) == errors_pb2.ERROR_REASON_TOO_MANY_CALLS
        with pytest.raises(FleetError, match=r"user/alice is above 50 requests per second"):
            bench.bounds.admit(alice)
        note_caller(bob)
        assert await reason(desk.run(gpus=9)) == errors_pb2.ERROR_REASON_NO_FREE_GPU
        assert described == ["user/alice", "user/bob"]

    at_desk(tmp_path, scenario)


def test_the_same_request_creates_one_command_also_while_it_is_stored(tmp_path: Path) -> None:
    async def scenario(bench: Bench, desk: Desk) -> None:
        first = desk.run(request_id="r-1")
        await desk.gate.reached.wait()
        again, other = desk.run(request_id="r-1"), desk.run(request_id="r-2")
        await desk.decided(2)
        assert not again.done()
        desk.gate.opened.set()
        assert await again == await first
        assert (await other)[1] != (await first)[1]

    at_desk(tmp_path, scenario)


def test_the_same_request_creates_a_command_if_the_first_was_not_stored(tmp_path: Path) -> None:
    async def scenario(bench: Bench, desk: Desk) -> None:
        first, again = desk.run(request_id="r-1"), desk.run(request_id="r-1")
        await desk.gate.reached.wait()
        desk.gate.opened.set()
        assert await reason(first) == FULL.reason
        workload, command = await again
        assert command is not None
        assert list(desk.fleet.ledger.commands) == [command.command_id]
        assert list(desk.fleet.workloads) == [workload.workload_id]

    at_desk(tmp_path, scenario, failures=1)


def test_a_refusal_that_rests_on_a_creation_is_told_once_that_is_stored(tmp_path: Path) -> None:
    async def scenario(bench: Bench, desk: Desk) -> None:
        first = desk.run("one")
        await desk.gate.reached.wait()
        second = desk.run("one")
        busy = asyncio.create_task(
            desk.requests.operate(
                key=RequestKey("", "", b""),
                workload="one",
                operation=Operation(suspend=SuspendOperation()),
                expected_generation=None,
                timeout=None,
            )
        )
        await desk.until(lambda: desk.requests.decisions.is_deciding)
        await asyncio.sleep(0)
        assert not second.done()
        assert not busy.done()
        desk.gate.opened.set()
        assert await reason(second) == errors_pb2.ERROR_REASON_WORKLOAD_EXISTS
        _, created = await first
        with pytest.raises(FleetError) as error:
            await busy
        assert error.value.metadata["command_id"] == (created and created.command_id)

    at_desk(tmp_path, scenario)


@pytest.mark.parametrize("gpus", [0, 2])
def test_what_a_creation_took_is_free_again_if_it_could_not_be_stored(tmp_path: Path, gpus: int) -> None:
    """The same name, or all GPUs of the only worker."""

    async def scenario(bench: Bench, desk: Desk) -> None:
        first = desk.run("" if gpus else "one", gpus=gpus)
        await desk.gate.reached.wait()
        second = desk.run("" if gpus else "one", gpus=gpus)
        await desk.until(lambda: desk.requests.decisions.is_deciding)
        desk.gate.opened.set()
        assert await reason(first) == FULL.reason
        workload, command = await second
        assert command is not None
        assert list(desk.fleet.workloads) == [workload.workload_id]
        assert [frame.command.command.command_id for frame in bench.sent()] == [command.command_id]

    at_desk(tmp_path, scenario, failures=1)


def test_requests_at_once_exceed_no_limit(tmp_path: Path) -> None:
    async def scenario(bench: Bench, desk: Desk) -> None:
        most = UNFINISHED_LIMIT // 2  # of one client
        asked = [desk.cordon() for _ in range(most + 5)]
        await desk.decided(most)
        desk.gate.opened.set()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one.reason for one in ended if isinstance(one, FleetError)]
        assert refused == [errors_pb2.ERROR_REASON_TOO_MANY_COMMANDS] * 5
        assert len(desk.fleet.ledger.on_disk) == most

    at_desk(tmp_path, scenario)


def test_an_answer_that_names_earlier_commands_waits_until_they_are_stored(tmp_path: Path) -> None:
    async def scenario(bench: Bench, desk: Desk) -> None:
        first = desk.run()
        await desk.gate.reached.wait()
        whole = asyncio.create_task(
            desk.requests.suspend_worker(SuspendWorkerRequest(worker="alpha", operation=SuspendOperation()))
        )
        late = desk.run()
        await desk.until(lambda: desk.requests.decisions.is_deciding)
        await asyncio.sleep(0)
        assert not whole.done()
        assert len(desk.fleet.ledger.commands) == 1
        desk.gate.opened.set()
        await asyncio.gather(first, whole, late)

    at_desk(tmp_path, scenario)


def test_a_worker_is_deleted_with_the_commands_that_are_being_stored(tmp_path: Path) -> None:
    async def scenario(bench: Bench, desk: Desk) -> None:
        asked = desk.run()
        await desk.gate.reached.wait()
        del bench.fleet.sessions["worker-alpha"]
        records = RecordChanges(desk.fleet, desk.requests.decisions)
        deleting = asyncio.create_task(records.delete_worker(DeleteWorkerRequest(worker="alpha")))
        await desk.until(lambda: desk.requests.decisions.is_deciding)
        desk.gate.opened.set()
        workload, command = await asked
        assert command is not None
        assert (await deleting).failed_workload_ids == [workload.workload_id]
        ended = await bench.stored(command.command_id)
        assert ended.error.reason == errors_pb2.ERROR_REASON_WORKER_DELETED
        assert not desk.fleet.ledger.commands

    at_desk(tmp_path, scenario)


def test_a_command_that_waited_for_its_turn_goes_once_it_is_stored(tmp_path: Path) -> None:
    """The commands before it may end while it is being stored, and then it has its turn at once."""

    async def scenario(bench: Bench) -> None:
        earlier = [f"c-{number}" for number in range(SENT_LIMIT)]
        for command_id in earlier:
            await bench.send(command_id, workload_id=f"w-of-{command_id}")
        with pytest.MonkeyPatch.context() as monkeypatch:
            gate = bench.hold_writes(monkeypatch, schema.commands)
            late = asyncio.create_task(bench.send("c-late", workload_id="w-late"))
            await gate.reached.wait()
        for command_id in earlier:
            ended = CommandUpdate(command_id=command_id, state=command_states.SUCCEEDED)
            await bench.dispatcher.update(bench.session, ended)
        bench.sent()
        gate.opened.set()
        await late
        async with asyncio.timeout(20):
            while not (frames := bench.sent()):  # noqa: ASYNC110 - nothing tells of frames
                await asyncio.sleep(0.01)
        assert frames[0].command.command.command_id == "c-late"

    on_bench(tmp_path, scenario)


def test_a_request_that_is_repeated_while_the_disk_hangs_may_be_stored(tmp_path: Path) -> None:
    """A client that is told that nothing was begun asks again, under another id."""

    async def scenario(bench: Bench, desk: Desk) -> None:
        first, nameless = desk.run("one", request_id="r-1"), desk.run("three")
        await desk.gate.reached.wait()
        bench.store.health._stalled.set()
        try:
            for request, message in (
                (first, "stored is unknown: repeat the request with its request_id"),
                (
                    desk.run("one", request_id="r-1"),
                    "stored is unknown: repeat the request with its request_id",
                ),
                (nameless, "stored is unknown: look at `leasehold get commands`"),
                (desk.run("two", request_id="r-2"), "nothing was begun"),
            ):
                with pytest.raises(FleetError, match=message):
                    await asyncio.wait_for(request, 10)
        finally:
            bench.store.health._stalled.clear()
            desk.gate.opened.set()
        workload, _ = await desk.run("one", request_id="r-1")
        named = [one.workload_id for one in desk.fleet.workloads.values() if one.name == "one"]
        assert named == [workload.workload_id]

    at_desk(tmp_path, scenario)
