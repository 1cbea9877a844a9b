"""Why GPUs can't be had, and what would help."""

from datetime import UTC, datetime

import pytest
from leasehold.v1 import errors_pb2, gpu_pb2
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.leasing.leases import Cordon, ForeignProcess, Lease, LeaseId, SlotLease, Standing
from leasehold_worker.leasing.refusals import cordoned, not_enough, not_free, shortage

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REPAIR = Cordon("repair", "ann", NOW)
STRANGER = ForeignProcess(4711, "al", "nvtop", 2**30)
XID = gpu_pb2.GPU_HEALTH_XID_ERROR
Reason = errors_pb2.ErrorReason

FREE = SlotLease("GPU-f", 0, NOW)
LEASED = SlotLease("GPU-l", 1, NOW, Lease(LeaseId("l-1"), "w-1", ("GPU-l",), NOW, 1))
RESERVED = SlotLease("GPU-r", 2, NOW, Lease(LeaseId("l-2"), "w-2", ("GPU-r",), NOW, 2), reserved=True)
CORDONED = SlotLease("GPU-c", 3, NOW, standing=Standing(REPAIR))
UNHEALTHY = SlotLease("GPU-u", 4, NOW, standing=Standing(None, XID, "Xid 79"))
FOREIGN = SlotLease("GPU-s", 5, NOW, foreign=(STRANGER,))


@pytest.mark.parametrize(
    ("count", "slots", "reason"),
    [
        (1, [LEASED], Reason.ERROR_REASON_NO_FREE_GPU),
        (1, [FOREIGN, LEASED], Reason.ERROR_REASON_FOREIGN_PROCESS),
        (1, [UNHEALTHY, LEASED], Reason.ERROR_REASON_GPU_UNHEALTHY),
        (1, [CORDONED, LEASED], Reason.ERROR_REASON_CORDONED),
        (1, [CORDONED, UNHEALTHY, FOREIGN], Reason.ERROR_REASON_CORDONED),
        (1, [UNHEALTHY, FOREIGN], Reason.ERROR_REASON_GPU_UNHEALTHY),
        (2, [FREE, CORDONED], Reason.ERROR_REASON_CORDONED),
        (2, [CORDONED, LEASED], Reason.ERROR_REASON_NO_FREE_GPU),
        (2, [CORDONED, UNHEALTHY], Reason.ERROR_REASON_NO_FREE_GPU),
        (1, [FREE, CORDONED], Reason.ERROR_REASON_NO_FREE_GPU),
        (1, [], Reason.ERROR_REASON_NO_FREE_GPU),
    ],
)
def test_the_reason_is_what_alone_keeps_as_many_gpus_away(
    count: int, slots: list[SlotLease], reason: Reason.ValueType
) -> None:
    refusal = not_enough(GpuRequest(count), slots, 0)
    assert refusal.reason == reason
    assert refusal.metadata == {"field": "gpu_count"}


def test_strangers_are_no_reason_for_who_allows_them() -> None:
    request = GpuRequest(2, allow_foreign=True)
    refusal = not_enough(request, [FOREIGN, LEASED], 0)
    assert refusal.reason == Reason.ERROR_REASON_NO_FREE_GPU
    assert refusal.message == (
        "2 GPUs needed: 2 match, 1 free (1 leased): suspend or stop a workload, or wait"
    )


def test_a_shortage_tells_what_there_is() -> None:
    slots = [FREE, LEASED, RESERVED, CORDONED, UNHEALTHY, FOREIGN]
    assert shortage(GpuRequest(3), slots) == (
        "3 GPUs needed: 6 match, 1 free (1 leased, 1 reserved, 1 cordoned, 1 unhealthy, 1 foreign)"
    )
    assert shortage(GpuRequest(1), [FREE, FREE]) == (
        "1 GPU needed: 2 match, 2 free, reserved for earlier claims"
    )
    assert shortage(GpuRequest(1, units=9), [FREE]) == ("1 GPU with 9 units needed: 1 match, 1 free")
    assert shortage(GpuRequest(1), []) == "1 GPU needed: 0 match, 0 free"


def test_those_who_wait_are_told() -> None:
    assert not_enough(GpuRequest(1), [FREE], 2).message == (
        "1 GPU needed: 1 match, 1 free, reserved for earlier claims; 2 claims wait: "
        "suspend or stop a workload, or wait"
    )


@pytest.mark.parametrize(
    ("slot", "reason", "message"),
    [
        (
            LEASED,
            Reason.ERROR_REASON_NO_FREE_GPU,
            "GPU-l is leased for workload w-1: choose another, or suspend its holder",
        ),
        (
            RESERVED,
            Reason.ERROR_REASON_NO_FREE_GPU,
            "GPU-r is reserved for workload w-2: choose another, or suspend its holder",
        ),
        (
            UNHEALTHY,
            Reason.ERROR_REASON_GPU_UNHEALTHY,
            "GPU-u is excluded by its health (Xid 79): choose another, or mend it and reset its health",
        ),
        (
            FOREIGN,
            Reason.ERROR_REASON_FOREIGN_PROCESS,
            "GPU-s is held by process 4711 of user al: choose another, end that process, or adopt it",
        ),
        (
            CORDONED,
            Reason.ERROR_REASON_CORDONED,
            "GPU-c is cordoned by ann (repair): choose another, or uncordon it",
        ),
    ],
)
def test_a_gpu_by_name_is_refused_with_its_own_reason(
    slot: SlotLease, reason: Reason.ValueType, message: str
) -> None:
    refusal = not_free(slot)
    assert (refusal.reason, refusal.message) == (reason, message)
    assert refusal.metadata == {"gpu_uuid": slot.gpu_uuid}


@pytest.mark.parametrize(
    ("slot", "own"),
    [
        (LEASED, "suspend its holder"),
        (UNHEALTHY, "mend it and reset its health"),
        (FOREIGN, "end that process, adopt it"),
        (CORDONED, "uncordon it"),
    ],
)
def test_a_gpu_for_a_sleeping_workload_has_no_replacement(slot: SlotLease, own: str) -> None:
    message = not_free(slot, is_asleep=True).message
    assert "choose another" not in message
    elsewhere = "suspend the sleeping workload by cuda_suspend and restore it on another GPU"
    assert message.endswith(f": {own}, or {elsewhere}")


def test_a_process_of_which_nothing_is_known_is_told_as_such() -> None:
    slot = SlotLease("GPU-s", 0, NOW, foreign=(ForeignProcess(1, "", "", None),))
    assert "held by process 1 of user unknown:" in not_free(slot).message


def test_a_cordon_of_nobody_is_somebodys() -> None:
    assert "cordoned by somebody (why)" in cordoned("the worker", Cordon("why", "", NOW)).message
