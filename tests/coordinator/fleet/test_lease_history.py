"""The history of leases: spans begin, end and continue with the reports of the workers, over restarts too."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1 import errors_pb2, lease_pb2, workload_pb2
from leasehold.v1.event_service_pb2 import ListLeaseHistoryRequest
from leasehold.v1.lease_pb2 import GpuLease, LeaseSpan, SlotState
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.worker.v1.session_pb2 import Hello, WorkerLoad
from leasehold_coordinator.api.event_service import EventService
from leasehold_coordinator.core.known_worker import KnownWorker, SessionId
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import parked_spans, span_queue
from leasehold_coordinator.fleet.retention import prune
from leasehold_coordinator.storage.rows import lease_span_row, workload_row
from leasehold_coordinator.timestamps import timestamp

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.scripted_worker import make_hello

Story = Callable[[Bench], Awaitable[None]]
S = 10**9


def leased(slot: int, workload_id: str, since_ns: int = 0, lease_id: str = "") -> GpuLease:
    return GpuLease(
        gpu_uuid=f"GPU-alpha-{slot}",
        slot=slot,
        state=lease_pb2.SLOT_STATE_LEASED,
        workload_id=workload_id,
        lease_id=lease_id or f"l-{workload_id}",
        since=timestamp(since_ns) if since_ns else None,
    )


def hello(*leases: GpuLease) -> Hello:
    found = make_hello()
    for lease in leases:
        found.gpu_leases[lease.slot].CopyFrom(lease)
    return found


async def load(bench: Bench, *workloads: Workload) -> None:
    """Loads the history as a start of the coordinator does, whose store has the worker and workloads."""
    bench.fleet.registry.add_stored(make_hello(), 0, left=False)
    for workload in workloads:
        bench.fleet.workloads[workload.workload_id] = workload
    await bench.fleet._load_lease_history()


def connect(bench: Bench, session: str, *leases: GpuLease) -> KnownWorker:
    known = bench.fleet.registry.welcome(
        hello(*leases), 1, SessionId(session), time.monotonic(), time.time_ns()
    )
    bench.fleet.worker_news.publish(known)
    return known


def report(bench: Bench, known: KnownWorker, *leases: GpuLease) -> None:
    load = WorkerLoad(sequence=known.load_sequence + 1, gpu_leases=hello(*leases).gpu_leases)
    bench.fleet.registry.apply_load(known, load)
    bench.fleet.worker_news.publish(known)


async def spans(bench: Bench, **fields: Any) -> list[LeaseSpan]:
    service = EventService(bench.fleet.reader, bench.fleet.events, bench.fleet.lease_history)
    found: list[LeaseSpan] = []
    token = ""
    while True:
        request = ListLeaseHistoryRequest(page_size=2, page_token=token, **fields)
        page = await service.ListLeaseHistory(request, None)  # type: ignore[arg-type]  # not used
        found += page.spans
        if not (token := page.next_page_token):
            return found


def is_open(span: LeaseSpan) -> bool:
    return not span.HasField("end_time")


def test_a_span_begins_and_ends_with_its_lease(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING)
        bench.fleet.workloads["w-1"] = Workload(
            workload_id="w-1", name="train", worker_id="worker-alpha", owner="user/ann", status=status
        )
        before_ns = time.time_ns()
        known = connect(bench, "s-1")
        assert await spans(bench) == []
        report(bench, known, leased(0, "w-1"))
        (span,) = await spans(bench)
        assert (span.gpu_uuid, span.worker_name, span.workload_name) == ("GPU-alpha-0", "alpha", "train")
        assert (span.state, span.owner) == (lease_pb2.SLOT_STATE_LEASED, "user/ann")
        assert is_open(span)
        report(bench, known, leased(0, "w-1"))  # nothing has changed
        report(bench, known, leased(1, "w-1"))  # moved
        first, second = await spans(bench)  # what has not ended comes first
        assert (first.slot, is_open(first), second.slot, is_open(second)) == (1, True, 0, False)
        assert before_ns < second.begin_time.ToNanoseconds() < second.end_time.ToNanoseconds()
        assert second.end_time == first.begin_time

    on_bench(tmp_path, story)


def make_workload(status: WorkloadStatus) -> Workload:
    return Workload(
        workload_id="w-1", name="train", worker_id="worker-alpha", owner="user/ann", status=status
    )


def parked_on(slot: int, park_ns: int) -> Workload:
    """The workload w-1, which is parked, and was on a slot before."""
    status = WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_SUSPENDED, park_time=timestamp(park_ns))
    status.parked_gpu_uuids.append(f"GPU-alpha-{slot}")
    return make_workload(status)


def become(
    bench: Bench, state: str, *parked: int, lease: bool = False, time_ns: int = 0, was_away: bool = False
) -> None:
    """Changes the workload w-1 as a report does. It keeps its park time while it is parked on the same GPUs.

    Args:
        bench: The fleet.
        state: The state.
        parked: The slots of its former GPUs. None: it is not parked.
        lease: Whether it has a lease.
        time_ns: When it was parked, or has ended. 0: now.
        was_away: Whether the change happened while the worker was away.
    """
    before = bench.fleet.workloads.get("w-1", Workload()).status
    status = WorkloadStatus(state=workload_pb2.WorkloadState.Value(f"WORKLOAD_STATE_{state}"))
    status.parked_gpu_uuids.extend(f"GPU-alpha-{slot}" for slot in parked)
    if parked or is_ended(status.state):
        field = status.park_time if parked else status.end_time
        field.CopyFrom(timestamp(time_ns or time.time_ns()))
    if parked and not time_ns and before.parked_gpu_uuids == status.parked_gpu_uuids:
        status.park_time.CopyFrom(before.park_time)
    if lease:
        status.lease.workload_id = "w-1"
    bench.fleet.workloads.pop("w-1", None)
    workload = make_workload(status)
    if not is_ended(status.state):
        bench.fleet.workloads["w-1"] = workload
    bench.fleet.lease_history.note_workload(workload, was_away=was_away)


async def told(bench: Bench) -> list[str]:
    """The leases and parked times in the order of their begin, with the slot, and whether they go on."""
    used = [one for one in await spans(bench) if one.state != lease_pb2.SLOT_STATE_RESERVED]
    found = sorted(used, key=lambda one: one.begin_time.ToNanoseconds())
    for before, after in itertools.pairwise(found):
        assert not is_open(before)
        assert before.end_time.ToNanoseconds() <= after.begin_time.ToNanoseconds()
    states = ["PARKED" if one.parked else SlotState.Name(one.state)[len("SLOT_STATE_") :] for one in found]
    ends = ["…" if is_open(one) else "" for one in found]
    return [f"{state} {one.slot}{end}" for state, one, end in zip(states, found, ends, strict=True)]


def test_a_parked_workload_has_spans_between_its_leases(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        known = connect(bench, "s-1", leased(0, "w-1"))
        become(bench, "SUSPENDING", lease=True)
        report(bench, known)
        assert await told(bench) == ["LEASED 0"]
        become(bench, "SUSPENDED", 0)
        assert await told(bench) == ["LEASED 0", "PARKED 0…"]
        (parked,) = [one for one in await spans(bench) if one.parked]
        assert (parked.workload_name, parked.owner, parked.worker_name) == ("train", "user/ann", "alpha")
        assert parked.state == lease_pb2.SLOT_STATE_UNSPECIFIED
        become(bench, "RESTORING", 0)
        reserved = leased(1, "w-1")
        reserved.state = lease_pb2.SLOT_STATE_RESERVED
        report(bench, known, reserved)
        report(bench, known, leased(1, "w-1"))
        become(bench, "RESTORING", 0)  # it was stored late
        become(bench, "RUNNING", lease=True)
        assert await told(bench) == ["LEASED 0", "PARKED 0", "LEASED 1…"]
        # The GPUs are reported after the workload.
        become(bench, "SUSPENDED", 1)
        report(bench, known)
        assert (await told(bench))[-2:] == ["LEASED 1", "PARKED 1…"]
        become(bench, "RUNNING", lease=True)
        assert (await told(bench))[-1] == "PARKED 1…"
        report(bench, known, leased(0, "w-1"))
        assert (await told(bench))[-2:] == ["PARKED 1", "LEASED 0…"]
        become(bench, "SUSPENDED", 0)
        report(bench, known)
        become(bench, "EXITED")
        assert (await told(bench))[-1] == "PARKED 0"

    on_bench(tmp_path, story)


PARK_NS = time.time_ns() - 60 * S


async def park(bench: Bench) -> None:
    """Suspends a workload, and stores its history."""
    known = connect(bench, "s-1", leased(0, "w-1"))
    report(bench, known)
    become(bench, "SUSPENDED", 0, time_ns=PARK_NS)
    await bench.fleet.lease_history.flush()


def test_a_parked_time_goes_on_over_a_restart_and_ends_when_the_worker_says(tmp_path: Path) -> None:
    async def away(bench: Bench) -> None:
        await load(bench, parked_on(0, PARK_NS))
        assert await told(bench) == ["LEASED 0", "PARKED 0…"]
        restored_ns = time.time_ns()
        become(bench, "RUNNING", lease=True)
        connect(bench, "s-2", leased(1, "w-1", since_ns=restored_ns))
        assert await told(bench) == ["LEASED 0", "PARKED 0", "LEASED 1…"]
        (parked,) = [one for one in await spans(bench) if one.parked]
        assert parked.end_time.ToNanoseconds() == restored_ns

    on_bench(tmp_path, park)
    on_bench(tmp_path, away)


def test_a_parked_time_whose_workload_or_worker_is_gone_has_ended(tmp_path: Path) -> None:
    async def after(bench: Bench) -> None:
        await load(bench)  # the workload has ended
        assert await told(bench) == ["LEASED 0", "PARKED 0"]
        known = connect(bench, "s-2")
        become(bench, "SUSPENDED", 1)
        assert (await told(bench))[-1] == "PARKED 1…"
        bench.fleet.registry.disconnect(known, SessionId("s-2"), left=True)
        bench.fleet.worker_news.publish_deleted(known)
        assert (await told(bench))[-1] == "PARKED 1"

    on_bench(tmp_path, park)
    on_bench(tmp_path, after)


def test_a_parked_workload_with_several_gpus_has_a_span_for_each(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        known = connect(bench, "s-1", leased(0, "w-1"), leased(1, "w-1"))
        report(bench, known)
        become(bench, "SUSPENDED", 0, 1)
        assert sorted(one.slot for one in await spans(bench, parked=True)) == [0, 1]
        assert {one.parked for one in await spans(bench, parked=False)} == {False}
        assert len(await spans(bench)) == 4
        report(bench, known, leased(0, "w-1"), leased(1, "w-1"))
        assert not any(map(is_open, await spans(bench, parked=True)))

    on_bench(tmp_path, story)


def test_what_happened_to_a_parked_workload_out_of_contact_has_the_times_of_its_worker(
    tmp_path: Path,
) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        connect(bench, "s-1")
        become(bench, "SUSPENDED", 0)
        for slot in (1, 1):  # restored and parked again, first elsewhere and then on the same GPU
            become(bench, "SUSPENDED", slot, time_ns=(moved_ns := time.time_ns()), was_away=True)
            second, first = (await spans(bench))[:2]
            assert (second.slot, is_open(second), is_open(first)) == (slot, True, False)
            assert second.begin_time.ToNanoseconds() == first.end_time.ToNanoseconds() == moved_ns
        ended_ns = time.time_ns()
        become(bench, "EXITED", time_ns=ended_ns, was_away=True)
        assert (await spans(bench))[0].end_time.ToNanoseconds() == ended_ns
        become(bench, "SUSPENDED", 0)
        become(bench, "EXITED", time_ns=time.time_ns() + 3600 * S, was_away=True)
        assert (await spans(bench))[0].end_time.ToNanoseconds() <= time.time_ns()

    on_bench(tmp_path, story)


def test_a_workload_that_was_presumed_dead_is_parked_since_the_end_of_its_last_span(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        connect(bench, "s-1")
        await bench.fleet.save_workloads([parked_on(0, PARK_NS)], was_away=True)
        over = parked_on(0, PARK_NS)
        over.status.state = workload_pb2.WORKLOAD_STATE_FAILED
        await bench.fleet.save_workloads([over])
        await bench.fleet.save_workloads([parked_on(0, PARK_NS)], was_away=True)
        assert await told(bench) == ["PARKED 0", "PARKED 0…"]

    on_bench(tmp_path, story)


def test_a_slow_clock_of_a_worker_begins_no_parked_time_within_the_lease(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        known = connect(bench, "s-1", leased(0, "w-1"))
        report(bench, known)
        await bench.fleet.save_workloads([parked_on(0, PARK_NS)], was_away=True)
        assert await told(bench) == ["LEASED 0", "PARKED 0…"]

    on_bench(tmp_path, story)


def test_a_suspend_while_the_worker_was_away_ends_the_lease_when_the_worker_says(tmp_path: Path) -> None:
    """Another workload has the GPU since a later time."""

    async def story(bench: Bench) -> None:
        await load(bench)
        known = connect(bench, "s-1", leased(0, "w-1"))
        bench.fleet.registry.disconnect(known, SessionId("s-1"), left=False)
        bench.fleet.worker_news.publish(known)
        park_ns = time.time_ns()
        await bench.fleet.save_workloads([parked_on(0, park_ns)], was_away=True)
        connect(bench, "s-2", leased(0, "w-2", since_ns=time.time_ns()))
        first, parked, second = sorted(await spans(bench), key=lambda one: one.span_id[2:])
        assert (first.workload_id, parked.parked, second.workload_id) == ("w-1", True, "w-2")
        assert first.end_time.ToNanoseconds() == parked.begin_time.ToNanoseconds() == park_ns
        assert second.begin_time.ToNanoseconds() > park_ns

    on_bench(tmp_path, story)


def test_a_result_right_before_the_end_of_a_session_has_the_time_of_the_coordinator(tmp_path: Path) -> None:
    """The lease entry that a result changes has the begin of the state before."""

    async def story(bench: Bench) -> None:
        await load(bench)
        before_ns = time.time_ns()
        known = connect(bench, "s-1", leased(0, "w-1", since_ns=PARK_NS))
        (lease,) = [one for one in known.leases if one.state == lease_pb2.SLOT_STATE_LEASED]
        lease.state = lease_pb2.SLOT_STATE_FREE  # as apply_result does, which publishes nothing
        bench.fleet.registry.disconnect(known, SessionId("s-1"), left=False)
        bench.fleet.worker_news.publish(known)
        (span,) = await spans(bench)
        assert span.end_time.ToNanoseconds() >= before_ns

    on_bench(tmp_path, story)


def test_a_slow_clock_of_a_worker_shortens_no_parked_time_within_a_session(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        connect(bench, "s-1")
        hour_ago_ns = time.time_ns() - 3600 * S
        become(bench, "SUSPENDED", 0, time_ns=hour_ago_ns)
        become(bench, "EXITED", time_ns=hour_ago_ns)
        (span,) = await spans(bench)
        assert hour_ago_ns + 3000 * S < span.begin_time.ToNanoseconds()
        assert span.end_time.ToNanoseconds() > span.begin_time.ToNanoseconds()

    on_bench(tmp_path, story)


def test_parked_spans_are_bounded_by_gpus_and_begin_later_if_they_were_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monotonic, ahead_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead_s)

    async def story(bench: Bench) -> None:
        nonlocal ahead_s
        await load(bench)
        bench.fleet.lease_history._queue._bounds._burst = 10
        connect(bench, "s-1")
        for _ in range(20):
            become(bench, "SUSPENDED", 0, 1)
            become(bench, "RUNNING")
        assert len(await spans(bench, parked=True)) == 10
        parked_ns = time.time_ns()
        become(bench, "SUSPENDED", 0, 1, time_ns=parked_ns)
        assert len(await spans(bench, parked=True)) == 10
        ahead_s += 60
        bench.fleet.worker_news.note_left_out_leases()
        found = [one for one in await spans(bench, parked=True) if is_open(one)]
        assert [one.begin_time.ToNanoseconds() for one in found] == [parked_ns] * 2

    on_bench(tmp_path, story)


def test_a_deleted_worker_that_returns_has_no_overlapping_spans(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        since_ns = time.time_ns()
        known = connect(bench, "s-1", leased(1, "w-2", since_ns=since_ns))
        become(bench, "SUSPENDED", 0, time_ns=since_ns)
        bench.fleet.registry.disconnect(known, SessionId("s-1"), left=True)
        bench.fleet.worker_news.publish_deleted(known)
        deleted_ns = (await spans(bench))[0].end_time.ToNanoseconds()
        become(bench, "SUSPENDED", 0, time_ns=since_ns, was_away=True)
        connect(bench, "s-2", leased(1, "w-2", since_ns=since_ns))
        again = [one for one in await spans(bench) if is_open(one)]
        assert {one.parked for one in again} == {False, True}
        assert all(one.begin_time.ToNanoseconds() >= deleted_ns for one in again)
        bench.fleet.registry.disconnect(known, SessionId("s-2"), left=True)
        bench.fleet.worker_news.publish_deleted(known)
        await bench.fleet.lease_history.flush()

    async def after_a_restart(bench: Bench) -> None:
        await bench.fleet._load_lease_history()
        latest_ns = max(one.end_time.ToNanoseconds() for one in await spans(bench))
        connect(bench, "s-3", leased(1, "w-2", since_ns=S))
        (again,) = [one for one in await spans(bench) if is_open(one)]
        assert again.begin_time.ToNanoseconds() >= latest_ns

    on_bench(tmp_path, story)
    on_bench(tmp_path, after_a_restart)


def test_a_crash_after_the_deletion_of_a_worker_leaves_no_open_span(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        connect(bench, "s-1", leased(0, "w-2"))
        become(bench, "SUSPENDED", 1)
        await bench.fleet.lease_history.flush()

    async def without_the_worker(bench: Bench) -> None:
        await bench.fleet._load_lease_history()
        found = await spans(bench)
        assert len(found) == 2
        assert not any(map(is_open, found))

    on_bench(tmp_path, story)
    on_bench(tmp_path, without_the_worker)


def test_a_parked_time_that_ended_right_before_a_crash_has_the_end_of_its_workload(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        ended_ns = time.time_ns()
        over = parked_on(0, PARK_NS)
        over.status.state = workload_pb2.WORKLOAD_STATE_EXITED
        over.status.end_time.CopyFrom(timestamp(ended_ns))
        await bench.store.write(workload_row(over))
        await load(bench)
        (span,) = await spans(bench, parked=True)
        assert span.end_time.ToNanoseconds() == ended_ns

    on_bench(tmp_path, park)
    on_bench(tmp_path, story)


def test_a_write_that_takes_long_or_fails_loses_no_parked_time(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        known = connect(bench, "s-1", leased(0, "w-1"))
        running = make_workload(WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING))
        running.status.lease.workload_id = "w-1"
        await bench.fleet.save_workloads([running])
        held, write = asyncio.Event(), bench.store.write

        async def late(*rows: Any) -> None:
            await held.wait()
            await write(*rows)

        bench.store.write = late  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            for slot in (0, 1):
                report(bench, known)
                group.create_task(bench.fleet.save_workloads([parked_on(slot, time.time_ns())]))
                await asyncio.sleep(0)
                group.create_task(bench.fleet.save_workloads([running]))
                await asyncio.sleep(0)
                report(bench, known, leased(1 - slot, "w-1"))
            held.set()
        bench.store.write = write  # type: ignore[method-assign]
        assert await told(bench) == ["LEASED 0", "PARKED 0", "LEASED 1", "PARKED 1", "LEASED 0…"]
        report(bench, known)
        await bench.fleet.save_workloads([parked_on(0, PARK_NS)])
        over = parked_on(0, PARK_NS)
        over.status.state = workload_pb2.WORKLOAD_STATE_FAILED
        bench.store.write = refuse  # type: ignore[method-assign]
        with pytest.raises(FleetError):
            await bench.fleet.save_workloads([over])
        bench.store.write = write  # type: ignore[method-assign]
        assert (await told(bench))[-2:] == ["PARKED 0", "PARKED 0…"]
        bench.fleet.registry.disconnect(known, SessionId("s-1"), left=True)
        bench.fleet.sessions.clear()
        unknown = parked_on(1, PARK_NS)
        unknown.workload_id = "w-2"
        bench.store.write = refuse  # type: ignore[method-assign]
        with pytest.raises(FleetError, match="the disk is full"):
            await bench.fleet.delete_worker(known)
        with pytest.raises(FleetError):
            await bench.fleet.save_workloads([unknown])
        bench.store.write = write  # type: ignore[method-assign]
        (kept,) = [one for one in await spans(bench, parked=True) if is_open(one)]
        assert kept.workload_id == "w-1"

    on_bench(tmp_path, story)


async def refuse(*rows: Any) -> None:
    raise FleetError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "the disk is full")


def test_open_parked_spans_of_a_worker_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_spans, "OPEN_LIMIT", 1)

    async def story(bench: Bench) -> None:
        await load(bench)
        connect(bench, "s-1")
        other = parked_on(1, PARK_NS)
        other.workload_id = "w-2"
        await bench.fleet.save_workloads([parked_on(0, PARK_NS), other])
        bench.fleet.worker_news.note_left_out_leases()
        assert [one.slot for one in await spans(bench)] == [0]
        become(bench, "EXITED")
        bench.fleet.worker_news.note_left_out_leases()
        assert [one.slot for one in await spans(bench) if is_open(one)] == [1]
        assert bench.fleet.lease_history.take_left_out(9) == []

    on_bench(tmp_path, story)


def test_a_full_queue_delays_spans_and_loses_none_of_what_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        known = connect(bench, "s-1", leased(0, "w-2"), leased(1, "w-3"))
        await bench.fleet.lease_history.flush()
        monkeypatch.setattr(span_queue, "WAITING_LIMIT", 0)
        report(bench, known)
        become(bench, "SUSPENDED", 0)
        monkeypatch.undo()
        bench.fleet.worker_news.note_left_out_leases()
        assert [one.parked for one in await spans(bench) if is_open(one)] == [True]

    on_bench(tmp_path, story)


def test_a_gpu_that_another_worker_took_has_one_open_span(tmp_path: Path) -> None:
    """The worker that had the GPU has not reported since the start of the coordinator."""

    async def before(bench: Bench) -> None:
        connect(bench, "s-1", leased(0, "w-1"))
        await bench.fleet.lease_history.flush()

    async def after(bench: Bench) -> None:
        await load(bench)
        thief = make_hello("beta", worker_id="worker-beta")
        thief.gpus[0].uuid = thief.gpu_leases[0].gpu_uuid = "GPU-alpha-0"
        thief.gpu_leases[0].MergeFrom(leased(0, "w-2"))
        robbed = bench.fleet.registry.take_gpus(thief)
        known = bench.fleet.registry.welcome(thief, 1, SessionId("s-2"), time.monotonic(), time.time_ns())
        await bench.fleet.save_worker(thief, 1, robbed)
        bench.fleet.worker_news.publish(known)
        open_ones = [one for one in await spans(bench, gpu_uuid="GPU-alpha-0") if is_open(one)]
        assert [one.worker_id for one in open_ones] == ["worker-beta"]

    on_bench(tmp_path, before)
    on_bench(tmp_path, after)


@pytest.mark.parametrize("lost", ["workload", "end of the span", "end of the workload"])
def test_a_crash_between_a_workload_and_its_span_doubles_no_parked_time(tmp_path: Path, lost: str) -> None:
    async def before(bench: Bench) -> None:
        await park(bench)
        if lost == "end of the workload":
            become(bench, "EXITED")
            await bench.fleet.lease_history.flush()

    async def after(bench: Bench) -> None:
        record = parked_on(0, PARK_NS)
        if lost == "workload":  # it is stored as it was before the suspend
            record = make_workload(WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_RUNNING))
            record.status.lease.workload_id = "w-1"
        await load(bench, record)
        await bench.fleet.save_workloads([parked_on(0, PARK_NS)], was_away=True)
        again = ["PARKED 0", "PARKED 0…"] if lost == "end of the workload" else ["PARKED 0…"]
        assert await told(bench) == ["LEASED 0", *again]

    on_bench(tmp_path, before)
    on_bench(tmp_path, after)


def test_another_worker_changes_no_parked_time_of_a_workload_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        monkeypatch.setattr(parked_spans, "OPEN_LIMIT", 0)
        connect(bench, "s-1")
        await bench.fleet.save_workloads([parked_on(0, PARK_NS)])
        monkeypatch.setattr(parked_spans, "OPEN_LIMIT", 9)
        mallory = make_hello("mallory", worker_id="worker-mallory")
        mallory.gpu_leases[0].MergeFrom(leased(0, "w-1", since_ns=S))
        mallory.gpu_leases[0].gpu_uuid = mallory.gpus[0].uuid
        known = bench.fleet.registry.welcome(mallory, 1, SessionId("s-2"), time.monotonic(), time.time_ns())
        bench.fleet.worker_news.publish(known)
        assert await spans(bench, parked=True) == []

    on_bench(tmp_path, story)


def test_a_workload_id_that_another_worker_has_leased_is_parked_all_the_same(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        connect(bench, "s-1")
        mallory = make_hello("mallory", worker_id="worker-mallory")
        mallory.gpu_leases[0].MergeFrom(leased(0, "w-1"))
        mallory.gpu_leases[0].gpu_uuid = mallory.gpus[0].uuid
        known = bench.fleet.registry.welcome(mallory, 1, SessionId("s-2"), time.monotonic(), time.time_ns())
        bench.fleet.worker_news.publish(known)
        become(bench, "SUSPENDED", 0)
        assert len(await spans(bench, parked=True)) == 1

    on_bench(tmp_path, story)


def test_a_parked_time_whose_begin_a_crash_lost_begins_when_the_worker_said(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        await load(bench, parked_on(1, 5 * S))
        (parked,) = await spans(bench)
        assert (parked.parked, parked.slot, parked.begin_time) == (True, 1, timestamp(5 * S))

    on_bench(tmp_path, story)


def test_a_restart_continues_what_stayed_and_ends_what_changed(tmp_path: Path) -> None:
    changed_ns = 0

    async def before(bench: Bench) -> None:
        report(bench, connect(bench, "s-1"), leased(0, "w-1"), leased(1, "w-2"))
        await bench.fleet.lease_history.flush()

    async def after(bench: Bench) -> None:
        nonlocal changed_ns
        await load(bench)
        changed_ns = time.time_ns()
        connect(bench, "s-2", leased(0, "w-1"), leased(1, "w-3", since_ns=changed_ns))
        found = {(one.slot, one.workload_id): one for one in await spans(bench)}
        assert set(found) == {(0, "w-1"), (1, "w-2"), (1, "w-3")}
        assert is_open(found[0, "w-1"])
        assert is_open(found[1, "w-3"])
        # The worker tells when, since nobody else saw it.
        assert found[1, "w-2"].end_time.ToNanoseconds() == changed_ns
        assert found[1, "w-3"].begin_time.ToNanoseconds() == changed_ns

    on_bench(tmp_path, before)
    on_bench(tmp_path, after)


def test_a_wrong_clock_of_a_worker_ends_no_span_before_its_begin_or_in_the_future(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        known = connect(bench, "s-1", leased(0, "w-1", since_ns=time.time_ns() + 3600 * S))
        (span,) = await spans(bench)
        assert span.begin_time.ToNanoseconds() <= time.time_ns()
        bench.fleet.registry.disconnect(known, SessionId("s-1"), left=False)
        connect(bench, "s-2", leased(0, "w-2", since_ns=5 * S))
        second, first = await spans(bench)
        assert first.begin_time.ToNanoseconds() <= first.end_time.ToNanoseconds()
        assert second.begin_time == first.end_time
        report(bench, known)
        bench.fleet.registry.disconnect(known, SessionId("s-2"), left=False)
        connect(bench, "s-3", leased(0, "w-3", since_ns=5 * S))
        third, second = (await spans(bench))[:2]
        assert third.begin_time == second.end_time

    on_bench(tmp_path, story)


def test_a_parked_time_begins_after_its_workload_was_created(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        await load(bench)
        connect(bench, "s-1")
        workload = parked_on(0, S)
        workload.create_time.CopyFrom(timestamp(PARK_NS))
        await bench.fleet.save_workloads([workload], was_away=True)
        (span,) = await spans(bench)
        assert span.begin_time == workload.create_time

    on_bench(tmp_path, story)


def test_two_open_spans_of_one_gpu_become_one(tmp_path: Path) -> None:
    """A crash may lose the end of a span that was stored with its begin."""

    async def story(bench: Bench) -> None:
        for number in (1, 2):
            span = LeaseSpan(
                span_id=f"s-{number}",
                gpu_uuid="GPU-alpha-0",
                worker_id="worker-alpha",
                state=lease_pb2.SLOT_STATE_LEASED,
                workload_id=f"w-{number}",
                lease_id=f"l-w-{number}",
                begin_time=timestamp(number * S),
            )
            await bench.store.write(lease_span_row(span))
        await load(bench)
        connect(bench, "s-1", leased(0, "w-2"))
        second, first = await spans(bench)
        assert (second.workload_id, is_open(second)) == ("w-2", True)
        assert first.end_time == second.begin_time

    on_bench(tmp_path, story)


def test_a_time_a_gpu_and_a_worker_select(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        known = connect(bench, "s-1", leased(0, "w-1"))
        report(bench, known, leased(1, "w-1"))
        middle_ns = time.time_ns()
        report(bench, known)
        assert len(await spans(bench)) == 2
        assert [one.slot for one in await spans(bench, gpu_uuid="GPU-alpha-1")] == [1]
        assert [one.slot for one in await spans(bench, start_time=timestamp(middle_ns))] == [1]
        assert [one.slot for one in await spans(bench, worker="alpha")] == [1, 0]
        first_ns = (await spans(bench))[-1].begin_time.ToNanoseconds()
        assert await spans(bench, end_time=timestamp(first_ns)) == []

    on_bench(tmp_path, story)


def test_the_end_of_a_worker_ends_its_spans(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        known = connect(bench, "s-1", leased(0, "w-1"))
        bench.fleet.registry.disconnect(known, SessionId("s-1"), left=True)
        bench.fleet.worker_news.publish(known)
        assert is_open((await spans(bench))[0])  # its leases are as last seen
        bench.fleet.worker_news.publish_deleted(known)
        assert not is_open((await spans(bench))[0])

    on_bench(tmp_path, story)


def test_a_flood_of_changes_is_bounded_and_the_last_state_is_noted(tmp_path: Path, monkeypatch: Any) -> None:
    monotonic, ahead_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead_s)

    async def story(bench: Bench) -> None:
        nonlocal ahead_s
        bench.fleet.lease_history._queue._bounds._burst = 10
        known = connect(bench, "s-1")
        for number in range(200):
            report(bench, known, leased(0, f"w-{number}"))
        assert len(await spans(bench)) < 50
        ahead_s += 60
        bench.fleet.worker_news.note_left_out_leases()  # the worker reports no other change
        (last,) = [one for one in await spans(bench) if is_open(one)]
        assert last.workload_id == "w-199"

    on_bench(tmp_path, story)


def test_retention_deletes_ended_spans_only(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        known = connect(bench, "s-1", leased(0, "w-1"), leased(1, "w-2"))
        report(bench, known, leased(1, "w-2"))
        await bench.fleet.lease_history.flush()
        await prune(bench.fleet.reader, -1.0)
        assert [one.workload_id for one in await spans(bench)] == ["w-2"]

    on_bench(tmp_path, story)


def test_a_worker_with_a_backdated_lease_overwrites_no_span_of_another(tmp_path: Path) -> None:
    """A worker chooses the begin of its first span, and sees the ids of the spans of others."""

    async def before(bench: Bench) -> None:
        connect(bench, "s-1", leased(0, "w-1", since_ns=S))
        assert [one.workload_id for one in await spans(bench)] == ["w-1"]

    async def after(bench: Bench) -> None:
        await bench.fleet.load()
        mallory = make_hello("mallory", worker_id="worker-mallory")
        mallory.gpu_leases[0].MergeFrom(leased(0, "w-2", since_ns=S))
        mallory.gpu_leases[0].gpu_uuid = mallory.gpus[0].uuid
        known = bench.fleet.registry.welcome(mallory, 1, SessionId("s-2"), time.monotonic(), time.time_ns())
        bench.fleet.worker_news.publish(known)
        assert {one.workload_id for one in await spans(bench)} == {"w-1", "w-2"}

    on_bench(tmp_path, before)
    on_bench(tmp_path, after)


def test_long_ids_of_a_hostile_worker_make_no_long_spans(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        known = connect(bench, "s-1", leased(0, "w" * 100_000))
        report(bench, known, leased(0, "w" * 100_000))
        (span,) = await spans(bench)  # and the same use is no change
        assert span.ByteSize() < 2_000

    on_bench(tmp_path, story)
