"""What is known against GPUs and workers: what it means, what of it is told, and to whom."""

import time

from leasehold.v1 import event_pb2, gpu_pb2, lease_pb2, worker_pb2
from leasehold.v1.command_pb2 import CommandResult
from leasehold.v1.event_pb2 import Event
from leasehold.v1.fleet_service_pb2 import WatchFleetRequest
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease
from leasehold.v1.worker_pb2 import FleetGpu, MachineResources, Worker
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkerLoad
from leasehold_coordinator.core.client_views import worker_view
from leasehold_coordinator.core.gpu_conditions import Conditions, changes, seen_state, state_without_lease
from leasehold_coordinator.core.worker_registry import Registry

from tests.coordinator.api.test_command_service import start
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.core.test_pure import hello, welcome
from tests.coordinator.fleet.test_event_log import listed
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello

FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED
CORDON = Cordon(reason="fan", cordoned_by="ann")
STRANGER = ForeignProcess(pid=7, user="bob", command="python train.py")
XID = gpu_pb2.GPU_HEALTH_XID_ERROR
KINDS = (event_pb2.EVENT_KIND_GPU_HEALTH, event_pb2.EVENT_KIND_CORDON, event_pb2.EVENT_KIND_GPU_FOREIGN)


def entry(uuid: str = "GPU-a", state: lease_pb2.SlotState.ValueType = FREE, **fields: object) -> GpuLease:
    return GpuLease(gpu_uuid=uuid, state=state, **fields)  # type: ignore[arg-type]  # fields by name


def test_what_stands_in_the_way_of_a_gpu_that_nobody_leases() -> None:
    for lease, without, seen in (
        (entry(), FREE, FREE),
        (entry(health=gpu_pb2.GPU_HEALTH_THROTTLED), FREE, FREE),
        (entry(cordon=CORDON, health=XID), lease_pb2.SLOT_STATE_CORDONED, lease_pb2.SLOT_STATE_CORDONED),
        (entry(health=XID), lease_pb2.SLOT_STATE_UNHEALTHY, lease_pb2.SLOT_STATE_UNHEALTHY),
        (entry(foreign_processes=[STRANGER]), lease_pb2.SLOT_STATE_FOREIGN, FREE),
        (entry(state=LEASED, cordon=CORDON), lease_pb2.SLOT_STATE_CORDONED, LEASED),
    ):
        assert (state_without_lease(lease), seen_state(lease)) == (without, seen)


def test_a_gpu_that_is_given_up_is_as_its_entry_says() -> None:
    registry = Registry(5.0, started=0)
    known = welcome(registry, hello())
    known.leases = [
        entry("GPU-a", LEASED, cordon=CORDON),
        entry("GPU-b", LEASED, health=XID),
        entry("GPU-c", LEASED),
    ]
    registry.apply_result(known, CommandResult(released_gpu_uuids=["GPU-a", "GPU-b", "GPU-c"]), ["w-1"])
    assert [lease.state for lease in known.leases] == [
        lease_pb2.SLOT_STATE_CORDONED,
        lease_pb2.SLOT_STATE_UNHEALTHY,
        FREE,
    ]
    assert known.free_gpu_uuids == ["GPU-c"]


def test_only_what_is_another_than_before_is_news_to_watchers() -> None:
    registry = Registry(5.0, started=0)
    known = welcome(registry, hello())
    registry.apply_load(known, WorkerLoad(sequence=1, gpu_leases=[entry()]))
    news = [
        registry.apply_load(known, WorkerLoad(sequence=2 + number, gpu_leases=[lease], **more))  # type: ignore[arg-type]
        for number, (lease, more) in enumerate(
            [
                (entry(cordon=CORDON), {}),
                (entry(cordon=CORDON), {}),
                (entry(cordon=CORDON, health=XID), {}),
                (entry(cordon=CORDON, health=XID, health_reason="Xid 79"), {}),
                (entry(cordon=CORDON, health=XID, health_reason="Xid 79"), {"cordon": CORDON}),
                (
                    entry(cordon=CORDON, health=XID, health_reason="Xid 79", foreign_processes=[STRANGER]),
                    {"cordon": CORDON},
                ),
                (
                    entry(cordon=CORDON, health=XID, health_reason="Xid 79", foreign_processes=[STRANGER]),
                    {"cordon": CORDON, "resources": MachineResources(memory_free_bytes=5)},
                ),
                (entry(), {}),
            ]
        )
    ]
    assert news == [True, False, True, True, True, True, False, True]
    worker = worker_view(known, registry.state(known, 0), "")
    assert not worker.HasField("cordon")
    assert worker.resources.memory_free_bytes == 5, "a load without it says nothing of it"


def told(before: GpuLease, after: GpuLease) -> list[str]:
    one, other = (Conditions(None, {"GPU-a": lease}) for lease in (before, after))
    return [change.message for change in changes(one, other)]


def test_changes_in_words() -> None:
    sick = entry(health=XID, health_reason="Xid 79: fell off the bus")
    assert told(entry(), sick) == ["is XID_ERROR: Xid 79: fell off the bus"]
    assert told(sick, sick) == []
    assert told(sick, entry(health=gpu_pb2.GPU_HEALTH_OK)) == ["is OK again"]
    assert told(entry(), entry(health=gpu_pb2.GPU_HEALTH_OK)) == []
    assert told(entry(), entry(health=4711)) == ["is of health 4711"]
    assert told(entry(), entry(cordon=CORDON)) == ["is cordoned (fan, by ann)"]
    assert told(entry(cordon=CORDON), entry(cordon=Cordon(reason="dust"))) == ["is cordoned (dust)"]
    assert told(entry(cordon=CORDON), entry()) == ["is back in service"]
    other = ForeignProcess(pid=8)
    assert told(entry(foreign_processes=[STRANGER]), entry(foreign_processes=[other])) == [
        "is held by pid 8, which belongs to no workload",
        "is no longer held by pid 7 of bob (python train.py)",
    ]
    child = ForeignProcess(pid=9, workload_id="w-1", workload_name="one")
    assert told(entry(), entry(foreign_processes=[STRANGER, child])) == [
        "is held by pid 7 of bob (python train.py), which belongs to no workload",
        "is held by pid 9, of workload one, which does not lease it: suspend and restore one",
    ]
    assert next(iter(changes(Conditions(), Conditions(CORDON)))).gpu is None
    assert list(changes(Conditions(None, {"GPU-a": sick}), Conditions())) == []


def test_texts_of_a_worker_are_cut_in_its_conditions() -> None:
    long = "x" * 250_000
    stranger = ForeignProcess(pid=7, user=long, command=long, workload_id="w-1", workload_name=long)
    for after in (
        entry(health=XID, health_reason=long),
        entry(cordon=Cordon(reason=long, cordoned_by=long)),
        entry(foreign_processes=[stranger]),
    ):
        (message,) = told(entry(), after)
        assert len(message) < 1_000


def test_many_foreign_processes_are_told_in_one_pass() -> None:
    """A load of 256 KiB has place for this many, and the event loop waits meanwhile."""
    many = [ForeignProcess(pid=pid, workload_id=f"{pid}") for pid in range(1, 20_000)]
    began_s = time.process_time()
    assert len(told(entry(), entry(foreign_processes=many))) == len(many)
    assert time.process_time() - began_s < 10, "in the square of their number, it takes minutes"


def conditions_told(coordinator: CoordinatorProcess) -> list[Event]:
    """The events of conditions, oldest first."""
    return [event for event in reversed(listed(coordinator)) if event.kind in KINDS]


def test_a_gpu_that_falls_sick_under_a_lease_is_told_with_its_holder(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    started = start(coordinator, worker)
    sick = entry("GPU-alpha-1", LEASED, workload_id=started.workload_id, health=XID, health_reason="Xid 79")
    worker.up.put(ConnectRequest(worker_load=WorkerLoad(sequence=1, gpu_leases=[sick])))
    deadline = time.monotonic() + 20
    while not (events := conditions_told(coordinator)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [(event.message, event.workload_name) for event in events] == [
        ("GPU alpha/1 is XID_ERROR: Xid 79; workload one has it", "one")
    ]
    assert events[0].workload_id == started.workload_id
    assert events[0].worker_name == "alpha"


def test_what_has_not_changed_is_not_told_again_by_a_new_session(coordinator: CoordinatorProcess) -> None:
    cordoned = make_hello(cordon=CORDON)
    for _ in range(2):
        coordinator.connect(cordoned).welcome()
    assert [event.message for event in conditions_told(coordinator)] == [
        "worker alpha is cordoned (fan, by ann)"
    ]
    coordinator.connect(make_hello()).welcome()
    assert conditions_told(coordinator)[-1].message == "worker alpha is back in service"


def test_watchers_see_a_cordon(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    watching = coordinator.fleet.WatchFleet(WatchFleetRequest(), timeout=20)
    for response in watching:
        if response.HasField("bookmark"):
            break
    gpu = entry("GPU-alpha-0", cordon=CORDON)
    load = WorkerLoad(sequence=1, gpu_leases=[gpu], cordon=CORDON)
    worker.up.put(ConnectRequest(worker_load=load))
    seen: list[Worker | FleetGpu] = []
    for response in watching:
        seen.append(response.gpu if response.HasField("gpu") else response.worker)
        if response.HasField("gpu"):
            break
    watching.cancel()
    assert all(isinstance(one, Worker) and one.cordon == CORDON for one in seen[:-1])
    assert isinstance(seen[-1], worker_pb2.FleetGpu)
    assert seen[-1].lease.cordon == CORDON
