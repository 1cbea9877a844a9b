"""Readers of output share their worker's link, and take nothing from others when they have gone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.v1.workload_service_pb2 import ReadWorkloadOutputRequest, ReadWorkloadOutputResponse
from leasehold.worker.v1.session_pb2 import OutputChunk, PlanAnswer, PlanQuery, ReadOutput
from leasehold_coordinator.commands.output import ROUND_S, read_output
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.session import FOLLOW_PLACES
from leasehold_coordinator.fleet.worker_queries import UnansweredError, WorkerQueries

from tests.coordinator.api.test_command_service import refusal, start
from tests.coordinator.bench import Bench, on_bench, workload
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

RUNNING = workload(workload_pb2.WORKLOAD_STATE_RUNNING, 1)


def reads(bench: Bench) -> list[ReadOutput]:
    return [frame.read_output for frame in bench.sent() if frame.HasField("read_output")]


async def first(output: AsyncIterator[ReadWorkloadOutputResponse]) -> bytes:
    return (await anext(output)).data


def follow(bench: Bench, count: int) -> list[asyncio.Task[bytes]]:
    return [
        asyncio.create_task(first(read_output(bench.fleet.reader, RUNNING, 0, follow=True)))
        for _ in range(count)
    ]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_many_followers_hold_up_neither_readers_nor_plans(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        followers = follow(bench, 400)
        await settled()
        sent = reads(bench)
        assert len(sent) == FOLLOW_PLACES
        assert sum(one.limit_bytes for one in sent) <= 65_536
        bench.session.answer_read(OutputChunk(read_id=sent[0].read_id))
        await settled()
        (turn,) = reads(bench)
        assert turn.wait.ToTimedelta().total_seconds() <= ROUND_S, "others have their turn soon"
        reader = asyncio.create_task(first(read_output(bench.fleet.reader, RUNNING, 0, follow=False)))
        planner = asyncio.create_task(bench.session.plan(PlanQuery(), 5))
        await settled()
        frames = bench.sent()
        (read,) = [frame.read_output for frame in frames if frame.HasField("read_output")]
        (query,) = [frame.plan_query for frame in frames if frame.HasField("plan_query")]
        bench.session.answer_read(OutputChunk(read_id=read.read_id, data=b"all", end=True))
        bench.session.answer_plan(PlanAnswer(plan_id=query.plan_id))
        assert await reader == b"all"
        await planner
        for one in followers:
            one.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        assert not bench.fleet.reader.output_readers
        for request in [*sent, turn]:
            bench.session.answer_read(OutputChunk(read_id=request.read_id))
        await settled()
        assert reads(bench) == [], "whoever has gone is asked for no more"

    on_bench(tmp_path, scenario)


def test_a_single_follower_waits_long_and_reads_much(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        (follower,) = follow(bench, 1)
        await settled()
        (sent,) = reads(bench)
        assert (sent.limit_bytes, sent.wait.seconds) == (16_384, 10)
        bench.session.answer_read(OutputChunk(read_id=sent.read_id, data=b"x"))
        assert await follower == b"x"

    on_bench(tmp_path, scenario)


def test_a_question_that_was_sent_keeps_its_place_until_the_peer_is_done() -> None:
    async def scenario() -> None:
        questions: WorkerQueries[str] = WorkerQueries(1, 1)
        sent: list[str] = []
        asker = asyncio.create_task(questions.ask(sent.append, 5, ""))
        await settled()
        asker.cancel()
        waiting = asyncio.create_task(questions.ask(sent.append, 5, ""))
        await settled()
        assert len(sent) == 1, "the peer is still at the first"
        with pytest.raises(UnansweredError):
            await questions.ask(sent.append, 0.01, "")
        questions.answer(sent[0], "late")
        await settled()
        questions.answer(sent[1], "yes")
        assert await waiting == "yes"
        last = asyncio.create_task(questions.ask(sent.append, 5, ""))
        behind = asyncio.create_task(questions.ask(sent.append, 5, ""))
        await settled()
        questions.end()
        results = await asyncio.gather(last, behind, return_exceptions=True)
        assert [isinstance(one, UnansweredError) and one.ended for one in results] == [True, True]

    asyncio.run(scenario())


def test_the_questions_of_one_caller_leave_places_to_others() -> None:
    async def scenario() -> None:
        questions: WorkerQueries[str] = WorkerQueries(4, 2)
        sent: list[str] = []
        flood = [asyncio.create_task(questions.ask(sent.append, 60, "user/mallory")) for _ in range(50)]
        await settled()
        assert len(sent) == 2
        other = asyncio.create_task(questions.ask(sent.append, 60, "user/alice"))
        await settled()
        questions.answer(sent[2], "yes")
        assert await other == "yes"
        flood[10].cancel()
        while not all(one.done() for one in flood):
            for question_id in sent:
                questions.answer(question_id, "yes")
            await settled()
        assert len(sent) == 1 + 49

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (
            WorkloadStatus(
                state=workload_pb2.WORKLOAD_STATE_FAILED,
                end_time=Timestamp(seconds=1),
                error=errors_pb2.Error(message="'x' could not be started: No such file"),
            ),
            "the program was never started: 'x' could not be started: No such file",
        ),
        (
            WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_PENDING),
            "the program has not started yet: read the output once it has",
        ),
    ],
)
def test_a_program_that_was_never_started_has_no_output(
    tmp_path: Path, status: WorkloadStatus, why: str
) -> None:
    async def scenario(bench: Bench) -> None:
        asked = Workload(workload_id="w-1", name="one", worker_id="worker-alpha", status=status)
        reader = asyncio.create_task(first(read_output(bench.fleet.reader, asked, 0, follow=False)))
        await settled()
        (sent,) = reads(bench)
        unknown = errors_pb2.Error(reason=errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD, message="no workload w-1")
        bench.session.answer_read(OutputChunk(read_id=sent.read_id, error=unknown))
        with pytest.raises(FleetError) as refused:
            await reader
        assert refused.value.reason == errors_pb2.ERROR_REASON_WRONG_STATE
        assert refused.value.message == f"one has no output, because {why}"

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("offset", [-(2**62), 2**62, 2**63 - 1])
def test_an_offset_that_no_file_has(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, offset: int
) -> None:
    start(coordinator, worker)
    request = ReadWorkloadOutputRequest(workload="one", offset=offset)
    assert refusal(lambda: list(coordinator.workloads.ReadWorkloadOutput(request)))[1] == "INVALID_ARGUMENT"
    assert not any(frame.HasField("read_output") for frame in worker.frames)


def test_a_program_that_was_never_started_has_no_output_on_a_worker_out_of_contact(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        del bench.fleet.sessions["worker-alpha"]
        state = workload_pb2.WORKLOAD_STATE_FAILED
        status = WorkloadStatus(state=state, end_time=Timestamp(seconds=1))
        asked = Workload(workload_id="w-1", name="one", worker_id="worker-alpha", status=status)
        with pytest.raises(FleetError, match="one has no output, because the program was never started"):
            await first(read_output(bench.fleet.reader, asked, 0, follow=False))
        status.start_time.seconds = 1
        bench.fleet.registry.add_stored(make_hello(), epoch=1)
        for worker_id, why in (
            ("worker-alpha", "out of contact: read its output once it is connected"),
            ("worker-gone", "the worker of one was deleted, and has its output: read the output once"),
        ):
            asked = Workload(workload_id="w-1", name="one", worker_id=worker_id, status=status)
            with pytest.raises(FleetError, match=why):
                await first(read_output(bench.fleet.reader, asked, 0, follow=False))

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize(("minor", "asked"), [(8, 0), (9, -5)])
def test_an_older_worker_is_asked_from_the_begin(tmp_path: Path, minor: int, asked: int) -> None:
    async def scenario(bench: Bench) -> None:
        bench.session.hello.protocol_version.minor = minor
        reader = asyncio.create_task(first(read_output(bench.fleet.reader, RUNNING, -5, follow=False)))
        await settled()
        (read,) = reads(bench)
        assert read.offset == asked
        bench.session.answer_read(OutputChunk(read_id=read.read_id, data=b"123"))  # without its offset
        if minor == 8:
            assert await reader == b"123"
        else:
            with pytest.raises(FleetError, match="sent output of the impossible offset -5"):
                await reader

    on_bench(tmp_path, scenario)
