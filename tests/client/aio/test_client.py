"""The asynchronous client. Its methods are tested in their synchronous form."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from leasehold.v1 import (
    command_pb2,
    event_service_pb2,
    fleet_service_pb2,
    watch_pb2,
    worker_pb2,
    workload_service_pb2,
)
from leasehold_client import (
    AsyncClient,
    Command,
    CommandFailedError,
    LeaseholdError,
    NoCoordinatorError,
    WorkloadSpec,
)
from leasehold_client.config import config_path
from leasehold_client.contexts import Context, Contexts, locked_contexts, read_contexts
from leasehold_client.coordinator import login
from leasehold_client.coordinator.renewing_channel import RenewedContext
from leasehold_client.errors import UsageError

from tests.client.scripted_coordinator import ScriptedCoordinator, command, refuse
from tests.renewals import Renewals, serving_renewals

PENDING, RUNNING, FAILED, SUCCEEDED = (
    command_pb2.COMMAND_STATE_PENDING,
    command_pb2.COMMAND_STATE_RUNNING,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_SUCCEEDED,
)
TIMEOUT_S = 30.0


def test_a_client_that_is_closed_makes_no_call(scripted: ScriptedCoordinator) -> None:
    async def main() -> None:
        async with AsyncClient(scripted.address) as client:
            pass
        with pytest.raises(LeaseholdError, match="this client is closed: make another one"):
            await client.workers()

    asyncio.run(main())


@pytest.mark.parametrize("calls", [0, 1], ids=["first call", "token of a later call"])
def test_a_client_that_is_closed_during_a_call_opens_no_channel(
    scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    begun, closed = threading.Event(), threading.Event()
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse()

    def slowly(find: Callable[[], Any]) -> Any:
        begun.set()
        assert closed.wait(TIMEOUT_S)
        return find()

    async def main() -> None:
        client = AsyncClient(scripted.address)
        caller = client._connection._caller
        for _ in range(calls):
            await client.workers()
        before = len(caller._channels)
        name = "_token" if calls else "_find"
        monkeypatch.setattr(caller, name, partial(slowly, getattr(caller, name)))
        call = asyncio.create_task(client.workers())
        await asyncio.to_thread(begun.wait, TIMEOUT_S)
        await client.close()
        closed.set()
        with pytest.raises(LeaseholdError, match="this client is closed: make another one"):
            await call
        assert len(caller._channels) == before

    asyncio.run(main())


def test_a_watch_whose_client_is_closed_is_told_so(scripted: ScriptedCoordinator) -> None:
    """It looked as if somebody had cancelled its task."""
    ended = threading.Event()

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[fleet_service_pb2.WatchFleetResponse]:
        yield fleet_service_pb2.WatchFleetResponse()
        ended.wait(TIMEOUT_S)

    async def main() -> None:
        client, begun = AsyncClient(scripted.address), asyncio.Event()

        async def follow() -> None:
            async for _ in client.watch_fleet():
                begun.set()

        following = asyncio.create_task(follow())
        await asyncio.wait_for(begun.wait(), TIMEOUT_S)
        await client.close()
        with pytest.raises(LeaseholdError, match="this client is closed: make another one"):
            await following
        ended.set()

    scripted.answers["WatchFleet"] = watch
    asyncio.run(main())


def test_calls_of_one_client_run_at_once(scripted: ScriptedCoordinator) -> None:
    both = threading.Barrier(2)

    def meet(request: Any, context: grpc.ServicerContext) -> fleet_service_pb2.ListWorkersResponse:
        both.wait(TIMEOUT_S)
        return fleet_service_pb2.ListWorkersResponse(workers=[worker_pb2.Worker(name="alpha")])

    scripted.answers["ListWorkers"] = meet

    async def main() -> list[list[str]]:
        async with AsyncClient(scripted.address) as client:
            found = await asyncio.gather(client.workers(), client.workers())
            return [[worker.name for worker in workers] for workers in found]

    assert asyncio.run(main()) == [["alpha"], ["alpha"]]


def test_a_suspend_is_waited_for(scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(PENDING, 1), command(RUNNING, 2), command(SUCCEEDED, 3))

    async def main() -> Command:
        async with AsyncClient(scripted.address) as client:
            return await client.wait(await client.suspend("one"), timeout_s=TIMEOUT_S)

    assert asyncio.run(main()).state == SUCCEEDED


def test_a_timeout_that_grpc_cannot_take_is_refused(scripted: ScriptedCoordinator) -> None:
    async def main() -> None:
        async with AsyncClient(scripted.address) as client:
            with pytest.raises(UsageError, match="inf is not a time in seconds"):
                await client.wait(command(PENDING), timeout_s=float("inf"))

    asyncio.run(main())
    assert not scripted.requests


def test_a_command_that_fails_raises(scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(PENDING, 1), command(FAILED, 2))

    async def main() -> None:
        async with AsyncClient(scripted.address) as client:
            await client.wait(await client.suspend("one"))

    with pytest.raises(CommandFailedError, match="suspend FAILED"):
        asyncio.run(main())


def test_a_lost_answer_is_asked_for_again_by_the_same_id(scripted: ScriptedCoordinator) -> None:
    def lose_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        if len(scripted.requests) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return workload_service_pb2.CreateWorkloadResponse(command=command(PENDING))

    scripted.answers["CreateWorkload"] = lose_the_first

    async def main() -> None:
        async with AsyncClient(scripted.address) as client:
            await client.run(WorkloadSpec())

    asyncio.run(main())
    first, second = scripted.asked(workload_service_pb2.CreateWorkloadRequest)
    assert first == second
    assert first.request_id


def test_a_refusal_has_its_reason_and_no_traceback_of_grpc(scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKLOAD", "no workload is named 'one'"
    )

    async def main() -> None:
        async with AsyncClient(scripted.address) as client:
            await client.suspend("one")

    with pytest.raises(LeaseholdError, match="no workload is named 'one'") as caught:
        asyncio.run(main())
    assert (caught.value.reason, caught.value.metadata) == ("UNKNOWN_WORKLOAD", {"field": "x"})
    assert caught.value.__suppress_context__
    assert len(scripted.requests) == 1


@pytest.mark.usefixtures("short_outages")
def test_a_coordinator_that_is_away_is_an_error_with_a_remedy() -> None:
    async def main() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await client.suspend("one")

    with pytest.raises(NoCoordinatorError, match="start one with `leasehold coordinator`") as away:
        asyncio.run(main())
    assert not away.value.is_sent


def test_a_watch_resumes_after_its_last_response(scripted: ScriptedCoordinator) -> None:
    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[event_service_pb2.WatchEventsResponse]:
        token = "2" if request.resume_token else "1"
        yield event_service_pb2.WatchEventsResponse(bookmark=watch_pb2.Bookmark(), resume_token=token)
        if token == "1":
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    scripted.answers["WatchEvents"] = watch

    async def main() -> list[str]:
        async with AsyncClient(scripted.address) as client, aclosing(client.watch_events()) as responses:
            return [response.resume_token async for response in responses]

    assert asyncio.run(main()) == ["1", "2"]
    assert [request.resume_token for request in scripted.requests] == ["", "1"]  # type: ignore[attr-defined]


def test_a_watch_that_is_left_or_cancelled_ends_its_call(scripted: ScriptedCoordinator) -> None:
    ended = threading.Semaphore(0)

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[fleet_service_pb2.WatchFleetResponse]:
        context.add_callback(ended.release)
        yield fleet_service_pb2.WatchFleetResponse(bookmark=watch_pb2.Bookmark())
        while context.is_active():
            time.sleep(0.01)

    scripted.answers["WatchFleet"] = watch

    async def main() -> tuple[bool, bool]:
        async with AsyncClient(scripted.address) as client:
            async with aclosing(client.watch_fleet()) as responses:
                async for _ in responses:
                    break
            left = await asyncio.to_thread(ended.acquire, timeout=TIMEOUT_S)

            began = asyncio.Event()

            async def follow() -> None:
                async for _ in client.watch_fleet():
                    began.set()

            task = asyncio.create_task(follow())
            await began.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return left, await asyncio.to_thread(ended.acquire, timeout=TIMEOUT_S)

    assert asyncio.run(main()) == (True, True)


def test_output_goes_on_where_it_broke(scripted: ScriptedCoordinator) -> None:
    def read(
        request: Any, context: grpc.ServicerContext
    ) -> Iterator[workload_service_pb2.ReadWorkloadOutputResponse]:
        end = min(request.offset + 2, 5)
        data = b"12345"[request.offset : end]
        yield workload_service_pb2.ReadWorkloadOutputResponse(data=data, next_offset=end)
        if end < 5:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    scripted.answers["ReadWorkloadOutput"] = read

    async def main() -> bytes:
        async with AsyncClient(scripted.address) as client:
            return b"".join([data async for data in client.output("one")])

    assert asyncio.run(main()) == b"12345"


def test_a_service_calls_on_behalf_of_a_user(scripted: ScriptedCoordinator) -> None:
    sent: list[dict[str, Any]] = []

    def listed(request: Any, context: grpc.ServicerContext) -> fleet_service_pb2.ListWorkersResponse:
        sent.append(dict(context.invocation_metadata()))
        return fleet_service_pb2.ListWorkersResponse()

    scripted.answers["ListWorkers"] = listed

    async def main() -> None:
        async with AsyncClient(scripted.address, on_behalf_of="user/alice") as client:
            await client.workers()

    asyncio.run(main())
    assert sent[0]["leasehold-on-behalf-of"] == "user/alice"
    assert sent[0]["authorization"].startswith("Bearer ")


@pytest.fixture
def renewals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Renewals]:
    """A coordinator that renews, and the current context of a user whose certificate is not due yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with serving_renewals(tmp_path) as coordinator:
        holder = coordinator.issue("user/alice")
        begin_s = time.time()
        context = Context(
            "alice",
            "user/alice",
            coordinator=coordinator.address,
            key=holder.key.decode(),
            certificate=holder.chain.decode(),
            authorities=holder.roots.decode(),
            expire_s=begin_s + 10_000,
            renew_s=begin_s + 5_000,
        )
        with locked_contexts() as write:
            write(Contexts("alice", {"alice": context}))
        yield coordinator


def make_due(client: AsyncClient) -> tuple[RenewedContext, Context]:
    """Makes the renewal of a client due. Returns what renews, and the old context."""
    with locked_contexts() as write:
        due = replace(read_contexts().get("alice"), renew_s=time.time() - 1)
        write(read_contexts().put(due))
    renewed = client._connection._caller._context
    assert renewed is not None
    renewed._context = due
    return renewed, due


def test_a_context_renews_its_certificate(renewals: Renewals, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient() as client:
            await client.workers()
            make_due(client)
            await client.workers()
            await client.workers()

    asyncio.run(main())
    first, second, third = renewals.callers
    assert first != second == third
    assert config_path().parent.is_relative_to(tmp_path)


def test_a_watch_without_changes_renews_its_certificate_in_time(renewals: Renewals) -> None:
    with locked_contexts() as write:
        due = replace(read_contexts().get("alice"), expire_s=time.time() + 2.5, renew_s=time.time() + 0.5)
        write(read_contexts().put(due))

    async def main() -> None:
        async with AsyncClient() as client, aclosing(client.watch_fleet()) as watch:
            await anext(watch)
            assert renewals.keys == []
            await anext(watch)

    asyncio.run(main())
    first, second = renewals.callers
    assert first != second
    assert len(renewals.keys) == 1


def test_a_watch_takes_over_a_certificate_of_another_process(renewals: Renewals) -> None:
    async def main() -> None:
        async with AsyncClient() as client, aclosing(client.watch_fleet()) as watch:
            await anext(watch)
            login.renew("alice", read_contexts().get("alice").certificate)
            renewals.watch_end.set()
            await anext(watch)
            renewals.watch_end.set()
            with pytest.raises(LeaseholdError, match="the certificate expired"):
                await anext(watch)

    asyncio.run(main())
    first, second = renewals.callers
    assert first != second


def test_a_call_that_is_cancelled_during_a_renewal_leaves_the_new_certificate(
    renewals: Renewals, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    renew = login.renew

    def renew_slowly(name: str, certificate: str) -> Context:
        began.set()
        assert go_on.wait(TIMEOUT_S)
        return renew(name, certificate)

    async def main() -> None:
        async with AsyncClient() as client:
            await client.workers()
            monkeypatch.setattr(login, "renew", renew_slowly)
            renewed, due = make_due(client)
            call = asyncio.create_task(client.workers())
            assert await asyncio.to_thread(began.wait, TIMEOUT_S)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            go_on.set()
            async with asyncio.timeout(TIMEOUT_S):
                while renewed._context is due:  # noqa: ASYNC110 - a thread of the client changes it
                    await asyncio.sleep(0.02)
            await client.workers()
            await client.workers()

    asyncio.run(main())
    first, second, third = renewals.callers
    assert first != second == third
    assert len(renewals.keys) == 1


def test_a_first_call_that_fails_leaves_the_context_in_use(renewals: Renewals) -> None:
    def change(begin_s: float) -> None:
        with locked_contexts() as write:
            write(read_contexts().put(replace(read_contexts().get("alice"), begin_s=begin_s)))

    async def main() -> None:
        async with AsyncClient() as client:
            change(time.time() + 7_200)
            with pytest.raises(UsageError, match="the clock is behind"):
                await client.workers()
            change(0)
            await client.workers()

    asyncio.run(main())
    assert len(renewals.callers) == 1
