"""What people may call a GPU."""

import pytest
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold_client.arguments.gpu_names import (
    has_ids,
    pair_in_order,
    resolve_gpu,
    resolve_list,
    resolve_pair,
    with_places,
)
from leasehold_client.errors import UsageError

A = "GPU-aaaa1111-0000-0000-0000-000000000000"
B = "GPU-aaaa2222-0000-0000-0000-000000000000"
C = "GPU-cccc3333-0000-0000-0000-000000000000"
GPUS = [
    FleetGpu(worker_id="worker-1", worker_name="alpha", gpu=Gpu(uuid=A, slot=0)),
    FleetGpu(worker_id="worker-1", worker_name="alpha", gpu=Gpu(uuid=B, slot=1)),
    FleetGpu(worker_id="worker-2", worker_name="beta", gpu=Gpu(uuid=C, slot=0)),
]


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        (A, A),
        (A.removeprefix("GPU-"), A),
        (A.upper(), A),
        ("GPU-aaaa1", A),
        ("aaaa2", B),
        ("c", C),
        ("alpha/1", B),
        ("worker-2/0", C),
    ],
)
def test_names_that_mean_one_gpu(name: str, uuid: str) -> None:
    assert resolve_gpu(name, GPUS) == uuid


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("", "a GPU's name is empty"),
        ("aaaa", "is a prefix of 2 UUIDs"),
        ("GPU-", "is a prefix of 3 UUIDs"),
        ("ffff", "no GPU has a UUID that begins with 'ffff'"),
        ("alpha/2", "no GPU is at 'alpha/2'"),
        ("gamma/0", "no GPU is at 'gamma/0'"),
        ("alpha/one", "write the slot as a number, such as alpha/0"),
        ("/", "write the slot as a number"),
    ],
)
def test_names_that_do_not(name: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        resolve_gpu(name, GPUS)


def test_a_whole_uuid_wins_over_a_longer_one() -> None:
    short = FleetGpu(worker_id="worker-3", worker_name="gamma", gpu=Gpu(uuid="GPU-aaaa", slot=0))
    assert resolve_gpu("GPU-AAAA", [*GPUS, short]) == "GPU-aaaa"


def test_several_workers_of_one_name() -> None:
    twin = FleetGpu(worker_id="worker-3", worker_name="alpha", gpu=Gpu(uuid="GPU-dddd", slot=0))
    with pytest.raises(UsageError, match="several workers are named 'alpha'"):
        resolve_gpu("alpha/0", [*GPUS, twin])


def test_pairs_and_lists() -> None:
    assert resolve_pair("alpha/0=cccc", GPUS) == (A, C)
    assert resolve_list("alpha/1, beta/0", GPUS) == [B, C]
    assert pair_in_order([A, B], [C, A]) == [(A, C), (B, A)]
    for text in ("alpha/0", "=alpha/0", "alpha/0=", "="):
        with pytest.raises(UsageError, match="is not a pair"):
            resolve_pair(text, GPUS)
    with pytest.raises(UsageError, match="names a GPU twice"):
        resolve_list("alpha/0,aaaa1", GPUS)
    with pytest.raises(UsageError, match="the list has 1 GPUs, and the workload holds 2"):
        pair_in_order([A, B], [C])


def test_a_text_names_workloads_and_keeps_paths() -> None:
    found = with_places(
        "workload w-0123456789ab: check /w-0123456789ab/output.log", {"w-0123456789ab": "one"}
    )
    assert found == "workload one: check /w-0123456789ab/output.log"


def test_commands_and_quoted_uuids_keep_their_ids() -> None:
    command = f"`leasehold gpu unbind {A}`"
    places = {A: "alpha/0", "w-0123456789ab": "one"}
    found = with_places(f"GPU {A} belongs to worker/beta: unbind it with {command}, or look at {A}", places)
    assert found == f"GPU alpha/0 belongs to worker/beta: unbind it with {command}, or look at alpha/0"
    quoted = f"the GPU '{A}' belongs to no worker"
    assert with_places(quoted, places) == quoted
    assert with_places("no workload has the name 'w-0123456789ab'", places).endswith("the name 'one'")
    assert has_ids(f"{A}: {command}")
    assert not has_ids(command)
    assert not has_ids(quoted)
