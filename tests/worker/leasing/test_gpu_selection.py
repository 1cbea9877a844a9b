"""Which GPUs a request gets."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold.v1 import workload_pb2
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu, choose

from tests.examples import PATIENT

SAME_AS_BEFORE = workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE
SAME_NUMA_NODE = workload_pb2.GPU_PREFERENCE_SAME_NUMA_NODE
MOST_FREE_MEMORY = workload_pb2.GPU_PREFERENCE_MOST_FREE_MEMORY


def gpus_of(*units: int) -> list[PoolGpu]:
    return [PoolGpu(str(slot), units=each) for slot, each in enumerate(units)]


def on_nodes(*nodes: int | None) -> list[PoolGpu]:
    return [PoolGpu(str(slot), numa_node=node) for slot, node in enumerate(nodes)]


def chosen(gpus: list[PoolGpu], request: GpuRequest, **free_bytes: int) -> str | None:
    """The slots, as a word."""
    found = choose(gpus, request, {name.removeprefix("gpu"): size for name, size in free_bytes.items()})
    return None if found is None else "".join(found)


# Constraints.


def test_without_a_wish_it_is_the_lowest_slots() -> None:
    assert chosen(gpus_of(1, 1, 1), GpuRequest(2)) == "01"
    assert chosen(gpus_of(1, 1, 1)[::-1], GpuRequest(2)) == "21", "in the order that is given"


def test_too_few_are_none() -> None:
    assert chosen(gpus_of(1, 1), GpuRequest(3)) is None
    assert chosen([], GpuRequest(1)) is None


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (GpuRequest(1, name="B"), "1"),
        (GpuRequest(1, name="C"), None),
        (GpuRequest(1, memory_bytes=20), "1"),
        (GpuRequest(2, memory_bytes=20), None),
        (GpuRequest(1, gpu_uuids=("2", "1")), "1"),
        (GpuRequest(2, gpu_uuids=("2", "1")), "12"),
        (GpuRequest(2, gpu_uuids=("2",)), None),
        (GpuRequest(1, name="A", gpu_uuids=("1",)), None),
    ],
)
def test_all_that_is_asked_of_a_gpu_holds(request_: GpuRequest, expected: str | None) -> None:
    gpus = [PoolGpu("0", "A", 10), PoolGpu("1", "B", 20), PoolGpu("2", "A", None)]
    assert chosen(gpus, request_) == expected


def test_memory_that_is_unknown_is_not_enough_but_enough_for_who_does_not_ask() -> None:
    gpus = [PoolGpu("0", memory_bytes=None)]
    assert chosen(gpus, GpuRequest(1, memory_bytes=1)) is None
    assert chosen(gpus, GpuRequest(1)) == "0"


# Units.


def test_two_gpus_together_have_the_units() -> None:
    assert chosen(gpus_of(4, 4), GpuRequest(2, units=8)) == "01"
    assert chosen(gpus_of(4, 4), GpuRequest(1, units=8)) is None


def test_one_gpu_of_eight_units_is_found_beside_those_of_four() -> None:
    assert chosen(gpus_of(4, 4, 8), GpuRequest(1, units=8)) == "2"
    assert chosen(gpus_of(4, 4, 8), GpuRequest(2, units=8)) == "01"


def test_only_gpus_of_acceptable_units_will_do() -> None:
    assert chosen(gpus_of(4, 4), GpuRequest(1, acceptable_units=frozenset({8}))) is None
    assert chosen(gpus_of(4, 8, 4), GpuRequest(1, acceptable_units=frozenset({8}))) == "1"
    assert chosen(gpus_of(8, 2, 4), GpuRequest(1, units=3, acceptable_units=frozenset({2, 4}))) == "2"


def test_no_more_units_are_taken_than_needed() -> None:
    assert chosen(gpus_of(24, 16, 8), GpuRequest(1, units=2)) == "2"
    assert chosen(gpus_of(24, 16, 8), GpuRequest(2, units=30)) == "02"
    assert chosen(gpus_of(2, 8, 2, 8), GpuRequest(1, units=8)) == "1", "the lowest slot among equals"


def test_a_gpu_of_no_units_counts_as_none() -> None:
    assert chosen(gpus_of(0, 2), GpuRequest(1, units=1)) == "1"


# Preferences.


def test_the_gpus_of_before_go_first_then_the_lowest_slot() -> None:
    gpus = gpus_of(1, 1, 1, 1)
    assert chosen(gpus, GpuRequest(1, preference=SAME_AS_BEFORE, preferred=("2",))) == "2"
    assert chosen(gpus, GpuRequest(2, preference=SAME_AS_BEFORE, preferred=("2",))) == "20"
    assert chosen(gpus[:2], GpuRequest(1, preference=SAME_AS_BEFORE, preferred=("2", "gone"))) == "0"
    assert chosen(gpus, GpuRequest(1, preferred=("2",))) == "0", "it was not asked for"


def test_gpus_of_one_numa_node_go_together_where_that_is_possible() -> None:
    two = GpuRequest(2, preference=SAME_NUMA_NODE)
    assert chosen(on_nodes(0, 1, 1, 0), two) == "03", "the node of the lowest slot"
    assert chosen(on_nodes(0, 1, 1), two) == "12"
    assert chosen(on_nodes(0, 1, 2), two) == "01", "no node has as many"
    assert chosen(on_nodes(None, None, 1, 1), two) == "23"
    assert chosen(on_nodes(None, None), two) == "01", "an unknown node is not one node"


def test_those_with_most_free_memory_go_first_and_what_is_unknown_last() -> None:
    gpus = gpus_of(1, 1, 1)
    assert chosen(gpus, GpuRequest(2, preference=MOST_FREE_MEMORY), gpu1=5, gpu2=9) == "21"
    assert chosen(gpus, GpuRequest(1, preference=MOST_FREE_MEMORY)) == "0"
    assert chosen(gpus, GpuRequest(1, preference=MOST_FREE_MEMORY), gpu0=5, gpu2=5) == "0"


def test_units_count_more_than_preferences() -> None:
    request = GpuRequest(1, units=2, preference=SAME_AS_BEFORE, preferred=("0", "2"))
    assert chosen(gpus_of(8, 2, 2), request) == "2"


# In general.


requests = st.builds(
    GpuRequest,
    st.integers(1, 4),
    memory_bytes=st.integers(0, 3),
    name=st.sampled_from(["", "A", "B"]),
    units=st.integers(0, 9),
    acceptable_units=st.sets(st.integers(0, 4), max_size=2).map(frozenset),
    preference=st.sampled_from(workload_pb2.GpuPreference.values()),
    preferred=st.lists(st.sampled_from("012345")).map(tuple),
)
sets_of_gpus = st.lists(
    st.builds(
        PoolGpu,
        st.just(""),
        st.sampled_from(["A", "B"]),
        st.none() | st.integers(0, 3),
        units=st.integers(0, 4),
        numa_node=st.none() | st.integers(0, 1),
    ),
    max_size=6,
).map(
    lambda gpus: [
        PoolGpu(str(slot), gpu.name, gpu.memory_bytes, gpu.units, gpu.numa_node)
        for slot, gpu in enumerate(gpus)
    ]
)


@given(sets_of_gpus, st.integers(1, 4), st.integers(1, 9))
def test_for_units_it_is_the_first_combination_of_the_smallest_sum(
    gpus: list[PoolGpu], count: int, units: int
) -> None:
    sums = {some: sum(gpu.units for gpu in some) for some in combinations(gpus, count)}
    enough = [some for some in sums if sums[some] >= units]
    expected = "".join(gpu.uuid for gpu in min(enough, key=sums.__getitem__)) if enough else None
    assert chosen(gpus, GpuRequest(count, units=units)) == expected


def test_the_work_for_units_is_small_on_a_host_with_many_gpus() -> None:
    """The event loop does it for each waiting claim."""
    additions: list[int] = []

    class Units(int):
        def __radd__(self, other: int) -> int:
            additions.append(other)
            return other + int(self)

    gpus = [PoolGpu(f"{slot:02}", units=Units(2 + slot % 3)) for slot in range(16)]
    assert chosen(gpus, GpuRequest(8, units=23)) == "0001020304050607"
    assert len(additions) < 2000, "there are 12,870 combinations"


@pytest.mark.long
@PATIENT
@given(sets_of_gpus, requests)
def test_what_is_chosen_suffices_and_is_found_if_there_is_any(
    gpus: list[PoolGpu], request: GpuRequest
) -> None:
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    units = [
        sum(gpu.units for gpu in some)
        for some in combinations(filter(request.allows, gpus), request.count)
        if sum(gpu.units for gpu in some) >= request.units
    ]
    found = choose(gpus, request, {})
    assert (found is None) == (not units)
    if found is not None:
        assert len(set(found)) == request.count
        assert all(request.allows(by_uuid[uuid]) for uuid in found)
        if request.units:
            assert sum(by_uuid[uuid].units for uuid in found) == min(units)
