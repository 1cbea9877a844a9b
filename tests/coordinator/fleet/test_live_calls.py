"""Calls end once their caller is refused."""

import asyncio

import pytest
from leasehold.v1 import errors_pb2
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import live_calls
from leasehold_coordinator.fleet.live_calls import LiveCalls

ALICE, BOB = (Caller(Identity(Kind.USER, name), "ipv4:10.0.0.1") for name in ("alice", "bob"))
BLOCKED = FleetError(errors_pb2.ERROR_REASON_UNAUTHENTICATED, "user/alice is blocked")


def test_the_calls_of_a_refused_caller_end_and_no_others() -> None:
    async def scenario() -> None:
        refused: set[Caller] = set()
        calls = LiveCalls(lambda caller: BLOCKED if caller in refused else None)
        opened = asyncio.Event()

        async def serve(caller: Caller) -> str:
            async with calls.serving(caller):
                await opened.wait()
            return "answered"

        tasks = [asyncio.create_task(serve(caller)) for caller in (ALICE, BOB, ALICE)]
        await asyncio.sleep(0)
        calls.check()
        refused.add(ALICE)
        calls.check()
        calls.check()  # a call ends once
        await asyncio.sleep(0)
        opened.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results == [BLOCKED, "answered", BLOCKED]
        calls.check()

    asyncio.run(scenario())


def test_the_calls_of_a_refused_caller_end_within_10_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/security.md names the bound: the next check ends the calls, and 8 s are left for a busy host."""
    assert live_calls.CHECK_INTERVAL_S == 2.0
    monkeypatch.setattr(live_calls, "CHECK_INTERVAL_S", 0.001)

    async def scenario() -> None:
        refused: set[Caller] = set()
        calls = LiveCalls(lambda caller: BLOCKED if caller in refused else None)

        async def serve() -> None:
            async with calls.serving(ALICE):
                refused.add(ALICE)
                await asyncio.Event().wait()

        watch = asyncio.create_task(calls.watch())
        with pytest.raises(FleetError, match="is blocked"):
            await serve()
        watch.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_timeout_of_the_call_itself_stays_one() -> None:
    async def scenario() -> None:
        async with LiveCalls(lambda caller: None).serving(ALICE):
            raise TimeoutError

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
