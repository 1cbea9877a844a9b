"""The stream of a worker: who is let in, and how a session ends."""

import asyncio
import gc
import signal
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from leasehold.v1 import errors_pb2, lease_pb2, worker_pb2
from leasehold.v1.fleet_service_pb2 import GetGpuRequest, GetWorkerRequest, ListGpusRequest, WatchFleetRequest
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.worker_pb2 import HostFacts
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    ConnectRequest,
    ConnectResponse,
    Goodbye,
    Heartbeat,
    Hello,
    ProtocolVersion,
    WorkerLoad,
)
from leasehold_coordinator.api import session_service
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.server import server

from tests.coordinator.bench import Bench, on_bench, session_streams
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello


def state(coordinator: CoordinatorProcess, name: str = "alpha") -> int:
    return coordinator.fleet.GetWorker(GetWorkerRequest(worker=name)).worker.state


def wait_state(coordinator: CoordinatorProcess, wanted: int, name: str = "alpha") -> None:
    deadline = time.monotonic() + 20
    while state(coordinator, name) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_welcome_tells_the_coordinators_time(coordinator: CoordinatorProcess) -> None:
    asked_s = time.time()
    welcome = coordinator.connect(make_hello("beta")).welcome()
    told_s = welcome.time.seconds + welcome.time.nanos / 1e9
    assert asked_s <= told_s <= time.time()


def test_a_worker_is_known_with_its_gpus_once_it_was_welcomed(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    gpus = coordinator.fleet.ListGpus(ListGpusRequest()).gpus
    assert [(gpu.worker_name, gpu.gpu.slot) for gpu in gpus] == [("alpha", 0), ("alpha", 1)]
    assert worker.welcome().load_interval.seconds == 5
    known = coordinator.fleet.GetWorker(GetWorkerRequest(worker="worker-alpha")).worker
    assert (known.gpu_count, known.free_gpu_count) == (2, 2)
    assert known.state == worker_pb2.WORKER_STATE_CONNECTED


def test_claims_and_parked_workloads_are_unknown_until_the_first_load(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    """A hello has GPUs and no claims. The first load is published, although both counts are 0."""
    watch = coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20)
    seen = (change.worker for change in watch if change.HasField("worker"))
    before = next(seen)
    assert before.gpu_count == 2
    assert not before.HasField("pending_claimers")
    assert not before.HasField("parked_workload_count")
    load = WorkerLoad(sequence=1, gpu_leases=worker.first.hello.gpu_leases)
    worker.up.put(ConnectRequest(worker_load=load))
    after = next(seen)
    assert after.HasField("pending_claimers")
    assert after.HasField("parked_workload_count")
    watch.cancel()


def test_epochs_grow_over_reconnects_and_restarts(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    epochs = [worker.welcome().epoch]
    epochs.append(coordinator.connect().welcome().epoch)
    coordinator.restart()
    assert state(coordinator) == worker_pb2.WORKER_STATE_UNCONFIRMED
    assert list(coordinator.fleet.ListGpus(ListGpusRequest()).unreachable) == ["worker-alpha"]
    unconfirmed = coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker
    counts = {"gpu_count", "free_gpu_count", "pending_claimers", "parked_workload_count"}
    assert not counts & {field.name for field, _ in unconfirmed.ListFields()}
    epochs.append(coordinator.connect().welcome().epoch)
    epochs.append(coordinator.connect(make_hello(last_epoch=100)).welcome().epoch)
    assert epochs == [1, 2, 3, 101]


def test_a_newer_stream_supersedes_the_older(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    coordinator.connect().welcome()
    assert worker.wait_end().goodbye.reason == session_pb2.GOODBYE_REASON_SUPERSEDED
    assert state(coordinator) == worker_pb2.WORKER_STATE_CONNECTED


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            make_hello(host=HostFacts(hostname="host-2"), boot_id="boot-2"),
            errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID,
        ),
        (
            make_hello("beta", protocol_version=ProtocolVersion(major=2)),
            errors_pb2.ERROR_REASON_PROTOCOL_VERSION,
        ),
        (
            session_pb2.Hello(protocol_version=ProtocolVersion(major=1)),
            errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
        ),
    ],
)
def test_who_is_not_let_in_is_told_why(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, hello: session_pb2.Hello, reason: int
) -> None:
    goodbye = coordinator.connect(hello).wait_end().goodbye
    assert goodbye.reason == session_pb2.GOODBYE_REASON_REFUSED
    assert goodbye.error.reason == reason
    assert state(coordinator) == worker_pb2.WORKER_STATE_CONNECTED


def test_frames_out_of_order_end_that_session_alone(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    first = coordinator.connect(first=ConnectRequest(worker_load=WorkerLoad())).wait_end()
    assert first.goodbye.error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    beta.up.put(ConnectRequest(hello=make_hello("gamma")))
    assert beta.wait_end().goodbye.reason == session_pb2.GOODBYE_REASON_PROTOCOL_ERROR
    worker.up.put(ConnectRequest())  # a frame of a newer worker
    taken = GpuLease(gpu_uuid="GPU-alpha-0", state=lease_pb2.SLOT_STATE_LEASED)
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=[taken])))
    deadline = time.monotonic() + 20
    while coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker.free_gpu_count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hello_that_comes_again_changes_what_is_known(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    hello = make_hello()
    hello.gpus[1].mig_enabled = True
    worker.up.put(ConnectRequest(hello=hello))
    deadline = time.monotonic() + 20
    while not coordinator.fleet.GetGpu(GetGpuRequest(uuid="GPU-alpha-1")).gpu.gpu.mig_enabled:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not worker.ended
    assert sum(frame.HasField("welcome") for frame in worker.frames) == 1


def test_only_a_goodbye_proves_a_clean_leave(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    worker.close()
    wait_state(coordinator, worker_pb2.WORKER_STATE_STALE)
    polite = coordinator.connect()
    polite.welcome()
    reason = session_pb2.GOODBYE_REASON_SHUTDOWN
    polite.up.put(ConnectRequest(goodbye=Goodbye(reason=reason)))
    polite.wait_end()
    wait_state(coordinator, worker_pb2.WORKER_STATE_DISCONNECTED)


def test_a_goodbye_survives_restarts_until_the_worker_connects(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    worker.up.put(ConnectRequest(goodbye=Goodbye(reason=session_pb2.GOODBYE_REASON_SHUTDOWN)))
    worker.wait_end()
    for _ in range(2):
        coordinator.restart()
        assert state(coordinator) == worker_pb2.WORKER_STATE_DISCONNECTED
    thief = make_hello("beta", gpu_count=0, gpus=make_hello().gpus[:1])
    coordinator.connect(thief).welcome()  # alpha's row is stored again, without that GPU
    coordinator.restart()
    assert state(coordinator) == worker_pb2.WORKER_STATE_DISCONNECTED
    back = make_hello()
    del back.gpus[0], back.gpu_leases[0]
    assert coordinator.connect(back).welcome().epoch == 2
    coordinator.restart()
    assert state(coordinator) == worker_pb2.WORKER_STATE_UNCONFIRMED


def test_a_stop_says_goodbye_to_the_workers(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    assert coordinator.end(signal.SIGTERM) == 0
    assert worker.wait_end().goodbye.reason == session_pb2.GOODBYE_REASON_SHUTDOWN
    assert 0 <= worker.frames[-2].drain.reconnect_after.ToTimedelta().total_seconds() <= 0.5


def test_after_a_stop_many_workers_come_back_spread_over_time() -> None:
    async def scenario() -> None:
        fleet: Any = SimpleNamespace(sessions={f"w-{n}": Session(make_hello(f"w{n}")) for n in range(2000)})
        server._send_away(fleet)
        waits = []
        for session in fleet.sessions.values():
            drain, goodbye = session.frames
            assert goodbye.goodbye.reason == session_pb2.GOODBYE_REASON_SHUTDOWN
            waits.append(drain.drain.reconnect_after.ToTimedelta().total_seconds())
        assert 0 <= min(waits) < 0.5
        assert 1.5 < max(waits) <= 2

    asyncio.run(scenario())


def test_a_watch_tells_of_loads_and_can_be_resumed(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    watching = coordinator.fleet.WatchFleet(WatchFleetRequest())
    snapshot = []
    for response in watching:
        snapshot.append(response)
        if response.bookmark.snapshot_end:
            break
    assert [r.WhichOneof("change") for r in snapshot] == ["worker", "gpu", "gpu", "bookmark"]
    taken = GpuLease(gpu_uuid="GPU-alpha-0", state=lease_pb2.SLOT_STATE_LEASED)
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=[taken])))
    changed = next(response for response in watching if response.HasField("gpu"))
    assert changed.gpu.lease.state == lease_pb2.SLOT_STATE_LEASED
    watching.cancel()
    resumed = coordinator.fleet.WatchFleet(WatchFleetRequest(resume_token=snapshot[-1].resume_token))
    assert next(iter(resumed)).worker.free_gpu_count == 0
    resumed.cancel()


def beat(number: int) -> ConnectResponse:
    return ConnectResponse(heartbeat=Heartbeat(applied_load_sequence=number))


def test_frames_go_out_in_order_and_an_idle_session_has_no_task_of_its_own() -> None:
    async def scenario() -> None:
        sent: list[ConnectResponse] = []
        ends: list[None] = []

        async def write(frame: ConnectResponse) -> bool:
            await asyncio.sleep(0)
            sent.append(frame)
            return True

        session = Session(make_hello())
        session.send(beat(0))
        session.open(write, lambda: ends.append(None))
        session.send(beat(1))
        await session.flush(20)
        assert len(asyncio.all_tasks()) == 1
        session.send(beat(2))
        session.end(session_pb2.GOODBYE_REASON_SUPERSEDED)
        session.end()
        session.send(beat(3))
        await session.flush(20)
        goodbye = Goodbye(reason=session_pb2.GOODBYE_REASON_SUPERSEDED)
        assert sent == [beat(0), beat(1), beat(2), ConnectResponse(goodbye=goodbye)]
        assert len(ends) == 1

        late = Session(make_hello())
        late.end()
        late.open(write, lambda: ends.append(None))
        assert len(ends) == 2, "the session was over before it was opened"

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [None, KeyError("a defect")], ids=["gone", "defect"])
def test_a_write_that_fails_ends_the_session(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async def write(frame: ConnectResponse) -> bool:
            if error is not None:
                raise error
            return False

        session = Session(make_hello())
        session.send(beat(0))
        session.send(beat(1))
        ends: list[None] = []
        session.open(write, lambda: ends.append(None))
        async with asyncio.timeout(20):
            await session.ended
        assert (len(ends), session.frames) == (1, [])

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == (
        ["a write to worker alpha failed"] if error else []
    )


def test_a_stream_keeps_no_more_of_its_hello_than_the_description(tmp_path: Path) -> None:
    """A hello may have 2,048 workloads, and there may be 10,000 streams."""

    async def scenario(bench: Bench) -> None:
        async with session_streams(bench) as connect:
            call = connect()
            await call.write(ConnectRequest(hello=make_hello("large")).SerializeToString())
            welcome = await call.read()
            assert isinstance(welcome, bytes)
            assert ConnectResponse.FromString(welcome).HasField("welcome")
            hellos = [one for one in gc.get_objects() if isinstance(one, Hello) and one.name == "large"]
            assert [len(one.gpus) for one in hellos] == [2], "one description"
            assert [len(one.gpu_leases) for one in hellos] == [0]
            call.cancel()

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("reason", ["_ServerStoppedError", "UsageError", "InternalError"])
def test_a_frame_for_a_call_that_is_over_is_given_up(reason: str) -> None:
    """gRPC tells the end of a call, and that of the server, by classes of its own."""

    class OverContext:
        async def write(self, frame: ConnectResponse) -> None:
            raise getattr(import_module("grpc._cython.cygrpc"), reason)("Server already stopped.")

    assert not asyncio.run(session_service._send(cast("Any", OverContext()), ConnectResponse()))
