"""Who is let in: what a hello may say, and whose id, name and GPUs are whose."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, errors_pb2, lease_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.fleet_service_pb2 import (
    DeleteWorkerRequest,
    GetGpuRequest,
    GetWorkerRequest,
    ListGpusRequest,
    ListWorkersRequest,
)
from leasehold.v1.gpu_pb2 import Gpu, GpuSample
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.operation_pb2 import Operation, RunOperation
from leasehold.v1.worker_pb2 import HostFacts
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold.v1.workload_service_pb2 import GetWorkloadRequest
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import CommandUpdate, ConnectRequest, Hello, WorkerLoad, WorkloadEvent
from leasehold_coordinator.core import worker_registry
from leasehold_coordinator.core.hello_rules import check_hello
from leasehold_coordinator.core.known_worker import SessionId
from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet import report_bounds
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.storage.rows import Change

from tests.coordinator.api.test_command_service import ended, refusal, start, suspend
from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import state_of, until

RUNNING, FAILED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_FAILED
LABELS = {f"label-{number}": "x" * 200 for number in range(1000)}
NOW_NS = 1_000_000_000


def running(workload_id: str, name: str = "", generation: int = 1) -> Workload:
    status = WorkloadStatus(state=RUNNING, generation=generation)
    return Workload(workload_id=workload_id, name=name or workload_id, status=status)


def refused(coordinator: CoordinatorProcess, hello: Hello) -> errors_pb2.Error:
    goodbye = coordinator.connect(hello).wait_end().goodbye
    assert goodbye.reason == session_pb2.GOODBYE_REASON_REFUSED
    return goodbye.error


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        (make_hello("beta", labels=LABELS), "labels"),
        (make_hello("beta\x1b[2J"), "worker_id"),
        (make_hello("two words"), "worker_id"),
        (make_hello("beta", gpu_count=2000), "labels"),
        (make_hello("beta", gpus=[Gpu(uuid="GPU-beta-0", slot=9)]), "gpus.uuid"),
        (make_hello("beta", gpus=[Gpu(uuid="GPU-beta-9", slot=0)]), "gpus.slot"),
        (make_hello("beta", gpus=[Gpu(uuid="", slot=9)]), "gpus.uuid"),
        (make_hello("beta", workloads=[running("w-1"), running("w-1")]), "workloads.workload_id"),
        (make_hello("beta", workloads=[running(f"w-{n}") for n in range(3000)]), "workloads"),
        (make_hello("beta", workloads=[running("w-1", "a\nb")]), "name"),
    ],
    ids=range(10),
)
def test_a_hello_that_breaks_a_rule(hello: Hello, field: str) -> None:
    with pytest.raises(FleetError) as error:
        check_hello(hello)
    assert error.value.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    assert error.value.metadata == {"field": field}
    assert error.value.message.isprintable()


@pytest.mark.parametrize("name", ["", "a" * 65, "-x", "naïve", "alpha\n", "rack/1", "\x1b[2J"])
def test_a_worker_name_that_breaks_the_rule(name: str) -> None:
    hello = make_hello("beta")
    hello.name = name
    with pytest.raises(FleetError, match="--name"):
        check_hello(hello)


def test_hellos_with_big_labels_break_no_list(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    assert "at most 32768 bytes" in refused(coordinator, make_hello("beta", labels=LABELS)).message
    assert [one.name for one in coordinator.fleet.ListWorkers(ListWorkersRequest()).workers] == ["alpha"]


def test_the_workloads_of_a_hello_are_one_write(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.service._forget(bench.session)
        write, writes = bench.store.write, []

        async def count(*rows: Change) -> None:
            writes.append(len(rows))
            await write(*rows)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(bench.store, "write", count)
            session = Session(make_hello(workloads=[running(f"w-{n}") for n in range(1500)]))
            await bench.service._welcome(session)
        assert writes == [1, 3 * 1500], "each with its event and its row of the audit"
        assert len(bench.fleet.workloads) == len(await bench.store.live_workloads()) == 1500
        assert not session.hello.workloads, "they are kept once"
        bench.service._forget(session)
        again = Session(make_hello(workloads=[running("w-7")]))
        await bench.service._welcome(again)
        assert list(bench.fleet.workloads) == ["w-7"]
        assert len(await bench.store.live_workloads()) == 1

    on_bench(tmp_path, scenario)


def test_a_name_in_use_is_refused_and_that_of_a_worker_that_left_is_not(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    other = make_hello("beta")
    other.name = "alpha"
    error = refused(coordinator, other)
    assert error.reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_NAME
    assert error.metadata["worker"] == "worker-alpha"
    goodbye = session_pb2.Goodbye(reason=session_pb2.GOODBYE_REASON_SHUTDOWN)
    worker.up.put(ConnectRequest(goodbye=goodbye))
    worker.wait_end()
    until(lambda: alpha_state(coordinator) == worker_pb2.WORKER_STATE_DISCONNECTED)
    coordinator.connect(other).welcome()
    found = coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker
    assert found.worker_id == "worker-beta", "the one that is connected has the name"


def test_an_id_that_is_anothers_name_is_refused(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    """An id is looked for before a name: what is meant for alpha would go to that worker."""
    by_id, by_name = make_hello("beta"), make_hello("beta")
    by_id.worker_id, by_name.name = "alpha", "worker-alpha"
    for other in (by_id, by_name):
        assert refused(coordinator, other).reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_NAME


def test_a_workload_whose_id_is_anothers_name_is_not_taken_in(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker, "one")
    beta = coordinator.connect(make_hello("beta", workloads=[running("one"), running("two")]))
    beta.welcome()
    until(lambda: found(coordinator, "two").worker_id == "worker-beta")
    assert found(coordinator, "one").workload_id == started.workload_id


def alpha_state(coordinator: CoordinatorProcess) -> int:
    return coordinator.fleet.GetWorker(GetWorkerRequest(worker="worker-alpha")).worker.state


def test_a_gpu_of_another_worker_is_refused(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    thief = make_hello("beta", gpus=[Gpu(uuid="GPU-alpha-1", slot=7)])
    error = refused(coordinator, thief)
    assert error.reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU
    assert dict(error.metadata) == {"gpu_uuid": "GPU-alpha-1", "worker": "worker-alpha"}
    beta = coordinator.connect(make_hello("beta"))
    beta.welcome()
    beta.up.put(ConnectRequest(hello=thief))
    assert beta.wait_end().goodbye.error.reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU
    owners = {gpu.gpu.uuid: gpu.worker_name for gpu in coordinator.fleet.ListGpus(ListGpusRequest()).gpus}
    assert owners["GPU-alpha-1"] == "alpha"


def test_a_gpu_that_its_worker_no_longer_has_is_free_for_another(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    worker.up.put(ConnectRequest(hello=make_hello(gpu_count=1)))
    until(lambda: len(coordinator.fleet.ListGpus(ListGpusRequest()).gpus) == 1)
    moved = make_hello("beta", gpu_count=0, gpus=[Gpu(uuid="GPU-alpha-1", slot=0)])
    coordinator.connect(moved).welcome()
    assert coordinator.fleet.GetGpu(GetGpuRequest(uuid="GPU-alpha-1")).gpu.worker_name == "beta"


def test_gpus_of_earlier_hellos_are_forgotten() -> None:
    """A worker may say hello with other GPUs a hundred times in a second."""
    known = Registry(5, 0)
    one = known.welcome(make_hello(), 1, SessionId("s-1"), 0, NOW_NS)
    for number in range(50):
        hello = make_hello(gpus=[Gpu(uuid=f"GPU-{number}", slot=9)])
        known.describe(one, hello) if number % 2 else known.welcome(hello, 2, SessionId("s-2"), 0, NOW_NS)
        one = known.find("alpha")
    assert [uuid for uuid in (f"GPU-{number}" for number in range(50)) if known.owner(uuid)] == ["GPU-49"]
    assert known.owner("GPU-alpha-0") is one


def test_after_a_restart_the_gpus_of_workers_that_have_not_reported_are_theirs(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    coordinator.restart()
    thief = make_hello("beta", gpus=[Gpu(uuid="GPU-alpha-1", slot=7)])
    assert refused(coordinator, thief).reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU
    coordinator.connect().welcome()


def test_who_takes_the_gpus_of_a_worker_that_left_has_them_after_a_restart_too(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    goodbye = session_pb2.Goodbye(reason=session_pb2.GOODBYE_REASON_SHUTDOWN)
    worker.up.put(ConnectRequest(goodbye=goodbye))
    worker.wait_end()
    heir = make_hello("alpha")
    heir.worker_id, heir.name = "worker-heir", "heir"
    until(lambda: alpha_state(coordinator) == worker_pb2.WORKER_STATE_DISCONNECTED)
    coordinator.connect(heir).welcome()
    owners = [gpu.worker_name for gpu in coordinator.fleet.ListGpus(ListGpusRequest()).gpus]
    assert owners == ["heir", "heir"]
    coordinator.restart()
    coordinator.connect(heir).welcome()


def test_a_load_says_nothing_of_other_gpus(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    leases = [GpuLease(gpu_uuid=uuid) for uuid in ["GPU-alpha-0", "GPU-alpha-0", "GPU-beta-0"] * 100]
    leases.append(GpuLease(gpu_uuid="GPU-alpha-1", state=lease_pb2.SLOT_STATE_LEASED))
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=leases)))
    until(lambda: not coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker.free_gpu_count)
    assert coordinator.fleet.GetWorker(GetWorkerRequest(worker="alpha")).worker.gpu_count == 2


@pytest.mark.parametrize("moment", [Timestamp(seconds=2**62), Timestamp(seconds=1, nanos=-5)], ids=str)
def test_a_time_that_no_calendar_has_ends_the_session(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, moment: Timestamp
) -> None:
    lease = GpuLease(gpu_uuid="GPU-alpha-0", sample=GpuSample(sample_time=moment))
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=[lease])))
    error = worker.wait_end().goodbye.error
    assert error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    assert "sample_time" in error.message
    json_format.MessageToDict(coordinator.fleet.ListGpus(ListGpusRequest()))
    hello = make_hello("beta", cordon=lease_pb2.Cordon(reason="x", cordon_time=moment))
    assert refused(coordinator, hello).reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION


def test_a_huge_epoch_locks_nobody_out(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    worker.close()
    for last_epoch in (2**62 - 2, 2**40):
        error = refused(coordinator, make_hello(last_epoch=last_epoch))
        assert error.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
    assert coordinator.connect(make_hello(last_epoch=1)).welcome().epoch == 2


@pytest.mark.long
def test_another_instance_does_not_supersede_one_that_is_in_contact(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    hostile = coordinator.connect(make_hello(instance_id="instance-2"))
    hostile.wait_ended()
    assert not hostile.frames
    assert hostile.call.code().name == "FAILED_PRECONDITION", "it tries again, and soon"
    assert state_of(coordinator) == RUNNING
    assert not worker.ended


def test_an_instance_waits_for_the_end_of_the_one_that_was_killed(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.service._forget(bench.session)
        first, second = Session(make_hello()), Session(make_hello(instance_id="instance-2"))
        await bench.service._welcome(first)
        welcoming = asyncio.create_task(bench.service._welcome(second))
        await bench.store.workers()
        bench.service._forget(first)
        await welcoming
        assert bench.fleet.sessions == {"worker-alpha": second}

    on_bench(tmp_path, scenario)


def test_a_copy_on_another_host_is_refused_while_the_original_is_away(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    worker.close()
    until(lambda: alpha_state(coordinator) == worker_pb2.WORKER_STATE_STALE)
    copy = make_hello("copy", boot_id="boot-2", host=HostFacts(hostname="host-2"))
    copy.worker_id = "worker-alpha"
    error = refused(coordinator, copy)
    assert error.reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID
    assert "leasehold rm worker worker-alpha" in error.message
    assert state_of(coordinator, started.workload_id) == RUNNING


@pytest.mark.parametrize("says", ["nothing", "rebooted"])
def test_a_loss_that_its_worker_did_not_see_is_not_final(
    coordinator: CoordinatorProcess, worker: ScriptedWorker, says: str
) -> None:
    started = start(coordinator, worker)
    worker.close()
    lost = running(started.workload_id, "one", 9)
    lost.status.state = FAILED
    lost.status.error.reason = errors_pb2.ERROR_REASON_HOST_REBOOTED
    reports = [lost] if says == "rebooted" else []
    copy = coordinator.connect(make_hello(boot_id="boot-2", instance_id="i2", workloads=reports))
    until(lambda: state_of(coordinator, started.workload_id) == FAILED)
    copy.close()
    back = running(started.workload_id, "one")
    coordinator.connect(make_hello(workloads=[back])).welcome()
    until(lambda: state_of(coordinator, started.workload_id) == RUNNING)
    assert not found(coordinator, started.workload_id).status.HasField("error")
    coordinator.restart()
    assert state_of(coordinator, started.workload_id) == RUNNING


def found(coordinator: CoordinatorProcess, workload_id: str) -> Workload:
    return coordinator.workloads.GetWorkload(GetWorkloadRequest(workload=workload_id)).workload


def test_an_end_that_its_worker_saw_is_final(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    started = start(coordinator, worker)
    over = running(started.workload_id, "one", 9)
    over.status.state = FAILED
    over.status.error.reason = errors_pb2.ERROR_REASON_SPAWN_FAILED
    worker.close()
    coordinator.connect(make_hello(workloads=[over])).welcome()
    until(lambda: state_of(coordinator, started.workload_id) == FAILED)
    coordinator.connect(make_hello(workloads=[running(started.workload_id, "one", 10)])).welcome()
    assert state_of(coordinator, started.workload_id) == FAILED


def test_an_ended_workload_of_another_worker_stays_as_it_is(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    worker.close()
    coordinator.connect(make_hello(boot_id="boot-2")).welcome()
    until(lambda: state_of(coordinator, started.workload_id) == FAILED)
    thief = coordinator.connect(make_hello("beta", workloads=[running(started.workload_id, "one", 50)]))
    assert "is on another worker" in thief.wait_end().goodbye.error.message
    assert found(coordinator, started.workload_id).worker_id == "worker-alpha"
    assert state_of(coordinator, started.workload_id) == FAILED


def test_a_worker_that_is_gone_is_forgotten_and_may_come_back(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    command = suspend(coordinator)
    worker.command("suspend")
    forget = DeleteWorkerRequest(worker="alpha")
    refused_now = refusal(lambda: coordinator.fleet.DeleteWorker(forget))
    assert refused_now[1] == "WORKER_CONNECTED"
    worker.close()
    until(lambda: alpha_state(coordinator) == worker_pb2.WORKER_STATE_STALE)
    forgotten = coordinator.fleet.DeleteWorker(forget)
    assert forgotten.worker.worker_id == "worker-alpha"
    assert list(forgotten.failed_workload_ids) == [started.workload_id]
    assert refusal(lambda: coordinator.fleet.DeleteWorker(forget))[1] == "UNKNOWN_WORKER"
    over = ended(coordinator, command.command_id)
    assert over.state == command_pb2.COMMAND_STATE_FAILED
    assert over.error.reason == errors_pb2.ERROR_REASON_WORKER_DELETED
    assert found(coordinator, started.workload_id).status.error.reason == over.error.reason
    coordinator.restart()
    assert not coordinator.fleet.ListWorkers(ListWorkersRequest()).workers
    assert state_of(coordinator, started.workload_id) == FAILED
    back = make_hello(workloads=[running(started.workload_id, "one")], last_epoch=1)
    assert coordinator.connect(back).welcome().epoch == 2
    until(lambda: state_of(coordinator, started.workload_id) == RUNNING)


def test_a_worker_that_cannot_be_forgotten_on_disk_is_known_as_before(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.service._welcome(session := Session(make_hello(workloads=[running("w-1")])))
        await bench.send()
        bench.service._forget(session)
        known = bench.fleet.registry.find("alpha")
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch)
            with pytest.raises(FleetError, match="full"):
                await bench.fleet.delete_worker(known)
        assert bench.fleet.registry.find("alpha") is known
        assert list(bench.fleet.workloads) == ["w-1"]
        assert list(bench.fleet.ledger.commands) == ["c-1"]
        assert await bench.fleet.delete_worker(known) == ["w-1"]
        assert not bench.fleet.ledger.commands

    bench_without_worker(tmp_path, scenario)


def bench_without_worker(path: Path, scenario: object) -> None:
    async def run(bench: Bench) -> None:
        bench.service._forget(bench.session)
        await scenario(bench)  # type: ignore[operator]  # a coroutine function

    on_bench(path, run)


def test_there_is_room_for_a_bounded_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "WORKER_LIMIT", 2)
    known = Registry(5.0, 0.0)
    for name in ("a", "b"):
        known.welcome(make_hello(name), 1, SessionId(name), 0.0, NOW_NS)
    known.check_newcomer(make_hello("a"), 0.0)
    with pytest.raises(FleetError, match="leasehold rm worker"):
        known.check_newcomer(make_hello("c"), 0.0)


def test_a_list_of_known_workers_is_cut(tmp_path: Path) -> None:
    known = Registry(5.0, 0.0)
    for number in range(1000):
        known.welcome(make_hello(f"host-{number}", gpu_count=0), 1, SessionId("s"), 0.0, NOW_NS)
    with pytest.raises(FleetError) as error:
        known.find("x" * 5000)
    assert len(error.value.message) < 500
    assert "and 992 more" in error.value.message


@pytest.mark.parametrize("reported", [True, False])
def test_a_run_that_the_journal_does_not_have_ends_no_workload_that_runs(
    tmp_path: Path, reported: bool
) -> None:
    async def scenario(bench: Bench) -> None:
        run = Operation(run=RunOperation(name="one"))
        command = Command(command_id="c-1", worker_id="worker-alpha", workload_id="w-1", operation=run)
        pending = running("w-1", "one", 0)
        pending.worker_id, pending.status.state = "worker-alpha", workload_pb2.WORKLOAD_STATE_PENDING
        await bench.dispatcher.create(command, pending)
        if reported:
            await bench.fleet.apply_workload(running("w-1", "one"), bench.session)
        update = CommandUpdate(command_id="c-1", state=command_pb2.COMMAND_STATE_REJECTED)
        update.error.reason = errors_pb2.ERROR_REASON_UNKNOWN_COMMAND
        await bench.dispatcher.update(bench.session, update)
        assert (await bench.stored()).state == command_pb2.COMMAND_STATE_FAILED
        if not reported:
            assert (await bench.fleet.reader.find_workload("w-1")).status.state == FAILED
            await bench.fleet.apply_workload(running("w-1", "one"), bench.session)
        assert bench.fleet.workloads["w-1"].status.state == RUNNING

    on_bench(tmp_path, scenario)


def over(workload_id: str, padding: int = 0) -> Workload:
    """A workload that has failed, with a long message."""
    status = WorkloadStatus(state=FAILED, generation=2, error=errors_pb2.Error(message="x" * padding))
    return Workload(workload_id=workload_id, name=workload_id, status=status)


def test_unknown_workloads_of_one_worker_are_bounded_over_its_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_bounds, "NEW_PER_S", 1e-6)
    monkeypatch.setattr(report_bounds, "NEW_BURST", 8)

    async def scenario(bench: Bench) -> None:
        async def connect(name: str, *workloads: Workload) -> Session:
            session = Session(make_hello(name, workloads=workloads))
            await bench.service._welcome(session)
            return session

        bench.service._forget(bench.session)
        empty = await connect("alpha")
        bench.fail_writes(monkeypatch, times=1)
        with pytest.raises(FleetError):  # what was not stored does not count
            await bench.fleet.apply_workload(running("w-0"), empty)
        bench.service._forget(empty)
        live = [running(f"w-{number}") for number in range(4)]
        first = await connect("alpha", *live, over("ended-0"), over("ended-1", 10_000), over("ended-2"))
        kept = {one.workload_id for one in await bench.store.find_workloads([f"ended-{n}" for n in range(3)])}
        assert kept == {"ended-0", "ended-1"}, "a large record counts as several"
        with pytest.raises(FleetError) as error:
            await bench.fleet.apply_workload(running("w-9"), first)
        assert error.value.metadata["bound"] == "worker_new_workloads"
        assert error.value.retry_after_s
        bench.service._forget(first)
        with pytest.raises(FleetError):
            await connect("alpha", *live, running("w-9"))
        again = await connect("alpha", *live, over("ended-3"))
        await bench.fleet.apply_workload(running("w-1", generation=2), again)
        assert bench.fleet.workloads["w-1"].status.generation == 2, "known workloads are reported as before"
        assert len(await bench.store.live_workloads()) == 4
        assert not await bench.store.find_workloads(["ended-3", "w-9"])
        await connect("beta", running("w-beta"))

    on_bench(tmp_path, scenario)


def test_a_session_with_too_many_unknown_workloads_ends_and_names_the_time(tmp_path: Path) -> None:
    prelude = "from leasehold_coordinator.fleet import report_bounds as bounds"
    prelude += "; bounds.NEW_BURST, bounds.NEW_PER_S = 1, 1e-6"
    coordinator = CoordinatorProcess(tmp_path, prelude=prelude)
    coordinator.start()
    worker = coordinator.connect(make_hello(workloads=[running("w-1")]))
    worker.welcome()
    worker.up.put(ConnectRequest(workload_event=WorkloadEvent(workload=running("w-2"))))
    assert worker.wait_end().drain.reconnect_after.seconds > 0
    back = coordinator.connect(make_hello(workloads=[running("w-1"), running("w-2")]))
    back.wait_ended()
    assert back.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found(coordinator, "w-1").status.state == RUNNING
    for one in coordinator.workers:
        one.close()
    assert coordinator.end(signal.SIGTERM) == 0
