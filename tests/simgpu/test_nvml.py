"""NVML follows the state that the driver's side is in."""

from __future__ import annotations

import sys

import pynvml
import pytest
from leasehold_simgpu import CHIPS, SimulatedHost

from .conftest import MakeHost, StartProgram
from .programs import MIB, SUCCESS, Program

NVML_NOT_SUPPORTED, NOT_FOUND, GPU_IS_LOST, INVALID_ARGUMENT = 3, 6, 15, 2


def test_the_list_of_processes_follows_the_checkpoint_state(
    make_host: MakeHost, start_program: StartProgram
) -> None:
    host = make_host(gpus=2, context_bytes=10 * MIB)
    controller, target = start_program(host), start_program(host)
    first, second = (gpu.uuid for gpu in host.gpus)
    target.set_up()
    target.allocate(5 * MIB)
    controller.init()
    listed = {first: {str(target.pid): 15 * MIB}, second: {}}
    nothing: dict[str, dict[str, int]] = {first: {}, second: {}}
    moved = {first: {}, second: {str(target.pid): 15 * MIB}}

    assert controller.nvml_processes() == listed
    assert controller.lock(target.pid) == SUCCESS
    assert controller.nvml_processes() == listed
    assert controller.checkpoint(target.pid) == SUCCESS
    assert controller.nvml_processes() == nothing
    assert controller.nvml("nvmlDeviceGetMemoryInfo", 0)["used"] == 0
    assert controller.restore(target.pid, [[first, second], [second, first]]) == SUCCESS
    assert controller.nvml_processes() == moved
    assert controller.unlock(target.pid) == SUCCESS
    assert controller.nvml_processes() == moved
    assert controller.nvml("nvmlDeviceGetMemoryInfo", 1)["used"] == 15 * MIB
    target.kill()
    assert controller.nvml_processes() == nothing


@pytest.mark.parametrize("version", [None, pynvml.nvmlMemory_v2])
def test_nvml_can_be_unable_to_read_memory(
    host: SimulatedHost, controller: Program, version: int | None
) -> None:
    """As on chips that share the host's memory."""
    host.set_fault("nvmlDeviceGetMemoryInfo", error=NVML_NOT_SUPPORTED)
    assert controller.nvml("nvmlDeviceGetMemoryInfo", 0, version) == NVML_NOT_SUPPORTED


def test_a_process_without_a_context_is_not_listed(host: SimulatedHost, controller: Program) -> None:
    controller.init()
    assert all(not processes for processes in controller.nvml_processes().values())
    assert [process.pid for process in host.processes()] == [controller.pid]


@pytest.mark.long
def test_more_processes_than_room_are_asked_for_twice(
    host: SimulatedHost, controller: Program, start_program: StartProgram
) -> None:
    programs = [start_program(host) for _ in range(5)]
    for program in programs:
        program.set_up()
    listed = controller.nvml_processes()[host.gpus[0].uuid]
    assert sorted(listed) == sorted(str(program.pid) for program in programs)


def test_the_facts_of_a_gpu(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=3, chip="A100", seed=1)
    program = start_program(host)
    memory = CHIPS["A100"].memory_bytes
    host.hog(1, 3 * MIB)
    assert program.nvml_system("nvmlDeviceGetCount") == 3
    assert program.nvml_system("nvmlSystemGetDriverVersion") == "580.95.05"
    assert program.nvml_system("nvmlSystemGetNVMLVersion") == "13.580.95.05"
    assert program.nvml_system("nvmlSystemGetCudaDriverVersion") == 13000
    assert program.nvml_system("nvmlDeviceGetHandleByUUID", host.gpus[2].uuid) == 2
    assert program.nvml_system("nvmlDeviceGetHandleByUUID", "GPU-nope") == NOT_FOUND
    assert program.nvml_system("nvmlDeviceGetHandleByIndex", 3) == INVALID_ARGUMENT
    pci = program.nvml("nvmlDeviceGetPciInfo", 1)
    assert program.nvml_system("nvmlDeviceGetHandleByPciBusId", pci["busId"]) == 1
    assert pci["pciDeviceId"] & 0xFFFF == 0x10DE
    assert program.nvml("nvmlDeviceGetUUID", 0) == host.gpus[0].uuid
    assert program.nvml("nvmlDeviceGetName", 0) == "NVIDIA A100-SXM4-80GB"
    assert program.nvml("nvmlDeviceGetCudaComputeCapability", 0) == [8, 0]
    assert len({program.nvml("nvmlDeviceGetSerial", index) for index in range(3)}) == 3
    expected = {"total": memory, "used": 3 * MIB, "free": memory - 3 * MIB}
    assert program.nvml("nvmlDeviceGetMemoryInfo", 1) == expected
    second = program.nvml("nvmlDeviceGetMemoryInfo", 1, 0x2000028)
    assert {name: second[name] for name in expected} == expected
    assert program.nvml("nvmlDeviceGetPowerManagementLimit", 0) == 400_000
    assert [program.nvml("nvmlDeviceGetMinorNumber", index) for index in range(3)] == [0, 1, 2]


def test_a_gpu_is_found_by_its_uuid_without_prefix_and_by_its_serial(
    host: SimulatedHost, controller: Program
) -> None:
    uuid = host.gpus[2].uuid.removeprefix("GPU-")
    assert controller.nvml_system("nvmlDeviceGetHandleByUUID", uuid) == 2
    assert controller.nvml_system("nvmlDeviceGetHandleByUUID", uuid[:-1]) == NOT_FOUND
    serial = controller.nvml("nvmlDeviceGetSerial", 1)
    assert controller.nvml_system("nvmlDeviceGetHandleBySerial", serial) == 1
    assert controller.nvml_system("nvmlDeviceGetHandleBySerial", serial[:-1]) == NOT_FOUND


@pytest.mark.parametrize(
    ("chip", "architecture", "brand"),
    [
        ("T4", pynvml.NVML_DEVICE_ARCH_TURING, pynvml.NVML_BRAND_TESLA),
        ("A100", pynvml.NVML_DEVICE_ARCH_AMPERE, pynvml.NVML_BRAND_NVIDIA),
        ("A10G", pynvml.NVML_DEVICE_ARCH_AMPERE, pynvml.NVML_BRAND_NVIDIA),
        ("L4", pynvml.NVML_DEVICE_ARCH_ADA, pynvml.NVML_BRAND_NVIDIA),
        ("H200", pynvml.NVML_DEVICE_ARCH_HOPPER, pynvml.NVML_BRAND_NVIDIA),
        ("B200", pynvml.NVML_DEVICE_ARCH_BLACKWELL, pynvml.NVML_BRAND_NVIDIA),
    ],
)
def test_the_architecture_and_brand_of_a_chip(
    make_host: MakeHost, start_program: StartProgram, chip: str, architecture: int, brand: int
) -> None:
    program = start_program(make_host(gpus=1, chip=chip))
    assert program.nvml("nvmlDeviceGetArchitecture", 0) == architecture
    assert program.nvml("nvmlDeviceGetBrand", 0) == brand


def test_what_monitors_ask_of_every_gpu(host: SimulatedHost, target: Program) -> None:
    """What gpustat and nvitop call first: each function exists, and some answer NOT_SUPPORTED."""
    answers = {
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetFanSpeed": NVML_NOT_SUPPORTED,
        "nvmlDeviceGetNumFans": 0,
        "nvmlDeviceGetPerformanceState": 0,
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetDisplayActive": 0,
        "nvmlDeviceGetDisplayMode": 0,
        "nvmlDeviceGetBAR1MemoryInfo": NVML_NOT_SUPPORTED,
        "nvmlDeviceGetConfComputeMemSizeInfo": NVML_NOT_SUPPORTED,
        "nvmlDeviceGetDriverModel": NVML_NOT_SUPPORTED,
        "nvmlDeviceGetMaxMigDeviceCount": NVML_NOT_SUPPORTED,
    }
    assert {call: target.nvml(call, 0) for call in answers} == answers
    assert target.nvml("nvmlDeviceGetFanSpeed_v2", 0, 0) == NVML_NOT_SUPPORTED
    assert target.nvml("nvmlDeviceGetClockInfo", 0, pynvml.NVML_CLOCK_SM) == NVML_NOT_SUPPORTED
    assert target.nvml("nvmlDeviceGetMaxClockInfo", 0, pynvml.NVML_CLOCK_SM) == NVML_NOT_SUPPORTED
    assert target.nvml("nvmlDeviceGetPcieThroughput", 0, pynvml.NVML_PCIE_UTIL_TX_BYTES) == 0
    assert target.nvml("nvmlDeviceGetProcessUtilization", 0, 0) == NOT_FOUND
    assert target.nvml("nvmlDeviceGetTemperatureV", 0, pynvml.NVML_TEMPERATURE_GPU) == 30
    host.lose_gpu(0)
    assert target.nvml("nvmlDeviceGetFanSpeed", 0) == GPU_IS_LOST


@pytest.mark.parametrize(("driver_version", "branch"), [("580.95.05", "r580_00"), ("620.10", "r620_00")])
def test_the_branch_of_a_driver(
    make_host: MakeHost, start_program: StartProgram, driver_version: str, branch: str
) -> None:
    program = start_program(make_host(gpus=1, driver_version=driver_version))
    assert program.driver_branch() == branch


def test_the_name_of_a_process(target: Program) -> None:
    assert target.nvml_system("nvmlSystemGetProcessName", target.pid) == sys.executable
    assert target.nvml_system("nvmlSystemGetProcessName", 2**22 + 1) == NOT_FOUND


def test_clients_of_mps_are_listed_as_such(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    other = start_program(host)
    other.set_up()
    target.allocate(MIB)
    first = host.gpus[0].uuid
    assert controller.nvml_processes(mps=True)[first] == {}
    host.set_mps_client(target.pid)
    assert controller.nvml_processes(mps=True)[first] == {str(target.pid): MIB}
    assert sorted(controller.nvml_processes()[first]) == sorted([str(target.pid), str(other.pid)])
    host.set_mps_client(target.pid, enabled=False)
    assert controller.nvml_processes(mps=True)[first] == {}
    host.set_fault("nvmlDeviceGetMPSComputeRunningProcesses", error=999)
    assert controller.nvml("nvmlDeviceGetMPSComputeRunningProcesses", 0) == 999


def test_what_processes_take_can_be_hidden(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    elsewhere = start_program(host)
    elsewhere.set_up(1)
    target.allocate(MIB)
    first, second = host.gpus[0].uuid, host.gpus[1].uuid
    host.set_readings(0, hides_process_memory=True)
    host.set_mps_client(target.pid)
    listed = controller.nvml_processes()
    assert (listed[first], listed[second]) == ({str(target.pid): None}, {str(elsewhere.pid): 0})
    assert controller.nvml_processes(mps=True)[first] == {str(target.pid): None}
    assert controller.nvml("nvmlDeviceGetMemoryInfo", 0)["used"] == MIB
    host.set_readings(0, hides_process_memory=False)
    assert controller.nvml_processes()[first] == {str(target.pid): MIB}


def test_the_readings_are_what_was_set(host: SimulatedHost, controller: Program) -> None:
    host.set_readings(
        2,
        utilization_percent=97,
        memory_utilization_percent=41,
        encoder_percent=5,
        decoder_percent=6,
        temperature_c=88,
        power_mw=640_000,
        ecc_corrected=12,
        ecc_uncorrected=3,
        mig_enabled=True,
    )
    assert controller.nvml("nvmlDeviceGetUtilizationRates", 2) == {"gpu": 97, "memory": 41}
    assert controller.nvml("nvmlDeviceGetEncoderUtilization", 2)[0] == 5
    assert controller.nvml("nvmlDeviceGetDecoderUtilization", 2)[0] == 6
    assert controller.nvml("nvmlDeviceGetTemperature", 2, 0) == 88
    assert controller.nvml("nvmlDeviceGetPowerUsage", 2) == 640_000
    assert controller.nvml("nvmlDeviceGetTotalEccErrors", 2, 0, 0) == 12
    assert controller.nvml("nvmlDeviceGetTotalEccErrors", 2, 1, 0) == 3
    assert controller.nvml("nvmlDeviceGetMigMode", 2) == [1, 1]
    assert controller.nvml("nvmlDeviceGetMigMode", 1) == [0, 0]
    assert controller.nvml("nvmlDeviceGetPersistenceMode", 2) == 0
    host.set_persistence_mode(True)
    assert controller.nvml("nvmlDeviceGetPersistenceMode", 2) == 1


def test_a_lost_gpu_takes_no_other_with_it(host: SimulatedHost, controller: Program, target: Program) -> None:
    host.lose_gpu(0)
    assert controller.nvml("nvmlDeviceGetName", 0) == GPU_IS_LOST
    assert controller.nvml("nvmlDeviceGetName", 1) == "NVIDIA H100 80GB HBM3"
    assert controller.nvml_system("nvmlDeviceGetCount") == 4
    assert target.allocate(MIB)[0] == 999
    host.lose_gpu(0, lost=False)
    assert target.allocate(MIB)[0] == SUCCESS


@pytest.mark.parametrize("call", ["nvmlDeviceGetMemoryInfo", "nvmlInit"])
def test_any_call_can_be_made_to_fail(host: SimulatedHost, controller: Program, call: str) -> None:
    host.set_fault(call, error=999, times=1)
    if call == "nvmlInit":
        assert controller.nvml_system("nvmlDeviceGetCount") == 999
    assert controller.nvml("nvmlDeviceGetMemoryInfo", 0) == (
        999
        if call != "nvmlInit"
        else {
            "total": host.gpus[0].memory_bytes,
            "used": 0,
            "free": host.gpus[0].memory_bytes,
        }
    )
