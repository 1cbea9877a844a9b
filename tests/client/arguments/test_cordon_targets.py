"""What people may name to take out of service."""

import pytest
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold_client.arguments.cordon_targets import CordonTarget, find_targets
from leasehold_client.errors import UsageError

from tests.client.scripted_coordinator import GPUS, A, B, C

WORKERS = [Worker(worker_id="w-1", name="alpha"), Worker(worker_id="w-2", name="beta")]


def test_gpus_of_a_worker_are_one_target_and_whole_workers_others() -> None:
    assert find_targets(["alpha/1", "w-2", "beta/0", A, "alpha"], WORKERS, GPUS) == [
        CordonTarget("w-1", (B, A), "alpha/1, alpha/0"),
        CordonTarget("w-2", (C,), "beta/0"),
        CordonTarget("w-2", (), "beta"),
        CordonTarget("w-1", (), "alpha"),
    ]
    assert find_targets(["bbbb"], (), GPUS) == [CordonTarget("w-1", (B,), "alpha/1")]


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["gamma"], "no worker is named 'gamma', and no GPU has a UUID that begins with 'gamma'"),
        (["gamma/0"], "^no GPU is at 'gamma/0'"),
        (["alpha/0", "aaaa"], "alpha/0 is named twice: name each GPU once"),
        (["alpha", "w-1"], "'w-1' names worker alpha a second time"),
        (["twin"], "several workers are named 'twin': write the id of a worker"),
        (["abad"], "'abad' is both the name of a worker and a prefix of a GPU's UUID"),
        ([""], "a GPU's name is empty"),
    ],
)
def test_what_means_nothing_or_several_things_is_bad_usage(names: list[str], match: str) -> None:
    others = [
        Worker(worker_id=f"w-{number}", name=name) for number, name in enumerate(["twin", "twin", "abad"], 7)
    ]
    gpus = [*GPUS, FleetGpu(worker_id="w-1", worker_name="alpha", gpu=Gpu(uuid="GPU-abad", slot=2))]
    with pytest.raises(UsageError, match=match):
        find_targets(names, [*WORKERS, *others], gpus)


def test_a_worker_whose_name_means_a_gpu_too_is_named_by_its_id() -> None:
    both = [Worker(worker_id="w-9", name="aaaa")]
    assert find_targets(["w-9"], both, GPUS) == [CordonTarget("w-9", (), "aaaa")]
    assert find_targets([A], both, GPUS) == [CordonTarget("w-1", (A,), "alpha/0")]


def test_only_gpus_have_a_health() -> None:
    with pytest.raises(UsageError, match=r"^no GPU has a UUID"):
        find_targets(["alpha"], (), GPUS)
