"""On which GPUs a parked workload wakes."""

import pytest
from leasehold.v1 import errors_pb2
from leasehold_worker.driver.device_memory import check_memory
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.facts import FreeMemory
from leasehold_worker.leasing.leases import FOREIGN, LEASED, RESERVED
from leasehold_worker.planning.destinations import choose_gpus

CHIPS = {"a": "H100", "b": "H100", "c": "H100", "d": "L4"}


def test_the_same_gpus_are_taken_if_they_are_free() -> None:
    assert choose_gpus(["b", "a"], ["a", "b", "c"], CHIPS, FreeMemory({}), {"a": 1, "b": 1}) == (
        GpuPair("b", "b"),
        GpuPair("a", "a"),
    )


def test_one_that_is_taken_is_replaced_by_the_first_free_of_its_chip() -> None:
    assert choose_gpus(["a", "b"], ["d", "c", "b"], CHIPS, FreeMemory({}), {"a": 1, "b": 1}) == (
        GpuPair("a", "c"),
        GpuPair("b", "b"),
    )


def test_one_with_too_little_memory_is_passed_over() -> None:
    free_bytes = {"a": 10, "b": 10, "c": 100}
    assert choose_gpus(["a"], ["a", "b", "c"], CHIPS, FreeMemory(free_bytes), {"a": 50}) == (
        GpuPair("a", "c"),
    )


def test_no_gpu_of_the_chip_is_refused() -> None:
    with pytest.raises(OperationError) as error:
        choose_gpus(["a"], ["d"], CHIPS, FreeMemory({}), {})
    assert error.value.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU


def test_free_gpus_for_earlier_claims_are_told() -> None:
    with pytest.raises(OperationError) as error:
        choose_gpus(["a"], ["d"], CHIPS, FreeMemory({}), {}, claimed=["a", "d"], claims=2)
    assert error.value.message == (
        "1 H100 free for a, reserved for earlier claims; 2 claims wait: "
        "wait until they have got GPUs, or name the GPUs with --to"
    )
    with pytest.raises(OperationError, match=r"can replace a: suspend or stop a workload$"):
        choose_gpus(["a"], ["d"], CHIPS, FreeMemory({}), {}, claims=2)


def test_the_remedy_is_for_the_states_of_equal_gpus() -> None:
    states = {"a": RESERVED, "b": FOREIGN, "d": LEASED}  # d has another chip
    remedy = "wait for a reserved GPU or name its hold, or end or adopt a foreign process"
    with pytest.raises(OperationError, match=f"no free H100 can replace a: {remedy}"):
        choose_gpus(["a"], ["d"], CHIPS, FreeMemory({}), {}, states=states)


def test_too_little_memory_everywhere_is_refused() -> None:
    with pytest.raises(OperationError) as error:
        choose_gpus(["a"], ["b"], CHIPS, FreeMemory({"b": 10}), {"a": 50})
    assert error.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY
    assert "b has 10 B free" in error.value.message


def test_unknown_memory_is_not_taken_for_none() -> None:
    check_memory([GpuPair("a", "b")], FreeMemory({}), {"a": 50})


def test_unknown_memory_that_others_share_is_refused_and_passed_over() -> None:
    with pytest.raises(OperationError) as error:
        check_memory([GpuPair("a", "b")], FreeMemory({}, shared=frozenset("b")), {"a": 50})
    assert error.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY
    assert error.value.metadata == {"gpu_uuid": "b"}
    check_memory([GpuPair("a", "b")], FreeMemory({"b": 60}, shared=frozenset("b")), {"a": 50})
    assert choose_gpus(["a"], ["a", "b", "c"], CHIPS, FreeMemory({}, shared=frozenset("ab")), {"a": 50}) == (
        GpuPair("a", "c"),
    )


def test_an_unknown_need_takes_an_empty_gpu_only() -> None:
    with pytest.raises(
        OperationError, match="does not report how much memory the workload needs on b"
    ) as refused:
        check_memory([GpuPair("a", "b")], FreeMemory({"b": 2**40}), {})
    assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY
    check_memory([GpuPair("a", "b")], FreeMemory({"b": 60}, empty=frozenset("b")), {})
    free_bytes = {"a": 60, "b": 60, "c": 60}
    assert choose_gpus(["a"], ["a", "b", "c"], CHIPS, FreeMemory(free_bytes, empty=frozenset("c")), {}) == (
        GpuPair("a", "c"),
    )
