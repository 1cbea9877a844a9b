"""What a hello may claim: by the bindings of enrolled workers."""

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.worker.v1.session_pb2 import Hello
from leasehold_coordinator.access.worker_bindings import WorkerBinding, WorkerBindings
from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.bound_workers import BOUND_GPU_LIMIT, find_binding

ALPHA = WorkerBinding("alpha", "worker-alpha", frozenset({"GPU-1", "GPU-2"}), epoch=3)


def hello(name: str = "alpha", worker_id: str = "worker-alpha", *gpus: str, last_epoch: int = 0) -> Hello:
    return Hello(
        name=name, worker_id=worker_id, gpus=[Gpu(uuid=uuid) for uuid in gpus], last_epoch=last_epoch
    )


def claim(
    claimed: Hello, *, certified: bool = True, restored: bool = False, epoch: int = 0
) -> WorkerBinding | None:
    """The binding that a hello brings about, where alpha is enrolled and has had this epoch."""
    bindings, registry = WorkerBindings(), Registry(5.0, 0.0)
    bindings.put(ALPHA)
    if epoch:
        registry.add_stored(hello(), epoch)
    return find_binding(bindings, registry, claimed, is_certified=certified, is_restored=restored)


@pytest.mark.parametrize("certified", [True, False], ids=["certificate", "token"])
@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        (hello("alpha", "worker-other"), errors_pb2.ERROR_REASON_IDENTITY_MISMATCH),
        (hello("beta", "worker-alpha"), errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID),
        (hello("beta", "worker-beta", "GPU-2"), errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU),
        (hello(last_epoch=4), errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION),
        (hello(last_epoch=2**62 - 2), errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION),
    ],
)
def test_what_belongs_to_another_is_refused(
    claimed: Hello, reason: ErrorReason.ValueType, certified: bool
) -> None:
    with pytest.raises(FleetError) as refusal:
        claim(claimed, certified=certified)
    assert refusal.value.reason == reason


def test_the_worker_itself_is_let_in() -> None:
    assert claim(hello("alpha", "worker-alpha", "GPU-1", last_epoch=3)) is None
    assert claim(hello(last_epoch=7), epoch=7) is None
    with pytest.raises(FleetError, match="never gave epoch 8"):
        claim(hello(last_epoch=8), epoch=7)


def test_a_restored_store_knows_no_later_epochs() -> None:
    assert claim(hello(last_epoch=8), epoch=7, restored=True) is None


def test_a_new_gpu_belongs_to_the_first_certificate_that_has_it() -> None:
    bound = claim(hello("alpha", "worker-alpha", "GPU-1", "GPU-3"))
    assert bound == WorkerBinding("alpha", "worker-alpha", ALPHA.gpu_uuids | {"GPU-3"}, epoch=3)
    assert claim(hello("beta", "worker-beta", "GPU-3")) == WorkerBinding(
        "beta", "worker-beta", frozenset({"GPU-3"})
    )
    assert claim(hello("beta", "worker-beta", "GPU-3"), certified=False) is None


def test_a_certificate_takes_no_worker_that_has_another_name() -> None:
    bindings, registry = WorkerBindings(), Registry(5.0, 0.0)
    registry.add_stored(hello(), 1)
    with pytest.raises(FleetError, match="belongs to the worker alpha"):
        find_binding(bindings, registry, hello("evil", "worker-alpha"), is_certified=True, is_restored=False)


def test_a_worker_can_not_claim_gpus_without_end() -> None:
    bindings, registry = WorkerBindings(), Registry(5.0, 0.0)

    def claim_256(turn: int) -> int:
        invented = [f"GPU-{turn}-{number}" for number in range(256)]
        claimed = hello("alpha", "worker-alpha", *invented)
        bound = find_binding(bindings, registry, claimed, is_certified=True, is_restored=False)
        assert bound is not None
        bindings.put(bound)
        return len(bound.gpu_uuids)

    assert [claim_256(turn) for turn in range(4)] == [256, 512, 768, BOUND_GPU_LIMIT]
    with pytest.raises(FleetError, match="of at most 1024") as refusal:
        claim_256(4)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION
