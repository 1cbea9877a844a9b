"""The coordinator's decisions, as values in and values out."""

import random
from collections.abc import Iterable

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import errors_pb2, lease_pb2, worker_pb2
from leasehold.v1.command_pb2 import Command, CommandResult, CommandState
from leasehold.v1.gpu_pb2 import Gpu, GpuSample
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.worker_pb2 import HostFacts
from leasehold.v1.workload_pb2 import Workload
from leasehold.worker.v1.session_pb2 import ConnectRequest, Hello, WorkerLoad
from leasehold_coordinator.core import command_states
from leasehold_coordinator.core.client_views import gpu_views, worker_view
from leasehold_coordinator.core.hello_rules import check_values
from leasehold_coordinator.core.known_worker import KnownWorker, SessionId
from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads

NOW_NS = 1_000_000_000
INTERVAL_S = 5.0


def hello(worker_id: str = "worker-1", name: str = "alpha", host: str = "h1", **fields: object) -> Hello:
    return Hello(
        worker_id=worker_id,
        name=name,
        instance_id="i1",
        host=HostFacts(hostname=host),
        gpus=[Gpu(uuid="GPU-a", slot=0), Gpu(uuid="GPU-b", slot=1)],
        gpu_leases=[GpuLease(gpu_uuid=uuid, state=lease_pb2.SLOT_STATE_FREE) for uuid in ("GPU-a", "GPU-b")],
        **fields,  # type: ignore[arg-type]  # fields by name
    )


def welcome(registry: Registry, frame: Hello, session: str = "s1", now: float = 0.0) -> KnownWorker:
    return registry.welcome(frame, registry.next_epoch(frame), SessionId(session), now, NOW_NS)


def test_terminal_states_lead_nowhere_and_the_others_somewhere() -> None:
    for state in CommandState.values()[1:]:
        followers = [other for other in CommandState.values() if command_states.may_follow(state, other)]
        assert command_states.is_terminal(state) == (not followers)


def test_a_command_that_was_sent_never_expires_without_its_worker() -> None:
    assert command_states.may_follow(command_states.PENDING, command_states.EXPIRED)
    assert not command_states.may_follow(command_states.PENDING, command_states.SUCCEEDED)
    assert not command_states.may_follow(command_states.RUNNING, command_states.DISPATCHED)
    for state in (command_states.DISPATCHED, command_states.ACCEPTED, command_states.RUNNING):
        assert command_states.may_follow(state, command_states.UNKNOWN)
    assert command_states.may_follow(command_states.UNKNOWN, command_states.SUCCEEDED)


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [
        (0, worker_pb2.WORKER_STATE_CONNECTED),
        (12, worker_pb2.WORKER_STATE_CONNECTED),
        (13, worker_pb2.WORKER_STATE_STALE),
        (20, worker_pb2.WORKER_STATE_STALE),
        (21, worker_pb2.WORKER_STATE_LOST),
    ],
)
def test_a_silent_worker_becomes_stale_and_then_lost(silent_s: float, state: int) -> None:
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    assert registry.state(known, silent_s) == state


def test_a_worker_without_a_stream_is_stale_until_it_is_lost() -> None:
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    assert registry.disconnect(known, SessionId("s1"), left=False)
    assert registry.state(known, 1) == worker_pb2.WORKER_STATE_STALE
    assert registry.state(known, 30) == worker_pb2.WORKER_STATE_LOST


def test_a_worker_that_said_goodbye_is_disconnected() -> None:
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    registry.disconnect(known, SessionId("s1"), left=True)
    assert registry.state(known, 1) == worker_pb2.WORKER_STATE_DISCONNECTED


def test_after_a_start_a_worker_that_said_goodbye_is_disconnected_until_it_connects() -> None:
    registry = Registry(INTERVAL_S, started=100)
    registry.add_stored(hello(), epoch=7, left=True)
    (known,) = registry.all()
    for now in (101, 159, 161):
        assert registry.state(known, now) == worker_pb2.WORKER_STATE_DISCONNECTED
    assert list(gpu_views(known)) == []
    back = welcome(registry, hello())
    assert registry.state(back, 0) == worker_pb2.WORKER_STATE_CONNECTED


def test_after_a_start_a_worker_is_unconfirmed_and_its_gpus_are_not_none() -> None:
    registry = Registry(INTERVAL_S, started=100)
    registry.add_stored(hello(), epoch=7)
    (known,) = registry.all()
    assert registry.state(known, 159) == worker_pb2.WORKER_STATE_UNCONFIRMED
    assert registry.state(known, 161) == worker_pb2.WORKER_STATE_LOST
    worker = worker_view(known, registry.state(known, 101), "")
    assert not worker.HasField("gpu_count")
    assert list(gpu_views(known)) == []


def test_epochs_grow_above_what_either_side_remembers() -> None:
    registry = Registry(INTERVAL_S, started=0)
    registry.add_stored(hello(), epoch=7)
    assert registry.next_epoch(hello()) == 8
    assert registry.next_epoch(hello(last_epoch=20)) == 21
    assert registry.next_epoch(hello("worker-2")) == 1


def test_only_a_newer_load_is_applied_also_across_reconnects() -> None:
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    taken = [GpuLease(gpu_uuid="GPU-a", state=lease_pb2.SLOT_STATE_LEASED)]
    assert registry.apply_load(known, WorkerLoad(sequence=3, gpu_leases=taken))
    assert not registry.apply_load(known, WorkerLoad(sequence=3))
    assert not registry.apply_load(known, WorkerLoad(sequence=2))
    assert known.free_gpu_uuids == []
    again = welcome(registry, hello(), "s2")
    assert not registry.apply_load(again, WorkerLoad(sequence=3))


def test_what_a_command_took_is_not_free_before_the_next_load() -> None:
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    registry.apply_result(known, CommandResult(claimed_gpu_uuids=["GPU-a"]), ["w-1"])
    assert (known.free_gpu_uuids, known.open_gpus) == (["GPU-b"], 1)
    registry.apply_result(
        known, CommandResult(released_gpu_uuids=["GPU-a"], claimed_gpu_uuids=["GPU-b"]), ["w-1"]
    )
    assert known.free_gpu_uuids == ["GPU-a"]


def test_watchers_get_the_load_after_a_result_that_gave_gpus_up() -> None:
    """The result has changed the entries already, so the load is equal to them."""
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    leased = GpuLease(gpu_uuid="GPU-a", state=lease_pb2.SLOT_STATE_LEASED, lease_id="l-1", workload_id="w-1")
    free = GpuLease(gpu_uuid="GPU-a", state=lease_pb2.SLOT_STATE_FREE)
    assert registry.apply_load(known, WorkerLoad(sequence=1, gpu_leases=[leased]))
    registry.apply_result(known, CommandResult(released_gpu_uuids=["GPU-a"]), ["w-1"])
    assert registry.apply_load(known, WorkerLoad(sequence=2, gpu_leases=[free]))
    assert not registry.apply_load(known, WorkerLoad(sequence=3, gpu_leases=[free]))
    registry.apply_result(known, CommandResult(), ["w-1"])
    assert not registry.apply_load(known, WorkerLoad(sequence=4, gpu_leases=[free]))


def test_a_result_after_a_newer_load_frees_no_gpu_of_another_workload() -> None:
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    leased = GpuLease(gpu_uuid="GPU-a", state=lease_pb2.SLOT_STATE_LEASED, lease_id="l-2", workload_id="w-2")
    registry.apply_load(known, WorkerLoad(sequence=1, gpu_leases=[leased]))
    registry.apply_result(known, CommandResult(released_gpu_uuids=["GPU-a"]), ["w-1"])
    assert (known.free_gpu_uuids, known.leases[0].workload_id) == ([], "w-2")
    registry.apply_result(known, CommandResult(released_gpu_uuids=["GPU-a"]), ["w-1", "w-2"])
    assert known.free_gpu_uuids == ["GPU-a"]


def test_what_a_suspend_holds_is_not_free_before_the_next_load() -> None:
    registry = Registry(INTERVAL_S, started=0)
    known = welcome(registry, hello())
    registry.apply_result(known, CommandResult(claimed_gpu_uuids=["GPU-a"]), ["w-1"])
    registry.apply_result(known, CommandResult(released_gpu_uuids=["GPU-a"], hold_id="c-1"), ["w-1"])
    assert known.free_gpu_uuids == ["GPU-b"]


def test_the_end_of_a_superseded_session_changes_nothing() -> None:
    registry = Registry(INTERVAL_S, started=0)
    superseded = welcome(registry, hello(), "s1")
    known = welcome(registry, hello(), "s2")
    for one in (superseded, known):
        assert not registry.disconnect(one, SessionId("s1"), left=False)
    assert registry.state(known, 1) == worker_pb2.WORKER_STATE_CONNECTED


def test_a_worker_that_was_silent_comes_back_by_two_loads() -> None:
    registry = Registry(5.0, started=0)
    known = registry.welcome(hello(), 1, SessionId("s-1"), 0, NOW_NS)
    registry.note_silence(known)
    for number, state in enumerate((worker_pb2.WORKER_STATE_STALE, worker_pb2.WORKER_STATE_CONNECTED), 1):
        registry.seen(known, 20 + number, NOW_NS)
        registry.apply_load(known, WorkerLoad(sequence=number))
        assert registry.state(known, 20 + number) == state
    again = registry.welcome(hello(), 2, SessionId("s-2"), 30, NOW_NS)
    assert registry.state(again, 30) == worker_pb2.WORKER_STATE_CONNECTED, "hello tells all"


def test_another_host_may_take_an_id_only_once_its_holder_is_silent() -> None:
    registry = Registry(INTERVAL_S, started=0)
    welcome(registry, hello())
    registry.check_newcomer(hello(), 1)
    with pytest.raises(FleetError) as error:
        registry.check_newcomer(hello(host="h2"), 1)
    assert error.value.reason == errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID
    registry.check_newcomer(hello(host="h2"), 60)


def test_workers_are_found_by_id_or_by_a_name_that_is_unique() -> None:
    registry = Registry(INTERVAL_S, started=0)
    for worker_id, name in (("worker-1", "alpha"), ("worker-2", "twin"), ("worker-3", "twin")):
        welcome(registry, hello(worker_id, name))
    assert registry.find("alpha").hello.worker_id == "worker-1"
    assert registry.find("worker-3").hello.name == "twin"
    for wanted, match in (
        ("twin", "2 workers are named"),
        ("nobody", "the known workers are alpha, twin$"),
    ):
        with pytest.raises(FleetError, match=match):
            registry.find(wanted)


def test_an_unknown_name_does_not_sort_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(5.0, started=0)
    for number in range(20):
        registry.add_stored(Hello(worker_id=f"worker-{number}", name=f"host-{number:02}"), 1)
    monkeypatch.setattr(Registry, "all", lambda _: pytest.fail("sorts all workers, 12 ms of 10,000"))
    eight = ", ".join(f"host-{number:02}" for number in range(8))
    with pytest.raises(FleetError, match=f"the known workers are {eight} and 12 more$"):
        registry.find("nobody")


@pytest.mark.parametrize(
    "moment",
    [
        Timestamp(seconds=2**62),
        Timestamp(nanos=10**9),
        Timestamp(seconds=1, nanos=-1),
        Timestamp(seconds=-(2**40)),
    ],
    ids=str,
)
def test_an_impossible_time_is_found_at_any_depth(moment: Timestamp) -> None:
    early, late = Timestamp(seconds=-62_135_596_800), Timestamp(seconds=253_402_300_799, nanos=999_999_999)
    leases = [GpuLease(since=early), GpuLease(sample=GpuSample(sample_time=late))]
    frame = ConnectRequest(worker_load=WorkerLoad(gpu_leases=leases))
    check_values(frame)
    frame.worker_load.gpu_leases[1].sample.sample_time.CopyFrom(moment)
    with pytest.raises(FleetError, match=r"leases\[1\]\.sample\.sample_time: .* impossible time"):
        check_values(frame)


def test_an_impossible_duration_is_found() -> None:
    check_values(Command(timeout=Duration(seconds=-1, nanos=-1)))
    with pytest.raises(FleetError, match="impossible time"):
        check_values(Command(timeout=Duration(seconds=1, nanos=-1)))


def test_live_workloads_are_found_by_worker_and_name_after_any_changes() -> None:
    draw = random.Random(1)
    live, plain = LiveWorkloads(), dict[str, Workload]()
    for _ in range(2_000):
        workload_id, worker_id, name = (f"{kind}-{draw.randrange(8)}" for kind in ("id", "worker", "name"))
        if draw.random() < 0.3:
            assert live.pop(workload_id, None) is plain.pop(workload_id, None)
        else:
            workload = Workload(workload_id=workload_id, worker_id=worker_id, name=name)
            live[workload_id] = plain[workload_id] = workload
        assert (dict(live), list(live.values())) == (plain, [live[one] for one in live])
        assert by_id(live.of_worker(worker_id)) == by_id(
            w for w in plain.values() if w.worker_id == worker_id
        )
        assert by_id(live.named(name)) == by_id(w for w in plain.values() if w.name == name)
    live.clear()
    assert (live.of_worker("worker-1"), live.named("name-1"), len(live)) == ([], [], 0)


def by_id(workloads: Iterable[Workload]) -> list[str]:
    return sorted(one.workload_id for one in workloads)
