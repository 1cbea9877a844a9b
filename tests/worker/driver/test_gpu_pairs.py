"""The map that the driver wants, as a permutation of every GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold.v1 import errors_pb2
from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs, rebase_pairs
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.uuids import normalize_uuid

from tests.examples import PATIENT

A, B, C, D = (f"GPU-0000000{i}-0000-0000-0000-000000000000" for i in range(4))
H100 = dict.fromkeys([A, B, C, D], "H100")
MIXED = {A: "H100", B: "L4", C: "H100", D: "L4"}


def as_dict(pairs: tuple[GpuPair, ...]) -> dict[str, str]:
    return {pair.old_uuid: pair.new_uuid for pair in pairs}


def test_a_single_move_becomes_a_swap() -> None:
    assert as_dict(complete_pairs([GpuPair(A, B)], H100)) == {A: B, B: A, C: C, D: D}


def test_a_chain_is_closed() -> None:
    assert as_dict(complete_pairs([GpuPair(A, B), GpuPair(B, C)], H100)) == {A: B, B: C, C: A, D: D}


def test_a_map_that_moves_nothing_is_dropped() -> None:
    assert complete_pairs([GpuPair(A, A), GpuPair(C, C)], H100) == ()
    assert complete_pairs([], H100) == ()


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([GpuPair(A, B), GpuPair(A, C)], errors_pb2.ERROR_REASON_DUPLICATE_GPU),
        ([GpuPair(A, C), GpuPair(B, C)], errors_pb2.ERROR_REASON_DUPLICATE_GPU),
        ([GpuPair(A, "GPU-x")], errors_pb2.ERROR_REASON_UNKNOWN_GPU),
        ([GpuPair("GPU-x", A)], errors_pb2.ERROR_REASON_UNKNOWN_GPU),
    ],
)
def test_wrong_pairs_are_refused(pairs: list[GpuPair], reason: int) -> None:
    with pytest.raises(OperationError) as error:
        complete_pairs(pairs, H100)
    assert error.value.reason == reason


def test_a_gpu_of_another_host_is_refused_as_such() -> None:
    with pytest.raises(
        OperationError, match="GPU-x is not a GPU of this host, and a workload can't move to another host"
    ):
        complete_pairs([GpuPair(A, "GPU-x")], H100)


def test_another_chip_is_refused() -> None:
    with pytest.raises(OperationError) as error:
        complete_pairs([GpuPair(A, B)], MIXED)
    assert error.value.reason == errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU


def test_completion_stays_within_a_chip() -> None:
    assert as_dict(complete_pairs([GpuPair(A, C)], MIXED)) == {A: C, C: A, B: B, D: D}


@PATIENT
@given(st.permutations([A, B, C, D]), st.integers(0, 4))
def test_every_part_of_a_permutation_completes_to_one(order: list[str], count: int) -> None:
    part = [GpuPair(old, new) for old, new in list(zip(H100, order, strict=True))[:count]]
    completed = as_dict(complete_pairs(part, H100))
    if completed:
        assert sorted(completed) == sorted(completed.values()) == sorted(H100)
        assert all(completed[pair.old_uuid] == pair.new_uuid for pair in part)
    else:
        assert all(pair.old_uuid == pair.new_uuid for pair in part)


def test_a_displaced_process_is_mapped_from_where_it_is() -> None:
    displacement = complete_pairs([GpuPair(A, B)], H100)
    onwards = complete_pairs([GpuPair(A, C)], H100)
    assert as_dict(rebase_pairs(onwards, displacement))[B] == C
    assert as_dict(rebase_pairs((), displacement))[B] == A
    assert rebase_pairs(displacement, displacement) == (), "it is there already"
    assert rebase_pairs(onwards, ()) == onwards


@pytest.mark.parametrize("text", [A, A.removeprefix("GPU-"), A.lower(), f" {A} "])
def test_uuids_are_normalized(text: str) -> None:
    assert normalize_uuid(text) == A


@pytest.mark.parametrize("text", ["", "0", "GPU-", "GPU-123", A + "0", "MIG-" + A])
def test_what_is_not_a_uuid_is_refused(text: str) -> None:
    with pytest.raises(OperationError) as error:
        normalize_uuid(text)
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
