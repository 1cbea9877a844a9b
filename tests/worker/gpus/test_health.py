"""Verdicts on GPUs: from readings, and from Xids."""

from dataclasses import replace

import pynvml
import pytest
from leasehold.v1 import gpu_pb2
from leasehold_worker.gpus import health as gpu_health
from leasehold_worker.gpus.health import HARMLESS_XIDS, RESET_XIDS, HealthReading, excludes, judge, judge_xid

HEALTHY = HealthReading(
    ecc_uncorrected_errors=0,
    row_remap_pending=False,
    row_remap_failed=False,
    retired_pages=0,
    retired_pages_pending=False,
    mig_enabled=False,
    throttle_reasons=0,
)
SYMPTOMS: list[tuple[dict[str, int], gpu_pb2.GpuHealth.ValueType, str]] = [
    ({"lost": True}, gpu_pb2.GPU_HEALTH_LOST, "NVML reports the GPU as lost"),
    ({"reset_required": True}, gpu_pb2.GPU_HEALTH_XID_ERROR, "NVML reports that the GPU needs a reset"),
    ({"ecc_uncorrected_errors": 3}, gpu_pb2.GPU_HEALTH_ECC_FAILED, "3 uncorrectable memory errors"),
    ({"row_remap_failed": True}, gpu_pb2.GPU_HEALTH_ROW_REMAP_FAILED, "could not be replaced"),
    ({"row_remap_pending": True}, gpu_pb2.GPU_HEALTH_ROW_REMAP_FAILED, "waits to be replaced"),
    ({"retired_pages_pending": True}, gpu_pb2.GPU_HEALTH_PAGES_RETIRED, "waits to be retired"),
    ({"retired_pages": 60}, gpu_pb2.GPU_HEALTH_PAGES_RETIRED, "60 pages of its memory are retired"),
    ({"mig_enabled": True}, gpu_pb2.GPU_HEALTH_MIG_ENABLED, "MIG is on"),
    (
        {"throttle_reasons": 0x48},
        gpu_pb2.GPU_HEALTH_THROTTLED,
        "hardware slowdown, thermal limit, by hardware",
    ),
]
"""Each with its verdict, the worst first."""


def ill(*symptoms: dict[str, int]) -> HealthReading:
    reading = HEALTHY
    for symptom in symptoms:
        reading = replace(reading, **symptom)  # type: ignore[arg-type]
    return reading


@pytest.mark.parametrize(("symptom", "health", "says"), SYMPTOMS)
def test_each_symptom_has_its_verdict(
    symptom: dict[str, int], health: gpu_pb2.GpuHealth.ValueType, says: str
) -> None:
    verdict = judge(ill(symptom))
    assert verdict.health == health
    assert says in verdict.reason
    assert ": " in verdict.reason, "it says what to do"
    is_worn = symptom.get("retired_pages", 0) >= gpu_health.RETIRED_PAGES_LIMIT
    assert ("gpu reset-health WORKER/SLOT" in verdict.reason) == (excludes(health) and not is_worn)
    assert verdict.reason.endswith(": replace the GPU") == is_worn, "another GPU has no verdict to clear"


def test_the_worst_symptom_decides() -> None:
    symptoms = [symptom for symptom, _, _ in SYMPTOMS]
    for first, (symptom, _, _) in enumerate(SYMPTOMS):
        assert judge(ill(*symptoms[first:])) == judge(ill(symptom))


@pytest.mark.parametrize("reading", [HEALTHY, HealthReading()])
def test_nothing_known_against_a_gpu_is_healthy(reading: HealthReading) -> None:
    assert judge(reading) == gpu_health.Verdict(gpu_pb2.GPU_HEALTH_OK, "")


def test_wear_is_not_failure() -> None:
    assert judge(replace(HEALTHY, retired_pages=59)).health == gpu_pb2.GPU_HEALTH_OK


def test_only_troubled_clocks_are_throttled() -> None:
    everyday = (
        pynvml.nvmlClocksEventReasonGpuIdle
        | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
        | pynvml.nvmlClocksEventReasonSwPowerCap
        | pynvml.nvmlClocksEventReasonSyncBoost
        | pynvml.nvmlClocksEventReasonDisplayClockSetting
    )
    assert judge(replace(HEALTHY, throttle_reasons=everyday)).health == gpu_pb2.GPU_HEALTH_OK
    for reason in (
        pynvml.nvmlClocksEventReasonHwSlowdown,
        pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    ):
        slow = judge(replace(HEALTHY, throttle_reasons=everyday | reason))
        assert slow.health == gpu_pb2.GPU_HEALTH_THROTTLED


def test_all_but_the_healthy_and_the_slow_are_excluded() -> None:
    trusted = {health for health in gpu_pb2.GpuHealth.values() if not excludes(health)}
    assert trusted == {
        gpu_pb2.GPU_HEALTH_UNSPECIFIED,
        gpu_pb2.GPU_HEALTH_OK,
        gpu_pb2.GPU_HEALTH_THROTTLED,
    }


@pytest.mark.parametrize("xid", [48, 62, 64, 74, 95, 110, 119, 120, 136, 140, 143, 158])
def test_xids_that_call_for_a_reset_exclude(xid: int) -> None:
    verdict = judge_xid(xid)
    assert verdict is not None
    assert verdict.health == gpu_pb2.GPU_HEALTH_XID_ERROR
    assert verdict.reason.startswith(f"Xid {xid}, ")


def test_a_gpu_off_the_bus_is_lost() -> None:
    verdict = judge_xid(79)
    assert verdict is not None
    assert verdict.health == gpu_pb2.GPU_HEALTH_LOST


@pytest.mark.parametrize("xid", [*HARMLESS_XIDS, 999])
def test_what_programs_cause_and_what_nobody_knows_excludes_nothing(xid: int) -> None:
    assert judge_xid(xid) is None


def test_no_xid_is_in_both_tables() -> None:
    assert not RESET_XIDS.keys() & HARMLESS_XIDS.keys()


def test_a_gpu_whose_memory_is_not_repairable_is_diagnosed_and_replaced() -> None:
    assert judge(ill({"row_remap_failed": 1})).reason == (
        "a bad row of its memory could not be replaced: run NVIDIA's field diagnostic, and replace the GPU "
        "if the diagnostic fails; otherwise run `leasehold gpu reset-health WORKER/SLOT`"
    )
