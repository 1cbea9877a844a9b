"""What NVML says of a GPU's health, and its Xid events, as nvidia-ml-py reads them."""

from __future__ import annotations

import pynvml
import pytest
from leasehold_simgpu import InvalidSettingError, SimulatedHost, ThrottleReason

from .conftest import MakeHost, StartProgram
from .programs import Program

INVALID_ARGUMENT, NOT_SUPPORTED, TIMEOUT, FUNCTION_NOT_FOUND, GPU_IS_LOST = 2, 3, 10, 13, 15
SINGLE_BIT, DOUBLE_BIT = 0, 1
XID = pynvml.nvmlEventTypeXidCriticalError


def test_throttle_reasons_are_those_of_nvml() -> None:
    words = {
        reason: f"nvmlClocksEventReason{reason.name.title().replace('_', '')}"
        for reason in ThrottleReason
        if reason.name is not None
    }
    assert {reason: getattr(pynvml, word) for reason, word in words.items()} == {
        reason: reason.value for reason in words
    }


def test_rows_are_remapped_from_ampere_on(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=2, chip=["A100", "T4"])
    program = start_program(host)
    assert program.nvml("nvmlDeviceGetRemappedRows", 0) == [0, 0, 0, 0]
    host.set_readings(
        0,
        remapped_rows_corrected=3,
        remapped_rows_uncorrected=2,
        row_remap_pending=True,
        row_remap_failed=True,
    )
    assert program.nvml("nvmlDeviceGetRemappedRows", 0) == [3, 2, 1, 1]
    assert program.nvml("nvmlDeviceGetRemappedRows", 1) == NOT_SUPPORTED


@pytest.mark.parametrize("version", ["", "_v2"])
def test_pages_are_retired_before_ampere(
    make_host: MakeHost, start_program: StartProgram, version: str
) -> None:
    host = make_host(gpus=2, chip=["T4", "H100"])
    program = start_program(host)
    listing = f"nvmlDeviceGetRetiredPages{version}"
    assert program.nvml(listing, 0, DOUBLE_BIT) == []
    assert program.nvml("nvmlDeviceGetRetiredPagesPendingStatus", 0) == 0
    host.set_readings(0, retired_pages_single_bit=40, retired_pages_double_bit=2, retired_pages_pending=True)
    pages = [program.nvml(listing, 0, cause) for cause in (SINGLE_BIT, DOUBLE_BIT)]
    assert [len(found) for found in pages] == [40, 2]
    addresses = [page["address"] if version else page for found in pages for page in found]
    assert len(set(addresses)) == 42
    assert program.nvml("nvmlDeviceGetRetiredPagesPendingStatus", 0) == 1
    assert program.nvml(listing, 0, 2) == INVALID_ARGUMENT
    assert program.nvml(listing, 1, DOUBLE_BIT) == NOT_SUPPORTED
    assert program.nvml("nvmlDeviceGetRetiredPagesPendingStatus", 1) == NOT_SUPPORTED


@pytest.mark.parametrize("word", ["Event", "Throttle"])
def test_throttling_is_told_by_the_new_name_and_the_old(
    host: SimulatedHost, controller: Program, word: str
) -> None:
    call = f"nvmlDeviceGetCurrentClocks{word}Reasons"
    assert controller.nvml(call, 1) == 0
    host.set_readings(1, throttle_reasons=ThrottleReason.HW_SLOWDOWN | ThrottleReason.HW_THERMAL_SLOWDOWN)
    assert controller.nvml(call, 1) == 0x48
    assert controller.nvml(call, 0) == 0


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetMigMode",
    ],
)
def test_each_question_can_be_unknown_to_the_library_and_knows_a_lost_gpu(
    host: SimulatedHost, controller: Program, call: str
) -> None:
    arguments = (1, 0) if call == "nvmlDeviceGetTotalEccErrors" else ()
    host.set_fault(call, error=FUNCTION_NOT_FOUND, times=1)
    assert controller.nvml(call, 0, *arguments) == FUNCTION_NOT_FOUND
    assert controller.nvml(call, 0, *arguments) != FUNCTION_NOT_FOUND
    host.lose_gpu(0)
    assert controller.nvml(call, 0, *arguments) == GPU_IS_LOST


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_there_may_be_no_events(host: SimulatedHost, controller: Program, call: str) -> None:
    host.set_fault(call, error=NOT_SUPPORTED)
    assert controller.listen([0]) == NOT_SUPPORTED


def test_an_xid_reaches_each_who_registered_for_its_gpu_before(
    host: SimulatedHost, controller: Program, start_program: StartProgram
) -> None:
    other, late = start_program(host), start_program(host)
    assert controller.nvml("nvmlDeviceGetSupportedEventTypes", 0) == XID
    assert controller.listen([0, 1, 2]) == 0
    assert other.listen([1]) == 0
    host.raise_xid(0, 48)
    host.raise_xid(host.gpus[1].uuid, 79)
    host.raise_xid(1, 13)
    host.raise_xid(3, 95)
    assert late.listen([0, 1, 2, 3]) == 0
    assert [controller.next_event() for _ in range(3)] == [[0, XID, 48], [1, XID, 79], [1, XID, 13]]
    assert [other.next_event() for _ in range(2)] == [[1, XID, 79], [1, XID, 13]]
    assert [program.next_event(0) for program in (controller, other, late)] == [TIMEOUT] * 3
    assert controller.stop_listening() == 0


def test_who_waits_for_an_event_gets_it_at_once(host: SimulatedHost, controller: Program) -> None:
    controller.listen([2])
    controller.begin("next_event")
    assert controller.is_waiting()
    host.raise_xid(2, 63)
    assert controller.answer() == [2, XID, 63]


def test_who_does_not_listen_misses_the_oldest_events(host: SimulatedHost, controller: Program) -> None:
    controller.listen([0])
    for xid in range(1, 41):
        host.raise_xid(0, xid)
    assert [controller.next_event(0)[2] for _ in range(32)] == list(range(9, 41))
    assert controller.next_event(0) == TIMEOUT


def test_waiting_ends_when_a_gpu_is_lost(host: SimulatedHost, controller: Program) -> None:
    controller.listen([0, 1])
    controller.begin("next_event")
    assert controller.is_waiting()
    host.lose_gpu(1)
    assert controller.answer() == GPU_IS_LOST
    host.raise_xid(1, 79)
    assert controller.next_event() == [1, 8, 79]
    assert controller.listen([0, 1]) == GPU_IS_LOST


def test_events_go_wrong_as_other_calls_do(host: SimulatedHost, controller: Program) -> None:
    assert controller.listen([0], types=pynvml.nvmlEventTypePState | XID) == NOT_SUPPORTED
    controller.listen([0])
    host.set_fault("nvmlEventSetWait", error=999, times=1)
    assert [controller.next_event(0) for _ in range(2)] == [999, TIMEOUT]
    host.set_fault("nvmlEventSetFree", error=999, times=1)
    assert [controller.stop_listening() for _ in range(2)] == [999, 0]
    with pytest.raises(InvalidSettingError, match="Xid 0 is out of range"):
        host.raise_xid(0, 0)
    with pytest.raises(InvalidSettingError, match="GPU 9 is not on the host"):
        host.raise_xid(9, 48)
