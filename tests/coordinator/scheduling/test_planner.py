"""Where a new workload goes, and what it is told where it can't."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from leasehold.v1 import errors_pb2, lease_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.lease_pb2 import Cordon, ForeignProcess, GpuLease
from leasehold.v1.worker_pb2 import MachineResources
from leasehold.v1.workload_pb2 import Resources
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.scheduling.candidates import Candidate, CandidateGpu
from leasehold_coordinator.scheduling.planner import check_named_gpus, choose_worker
from leasehold_coordinator.scheduling.shortages import shortage_at_a_glance, shortage_of

from tests.coordinator.candidates import candidate, of_gpus, one_gpu

GIB = 2**30
LEASED, CORDONED, UNHEALTHY, FOREIGN = (
    lease_pb2.SLOT_STATE_LEASED,
    lease_pb2.SLOT_STATE_CORDONED,
    lease_pb2.SLOT_STATE_UNHEALTHY,
    lease_pb2.SLOT_STATE_FOREIGN,
)
REPAIR = Cordon(reason="repair", cordoned_by="ann")
NO_FREE_GPU = errors_pb2.ERROR_REASON_NO_FREE_GPU
SMALL = MachineResources(
    cpu_millicores_total=8000,
    cpu_millicores_free=1500,
    memory_total_bytes=16 * GIB,
    memory_free_bytes=GIB,
    disk_total_bytes=100 * GIB,
    disk_free_bytes=10 * GIB,
)
OTHER_GPUS = "ask for less, or for GPUs of another kind: `leasehold get gpus` lists them"


def ordered(candidates: list[Candidate]) -> list[Candidate]:
    """The same candidates as of a large fleet: those with most open GPUs first, and by name."""
    for number, one in enumerate(candidates):
        most = sum(gpu.state in (lease_pb2.SLOT_STATE_FREE, FOREIGN) for gpu in one.gpus.values())
        candidates[number] = replace(one, most=most)
    return sorted(candidates, key=lambda one: (-(one.most or 0), one.name))


def test_a_large_fleet_is_not_looked_through_for_each_workload() -> None:
    looked_at = iter(ordered([candidate(f"n{number:02}", True, True) for number in range(50)]))
    assert choose_worker(looked_at, Resources(gpu_count=1)).name == "n00"
    assert len(list(looked_at)) == 48


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_the_order_of_candidates_does_not_change_the_choice(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        check_order(seed)


def any_gpus(
    dice: random.Random, prefix: str, states: list[lease_pb2.SlotState.ValueType], units: Sequence[int] = (0,)
) -> list[CandidateGpu]:
    """Up to four GPUs in any of these states."""
    return [
        one_gpu(
            f"{prefix}-{slot}",
            state := dice.choice(states),
            memory_gib=dice.choice([40, 80]),
            units=dice.choice(units),
            awaited=dice.random() < 0.1,
            lent=state == LEASED and dice.random() < 0.5,
        )
        for slot in range(dice.randint(0, 4))
    ]


def check_order(seed: int) -> None:
    dice = random.Random(seed)
    states = [lease_pb2.SLOT_STATE_FREE] * 4 + [LEASED, CORDONED, UNHEALTHY, FOREIGN]
    fleet = []
    for number in range(dice.randint(1, 6)):
        gpus = any_gpus(dice, f"GPU-{number}", states)
        cordon = REPAIR if dice.random() < 0.1 else None
        fleet.append(of_gpus(f"n{number}", *gpus, promised=dice.choice([0, 0, 1]), cordon=cordon))
    resources = Resources(
        gpu_count=dice.randint(0, 2),
        gpu_memory_bytes=dice.choice([0, 50 * GIB]),
        allow_foreign=dice.random() < 0.5,
    )

    def outcome(candidates: list[Candidate]) -> str:
        try:
            return choose_worker(candidates, resources).name
        except FleetError as error:
            return error.message

    assert outcome(ordered(list(fleet))) == outcome(fleet), seed


def refusal(resources: Resources, *candidates: Candidate) -> tuple[ErrorReason.ValueType, str]:
    with pytest.raises(FleetError) as error:
        choose_worker(candidates, resources)
    return error.value.reason, error.value.message


def test_a_glance_sees_no_shortage_that_a_worker_does_not_have() -> None:
    dice = random.Random(1)
    states = [lease_pb2.SLOT_STATE_FREE, LEASED, CORDONED, UNHEALTHY, FOREIGN]
    seen = 0
    for number in range(500):
        gpus = any_gpus(dice, "GPU", states, units=[1, 2] if number % 2 else [0, 1, 2])
        cordon = REPAIR if dice.random() < 0.1 else None
        machine = SMALL if dice.random() < 0.5 else None
        one = replace(of_gpus(f"n{number}", *gpus, cordon=cordon), machine=machine)
        resources = Resources(
            gpu_count=dice.randint(0, 3),
            gpu_memory_bytes=dice.choice([0, 50 * GIB]),
            gpu_units=dice.choice([0, 0, 1, 4]),
            cpu_millicores=dice.choice([0, 2000]),
            allow_foreign=dice.random() < 0.5,
        )
        most = sum(gpu.lent or gpu.state in (lease_pb2.SLOT_STATE_FREE, FOREIGN) for gpu in gpus)
        facts = [gpu.gpu for gpu in gpus]
        glance = shortage_at_a_glance(one.name, cordon, facts, most, machine, resources)
        if glance is not None:
            seen += 1
            assert shortage_of(one, resources) is not None
    assert 100 < seen < 500


def test_the_most_room_wins_and_then_the_name() -> None:
    a, b, c = candidate("a", True), candidate("b", True, True), candidate("c", True, True, True, promised=1)
    for order in itertools.permutations([a, b, c]):
        assert choose_worker(order, Resources(gpu_count=2)) is b
    assert choose_worker([a], Resources()) is a


def test_without_any_worker_it_is_refused() -> None:
    assert refusal(Resources())[0] == errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE


def test_a_refusal_says_of_each_worker_why() -> None:
    states = (LEASED, LEASED, CORDONED, UNHEALTHY)
    alpha = of_gpus("alpha", *(one_gpu(f"GPU-{slot}", state) for slot, state in enumerate(states)))
    beta = candidate("beta", True, cordon=REPAIR)
    reason, message = refusal(Resources(gpu_count=1), alpha, beta)
    assert reason == NO_FREE_GPU
    assert message == (
        "requested 1 GPU; alpha: 4 GPUs, 2 leased, 1 cordoned, 1 unhealthy; "
        "beta: is cordoned (repair, by ann): suspend or stop a workload, uncordon a GPU, "
        "repair a GPU and reset its health, or ask for less"
    )


def test_the_remedy_for_too_few_gpus_is_for_their_states() -> None:
    gpus = [one_gpu("GPU-0", lease_pb2.SLOT_STATE_RESERVED), one_gpu("GPU-1", lease_pb2.SLOT_STATE_FOREIGN)]
    assert refusal(Resources(gpu_count=1), of_gpus("alpha", *gpus))[1].endswith(
        ": wait for a reserved GPU or name its hold, end or adopt a foreign process, or ask for less"
    )


@pytest.mark.parametrize(
    ("offered", "resources", "why"),
    [
        (
            candidate("a", True, False),
            Resources(gpu_count=2),
            "requested 2 GPUs; a: 2 GPUs, 1 free, 1 leased",
        ),
        (
            candidate("a", True, promised=1),
            Resources(gpu_count=1),
            "1 free, 1 promised to commands under way",
        ),
        (candidate("a"), Resources(gpu_count=1), "a: no GPU"),
        (of_gpus("a", one_gpu("GPU-a", awaited=True)), Resources(gpu_count=1), "1 awaited by a command"),
        (of_gpus("a", one_gpu("GPU-a", FOREIGN)), Resources(gpu_count=1), "1 with foreign processes"),
        (
            candidate("a", True),
            Resources(gpu_count=1, gpu_name="A100"),
            "requested 1 GPU, A100; a: 1 GPU, 1 of",
        ),
        (
            candidate("a", True),
            Resources(gpu_count=1, gpu_memory_bytes=81 * GIB),
            "requested 1 GPU, 81.0 GiB each; ",
        ),
        (
            of_gpus("a", one_gpu("GPU-a", units=4)),
            Resources(gpu_count=1, acceptable_gpu_units=[2, 8]),
            "1 of another kind",
        ),
        (
            of_gpus("a", one_gpu("GPU-a", units=4), one_gpu("GPU-b", units=2)),
            Resources(gpu_units=7),
            "requested GPUs of 7 units; a: 2 GPUs, 2 free, 6 units free",
        ),
        (of_gpus("a", one_gpu("GPU-a", LEASED, units=4)), Resources(gpu_units=1), "a: 1 GPU, 1 leased"),
    ],
)
def test_without_a_gpu_that_would_do_it_is_refused(
    offered: Candidate, resources: Resources, why: str
) -> None:
    reason, message = refusal(resources, offered)
    assert reason == NO_FREE_GPU
    assert why in message


@pytest.mark.parametrize(
    ("resources", "remedy"),
    [
        (Resources(gpu_count=1), "suspend or stop a workload, or ask for less"),
        (Resources(gpu_count=2), OTHER_GPUS),
        (Resources(gpu_count=1, gpu_name="A100"), OTHER_GPUS),
        (Resources(cpu_millicores=2000), "stop a workload, or ask for less"),
        (Resources(cpu_millicores=9000), "ask for less"),
    ],
)
def test_what_could_never_be_had_is_not_waited_for(resources: Resources, remedy: str) -> None:
    message = refusal(resources, candidate("a", False, machine=SMALL))[1]
    assert message.endswith(f": {remedy}")


def test_what_is_not_known_of_a_gpu_speaks_for_it() -> None:
    a = of_gpus("a", one_gpu("GPU-a"))
    a.gpus["GPU-a"].gpu.ClearField("memory_total_bytes")
    wanted = Resources(gpu_count=1, gpu_units=8, acceptable_gpu_units=[8], gpu_memory_bytes=GIB)
    assert choose_worker([a], wanted) is a


def test_what_helpers_hold_is_to_be_had_but_free_gpus_go_first() -> None:
    a = of_gpus("a", one_gpu("GPU-a", LEASED, lent=True))
    b = of_gpus("b", one_gpu("GPU-b"))
    assert choose_worker([a], Resources(gpu_count=1)) is a
    assert choose_worker([a, b], Resources(gpu_count=1)) is b
    assert "1 leased" in refusal(Resources(gpu_count=2), a)[1]


def test_the_kind_of_gpu_decides_between_workers() -> None:
    a = of_gpus("a", one_gpu("GPU-a0", name="A100", units=2), one_gpu("GPU-a1", name="A100", units=2))
    b = of_gpus("b", one_gpu("GPU-b0", units=4))
    for wanted, chosen in (
        (Resources(gpu_count=1), a),
        (Resources(gpu_count=1, gpu_name="H100"), b),
        (Resources(gpu_count=1, gpu_units=4), b),
        (Resources(gpu_units=4), a),
        (Resources(gpu_count=1, gpu_uuids=["GPU-b0"]), b),
        (Resources(gpu_count=2, acceptable_gpu_units=[2]), a),
    ):
        assert choose_worker([a, b], wanted) is chosen


def test_gpus_that_nobody_has_are_not_known() -> None:
    wanted = Resources(gpu_count=1, gpu_uuids=["GPU-x"])
    assert refusal(wanted, candidate("a", True))[0] == errors_pb2.ERROR_REASON_UNKNOWN_GPU


def test_a_gpu_with_foreign_processes_is_taken_where_that_is_allowed() -> None:
    a = of_gpus("a", one_gpu("GPU-a", FOREIGN))
    assert choose_worker([a], Resources(gpu_count=1, allow_foreign=True)) is a


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        (Resources(cpu_millicores=2500), "requested 2.5 cores; a: 1.5 of 8 cores free; b: is"),
        (Resources(memory_bytes=2 * GIB), "requested 2.0 GiB memory; a: 1.0 GiB of 16.0 GiB memory free"),
        (Resources(disk_bytes=11 * GIB, gpu_count=1), "a: 10.0 GiB of 100.0 GiB disk free"),
    ],
)
def test_where_only_the_machine_lacks_something_that_is_the_reason(resources: Resources, why: str) -> None:
    a = candidate("a", True, machine=SMALL)
    cordoned = candidate("b", cordon=REPAIR)
    reason, message = refusal(resources, a, cordoned)
    assert reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
    assert why in message
    unknown = candidate("c", True)
    assert choose_worker([a, unknown], resources) is unknown


def test_a_cordoned_worker_takes_nothing_at_all() -> None:
    reason, message = refusal(Resources(), candidate("a", True, cordon=REPAIR))
    assert reason == errors_pb2.ERROR_REASON_CORDONED
    assert message.startswith("requested a worker; a: is cordoned (repair, by ann): `leasehold uncordon`")


def test_a_refusal_names_only_the_first_of_many_workers() -> None:
    many = [candidate(f"w{number:03d}", cordon=Cordon(reason="x" * 256)) for number in range(500)]
    message = refusal(Resources(), *many)[1]
    assert "and 495 more" in message
    assert len(message) < 1000


def test_named_gpus_must_be_free_on_one_worker() -> None:
    a, b = candidate("a", True, False), candidate("b", True)
    assert check_named_gpus([a, b], ["GPU-b0"], Resources()) is b
    assert check_named_gpus([a, b], ["GPU-a0"], Resources(gpu_count=1)) is a
    for wanted, resources, reason in (
        (["GPU-a1"], Resources(), NO_FREE_GPU),
        (["GPU-a0", "GPU-a0"], Resources(), errors_pb2.ERROR_REASON_DUPLICATE_GPU),
        (["GPU-x"], Resources(), errors_pb2.ERROR_REASON_UNKNOWN_GPU),
        (["GPU-a0", "GPU-b0"], Resources(), errors_pb2.ERROR_REASON_UNKNOWN_GPU),
        (["GPU-a0"], Resources(gpu_count=2), errors_pb2.ERROR_REASON_INVALID_ARGUMENT),
        (["GPU-a0"], Resources(gpu_name="A100"), NO_FREE_GPU),
    ):
        with pytest.raises(FleetError) as error:
            check_named_gpus([a, b], wanted, resources)
        assert error.value.reason == reason


@pytest.mark.parametrize(
    ("state", "lease", "reason", "match"),
    [
        (
            CORDONED,
            GpuLease(cordon=REPAIR),
            errors_pb2.ERROR_REASON_CORDONED,
            r"is cordoned \(repair, by ann\)",
        ),
        (
            UNHEALTHY,
            GpuLease(health_reason="Xid 79"),
            errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
            r"is unhealthy \(Xid 79\)",
        ),
        (
            FOREIGN,
            GpuLease(foreign_processes=[ForeignProcess(pid=7, user="bob", command="python")]),
            errors_pb2.ERROR_REASON_FOREIGN_PROCESS,
            "is held by pid 7 of bob:",
        ),
        (LEASED, GpuLease(workload_id="w-1"), NO_FREE_GPU, "is leased for workload w-1:"),
    ],
)
def test_a_named_gpu_that_is_out_of_service_says_why(
    state: lease_pb2.SlotState.ValueType, lease: GpuLease, reason: int, match: str
) -> None:
    a = of_gpus("a", one_gpu("GPU-a", state, lease=lease))
    with pytest.raises(FleetError, match=match) as error:
        check_named_gpus([a], ["GPU-a"], Resources())
    assert error.value.reason == reason


def test_named_gpus_of_a_worker_that_lacks_something_else_are_refused() -> None:
    for offered, resources, reason in (
        (candidate("a", True, cordon=REPAIR), Resources(), errors_pb2.ERROR_REASON_CORDONED),
        (
            candidate("a", True, machine=SMALL),
            Resources(cpu_millicores=8000),
            errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
        ),
    ):
        with pytest.raises(FleetError) as error:
            check_named_gpus([offered], ["GPU-a0"], resources)
        assert error.value.reason == reason
