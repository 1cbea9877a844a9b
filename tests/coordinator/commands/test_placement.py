"""The worker of a new workload in a large fleet, and what a refusal costs."""

import time
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Cordon, GpuLease
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest
from leasehold_coordinator.commands import placement
from leasehold_coordinator.commands.placement import EXPLAINED_LIMIT, place
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.session import Session

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.scripted_worker import make_hello

WORKERS = 100
FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED


def add_worker(bench: Bench, number: int, states: list[lease_pb2.SlotState.ValueType], model: str) -> None:
    """Connects a worker whose GPUs have these states."""
    hello = make_hello(worker_id=f"worker-{number:03}", name=f"n{number:03}")
    uuids = [f"GPU-{number:03}-{slot}" for slot in range(len(states))]
    del hello.gpus[:], hello.gpu_leases[:]
    hello.gpus.extend(Gpu(uuid=uuid, name=model, memory_total_bytes=2**30, units=4) for uuid in uuids)
    hello.gpu_leases.extend(
        GpuLease(gpu_uuid=uuid, slot=slot, state=state)
        for slot, (uuid, state) in enumerate(zip(uuids, states, strict=True))
    )
    session = Session(hello)
    session.known = bench.fleet.registry.welcome(
        hello, 1, session.session_id, time.monotonic(), time.time_ns()
    )
    session.welcomed = True
    bench.fleet.sessions[hello.worker_id] = session


def refused(bench: Bench, monkeypatch: pytest.MonkeyPatch, resources: Resources) -> tuple[FleetError, int]:
    """The refusal of a workload, and how many workers were described for it."""
    described = 0
    describe = placement._candidate

    def count(*arguments: object, **options: object) -> object:
        nonlocal described
        described += 1
        return describe(*arguments, **options)  # type: ignore[arg-type]

    request = CreateWorkloadRequest(spec=WorkloadSpec(resources=resources))
    with monkeypatch.context() as patch:
        patch.setattr(placement, "_candidate", count)
        with pytest.raises(FleetError) as error:
            place(bench.fleet.reader, request)
    return error.value, described


OTHER_GPUS = "ask for less, or for GPUs of another kind: `leasehold get gpus` lists them"


@pytest.mark.parametrize(
    ("resources", "remedy"),
    [
        (Resources(gpu_count=2), "suspend or stop a workload, or ask for less"),
        (Resources(gpu_count=3), OTHER_GPUS),
        (Resources(gpu_count=1, gpu_name="B200"), OTHER_GPUS),
        (Resources(gpu_count=1, gpu_memory_bytes=2**40), OTHER_GPUS),
        (Resources(gpu_units=8), "suspend or stop a workload, or ask for less"),
        (Resources(gpu_units=9), OTHER_GPUS),
        (Resources(gpu_count=1, gpu_units=5), OTHER_GPUS),
    ],
    ids=["full", "too many", "no such kind", "too much memory", "leased units", "units", "small GPUs"],
)
def test_a_large_fleet_without_room_is_described_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resources: Resources, remedy: str
) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(WORKERS):
            add_worker(bench, number, [FREE if number % 2 else LEASED, LEASED], "H100")
        error, described = refused(bench, monkeypatch, resources)
        assert described == EXPLAINED_LIMIT
        assert error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
        assert error.message.endswith(f"; and {WORKERS - 5} more: {remedy}")
        assert error.cost_requests == pytest.approx(16 / 30 + (WORKERS - 16) / 100)

    on_bench(tmp_path, scenario)


def test_the_only_worker_with_room_is_found_behind_many_without(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(WORKERS):
            add_worker(bench, number, [FREE, FREE], "H100")
        add_worker(bench, WORKERS, [FREE, LEASED], "B200")
        spec = WorkloadSpec(resources=Resources(gpu_count=1, gpu_name="B200"))
        chosen = place(bench.fleet.reader, CreateWorkloadRequest(spec=spec))
        assert chosen.name == f"n{WORKERS}"

    on_bench(tmp_path, scenario)


def test_named_gpus_of_many_cordoned_workers_are_known(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(WORKERS):
            add_worker(bench, number, [FREE], "H100")
        for known in bench.fleet.registry:
            known.cordon = Cordon(reason="repair")
        uuids = [f"GPU-{number:03}-0" for number in range(WORKERS)]
        with pytest.raises(FleetError, match="the named GPUs are on several workers") as error:
            place(bench.fleet.reader, CreateWorkloadRequest(gpu_uuids=uuids))
        assert error.value.cost_requests == pytest.approx(WORKERS / 30)

    on_bench(tmp_path, scenario)


def test_named_gpus_lead_to_their_workers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(WORKERS):
            add_worker(bench, number, [FREE, LEASED], "H100")
        chosen = place(bench.fleet.reader, CreateWorkloadRequest(gpu_uuids=["GPU-007-0"]))
        assert chosen.name == "n007"
        named = Resources(gpu_count=1, gpu_uuids=["GPU-007-1", "GPU-009-1"])
        error, described = refused(bench, monkeypatch, named)
        assert (error.reason, described) == (errors_pb2.ERROR_REASON_NO_FREE_GPU, 2)
        error, described = refused(bench, monkeypatch, Resources(gpu_count=1, gpu_uuids=["GPU-none"]))
        assert (error.reason, described) == (errors_pb2.ERROR_REASON_UNKNOWN_GPU, 0)

    on_bench(tmp_path, scenario)


def test_the_worker_of_a_named_gpu_is_told_if_it_is_out_of_contact(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(3):
            add_worker(bench, number, [FREE], "H100")
        del bench.fleet.sessions["worker-001"]
        away, other, known = CreateWorkloadRequest(), CreateWorkloadRequest(), CreateWorkloadRequest()
        away.gpu_uuids.append("GPU-001-0")
        other.CopyFrom(away)
        other.worker = "n000"
        known.spec.resources.gpu_uuids.append("GPU-001-0")
        elsewhere = CreateWorkloadRequest(worker="n000", spec=known.spec)
        for request, reason, message in (
            (away, errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE, "^worker n001 is "),
            (known, errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE, "^worker n001 is "),
            *(
                (
                    one,
                    errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                    "^GPU-001-0 belongs to worker n001, and the request names worker n000: ",
                )
                for one in (other, elsewhere)
            ),
        ):
            with pytest.raises(FleetError, match=message) as error:
                place(bench.fleet.reader, request)
            assert error.value.reason == reason
        known.spec.resources.gpu_uuids.append("GPU-002-0")
        known.spec.resources.gpu_count = 1
        assert place(bench.fleet.reader, known).name == "n002"
        known.worker = "n002"
        assert place(bench.fleet.reader, known).name == "n002"

    on_bench(tmp_path, scenario)
