"""The target's side: what programs written with cuda.bindings and cuda.core see."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from cuda.bindings import driver
from leasehold_simgpu import CHIPS, SimulatedHost

from tests.grids import grid

from .conftest import MakeHost, StartProgram
from .programs import (
    COUNTER,
    INVALID_DEVICE,
    INVALID_VALUE,
    MIB,
    NO_DEVICE,
    NOT_INITIALIZED,
    OUT_OF_MEMORY,
    SUCCESS,
    Program,
    ProgramError,
    environment_of,
    wait_until,
)


def test_calls_before_cuinit_are_not_initialized(controller: Program) -> None:
    assert controller.call("cuDeviceGetCount")[0] == NOT_INITIALIZED
    assert controller.allocate(1)[0] == NOT_INITIALIZED


def test_cuda_ends_at_a_fork(target: Program) -> None:
    assert target.call_in_forked_child("cuInit") == NOT_INITIALIZED
    assert target.call_in_forked_child("cuDeviceTotalMem") == NOT_INITIALIZED
    target.memory_info()


@pytest.mark.parametrize("chip", grid(CHIPS, "H100", "L4"))
def test_every_chip_is_told_as_it_is(make_host: MakeHost, start_program: StartProgram, chip: str) -> None:
    host = make_host(gpus=1, chip=chip)
    program = start_program(host)
    program.set_up()
    facts = CHIPS[chip]
    assert program.call("cuDeviceTotalMem", 0) == [SUCCESS, facts.memory_bytes]
    assert program.call("cuDeviceComputeCapability", 0) == [SUCCESS, *facts.compute_capability]
    assert program.device_uuids() == [host.gpus[0].uuid]
    assert program.nvml("nvmlDeviceGetName", 0) == facts.name


def test_memory_is_accounted_across_processes(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=1, memory_bytes=100 * MIB, context_bytes=10 * MIB)
    first, second = start_program(host), start_program(host)
    first.set_up()
    second.set_up()
    assert first.memory_info() == [80 * MIB, 100 * MIB]
    _, address = first.allocate(50 * MIB)
    assert second.allocate(31 * MIB)[0] == OUT_OF_MEMORY
    assert second.allocate(30 * MIB)[0] == SUCCESS
    assert second.memory_info() == [0, 100 * MIB]
    assert first.free(address) == SUCCESS
    assert second.memory_info() == [50 * MIB, 100 * MIB]


def test_a_context_needs_its_memory_too(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=1, memory_bytes=100 * MIB, context_bytes=60 * MIB)
    start_program(host).set_up()
    second = start_program(host)
    second.init()
    assert second.call("cuDevicePrimaryCtxRetain", 0)[0] == OUT_OF_MEMORY


def test_a_suspended_process_leaves_its_memory_to_others(
    make_host: MakeHost, start_program: StartProgram
) -> None:
    host = make_host(gpus=1, memory_bytes=100 * MIB, context_bytes=0)
    first, second = start_program(host), start_program(host)
    first.set_up()
    second.set_up()
    assert first.allocate(80 * MIB)[0] == SUCCESS
    assert second.allocate(60 * MIB)[0] == OUT_OF_MEMORY
    assert second.lock(first.pid) == second.checkpoint(first.pid) == SUCCESS
    assert second.allocate(60 * MIB)[0] == SUCCESS
    assert second.restore(first.pid) == OUT_OF_MEMORY


def test_a_killed_process_gives_its_memory_back(
    host: SimulatedHost, target: Program, controller: Program
) -> None:
    target.allocate(5 * MIB)
    assert host.gpus[0].used_bytes == 5 * MIB
    target.kill()
    assert host.gpus[0].used_bytes == 0
    assert host.processes() == ()
    controller.set_up()
    assert controller.memory_info()[0] == host.gpus[0].memory_bytes


def test_addresses_outside_an_allocation_are_refused(target: Program) -> None:
    _, address = target.allocate(MIB)
    assert target.call("cuMemsetD8", address, 1, MIB) == [SUCCESS]
    assert target.call("cuMemsetD8", address, 1, MIB + 1) == [INVALID_VALUE]
    assert target.call("cuMemsetD8", address + MIB, 1, 1) == [INVALID_VALUE]
    assert target.call("cuMemcpyDtoD", address, address + 1, MIB) == [INVALID_VALUE]
    assert target.free(address + 1) == INVALID_VALUE
    assert target.free(address) == SUCCESS
    assert target.free(address) == INVALID_VALUE
    assert target.allocate(0)[0] == INVALID_VALUE


def test_pinned_memory_is_known_by_its_address(target: Program) -> None:
    attribute = driver.CUpointer_attribute
    _, text = target.call("cuMemHostAlloc", 4096, 0)
    address = int(text)
    expected = {
        attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: int(driver.CUmemorytype.CU_MEMORYTYPE_HOST),
        attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER: address + 1,
        attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER: address + 1,
        attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED: 0,
        attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: 0,
        attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: address,
        attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE: 4096,
        attribute.CU_POINTER_ATTRIBUTE_MAPPED: 1,
    }
    assert {name: target.pointer_attribute(int(name), address + 1) for name in expected} == expected
    assert target.call("cuMemFreeHost", address) == [SUCCESS]
    assert target.call("cuMemFreeHost", address) == [INVALID_VALUE]
    with pytest.raises(ProgramError, match="INVALID_VALUE"):
        target.pointer_attribute(int(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE), address)


def test_no_two_buffers_have_the_same_id(target: Program) -> None:
    on_gpu = [int(target.allocate(4096)[1]) for _ in range(2)]
    pinned = [int(target.call("cuMemHostAlloc", 4096, 0)[1]) for _ in range(2)]
    kind = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID)
    assert len({target.pointer_attribute(kind, address) for address in (*on_gpu, *pinned)}) == 4


def test_pinned_memory_can_be_filled(target: Program) -> None:
    _, text = target.call("cuMemHostAlloc", 4096, 0)
    address = int(text)
    assert target.call("cuMemsetD8", address, 7, 4096) == [SUCCESS]
    assert target.call("cuMemsetD16Async", address + 2, 0x0101, 2047, 0) == [SUCCESS]
    assert target.host_bytes(address, 4) == [7, 7, 1, 1]
    assert target.call("cuMemsetD8", address + 1, 7, 4096) == [INVALID_VALUE]


def test_a_pool_gives_no_bytes_to_who_asks_for_none(host: SimulatedHost, target: Program) -> None:
    assert target.call("cuMemAllocAsync", 0, 0) == [SUCCESS, "<CUdeviceptr 0>"]
    assert target.call("cuMemFreeAsync", 0, 0) == [SUCCESS]
    assert host.gpus[0].used_bytes == 0


def test_the_cuda_runtime_says_that_it_is_not_supported(host: SimulatedHost) -> None:
    """And not that it needs a newer driver."""
    source = """
        import os
        os.dup2(1, 2)
        from cuda.bindings import runtime

        for _ in range(2):
            error = runtime.cudaGetDeviceCount()[0]
        print(error.name)
    """
    said = run_source(host, source)
    assert said.count("the CUDA runtime API is not simulated") == 1
    assert said.splitlines()[-1] == "cudaErrorNotSupported"


def test_a_reset_frees_what_was_allocated(host: SimulatedHost, target: Program) -> None:
    target.allocate(MIB)
    assert target.call("cuDevicePrimaryCtxReset", 0) == [SUCCESS]
    assert host.gpus[0].used_bytes == 0
    assert target.allocate(MIB)[0] == 709
    target.set_up()
    assert target.allocate(MIB)[0] == SUCCESS


def run_source(host: SimulatedHost, source: str, **environment: str) -> str:
    """Runs a program to its end and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=environment_of(host.environment(), **environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_copies_fills_streams_and_events(host: SimulatedHost) -> None:
    source = """
        from cuda.bindings import driver

        def ok(answer):
            assert answer[0] == 0, answer[0]
            return answer[1] if len(answer) > 1 else None

        ok(driver.cuInit(0))
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        size = 4096
        a, b = int(ok(driver.cuMemAlloc(size))), int(ok(driver.cuMemAlloc(size)))
        stream = ok(driver.cuStreamCreate(1))
        first, second = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
        ok(driver.cuEventRecord(first, stream))
        ok(driver.cuMemsetD8(a, 0x11, size))
        ok(driver.cuMemsetD16(a + 1024, 0x2233, 512))
        ok(driver.cuMemsetD32Async(a + 2048, 0x44556677, 256, stream))
        ok(driver.cuMemcpyDtoDAsync(b, a, size, stream))
        ok(driver.cuEventRecord(second, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuStreamQuery(stream))
        ok(driver.cuEventSynchronize(second))
        assert ok(driver.cuEventElapsedTime(first, second)) >= 0
        found = bytearray(size)
        ok(driver.cuMemcpyDtoHAsync(found, b, size, stream))
        expected = b"\\x11" * 1024 + b"\\x33\\x22" * 512 + b"\\x77\\x66\\x55\\x44" * 256 + b"\\x11" * 1024
        assert found == expected
        pinned = int(ok(driver.cuMemHostAlloc(size, 0)))
        ok(driver.cuMemcpy(pinned, b, size))
        ok(driver.cuMemcpy(a, pinned, size))
        ok(driver.cuMemcpyDtoH(found, a, size))
        assert found == expected
        ok(driver.cuMemFreeHost(pinned))
        ok(driver.cuEventDestroy(first))
        ok(driver.cuStreamDestroy(stream))
        ok(driver.cuCtxSynchronize())
        context = ok(driver.cuCtxCreate(None, 0, 1))
        assert int(ok(driver.cuCtxGetDevice())) == 1
        ok(driver.cuCtxDestroy(context))
        assert ok(driver.cuGetErrorName(driver.CUresult(2))) == b"CUDA_ERROR_OUT_OF_MEMORY"
        assert ok(driver.cuGetErrorString(driver.CUresult(600))) == b"device not ready"
        print("done")
    """
    assert run_source(host, source) == "done"


def test_cuda_core_runs(host: SimulatedHost) -> None:
    source = """
        from cuda.bindings import driver
        from cuda.core import Device, EventOptions

        device = Device(0)
        device.set_current()
        print("GPU-" + device.uuid, device.name, device.arch, sep="|")
        stream = device.create_stream()
        one, two = (device.allocate(4096, stream=stream) for _ in range(2))
        one.fill(7, stream=stream)
        two.copy_from(one, stream=stream)
        options = EventOptions(timing_enabled=True)
        start, end = stream.record(options=options), stream.record(options=options)
        stream.sync()
        assert end - start >= 0
        found = bytearray(4096)
        assert driver.cuMemcpyDtoH(found, int(two.handle), 4096)[0] == 0
        assert found == b"\\x07" * 4096
        one.close(stream)
        two.close(stream)
        assert device.properties.multiprocessor_count == 132
        stream.close()
    """
    assert run_source(host, source) == f"{host.gpus[0].uuid}|NVIDIA H100 80GB HBM3|90"


def test_cuda_core_finds_the_device_of_nvml(host: SimulatedHost) -> None:
    """It asks NVML for the UUID without prefix."""
    source = """
        from cuda.core import Device

        for device in Device.get_all_devices():
            found = device.to_system_device()
            print(found.uuid, found.pci_info.bus_id)
    """
    expected = [f"{gpu.uuid} 00000000:{0x0F + 0x0F * gpu.index:02X}:00.0" for gpu in host.gpus]
    assert run_source(host, source).splitlines() == expected


def visible(host: SimulatedHost, start_program: StartProgram, value: str) -> list[int] | int:
    program = start_program(host, CUDA_VISIBLE_DEVICES=value)
    result = program.init()
    if result != SUCCESS:
        return int(result)
    index = {gpu.uuid: gpu.index for gpu in host.gpus}
    return [index[uuid] for uuid in program.device_uuids()]


@pytest.mark.long
def test_cuda_visible_devices(host: SimulatedHost, start_program: StartProgram) -> None:
    """Most entries were seen on 580.159.04 with one GPU."""
    uuids = [gpu.uuid for gpu in host.gpus]
    expected: dict[str, list[int] | int] = {
        "2,0": [2, 0],
        " 1 , 3 ": [1, 3],
        "0,9,1": [0],
        "1,-1,2": [1],
        "1,x": [1],
        "3,": [3],
        "0,,1": [0],
        "": NO_DEVICE,
        ",0": NO_DEVICE,
        "-1": NO_DEVICE,
        "-1,0": NO_DEVICE,
        "9,0": NO_DEVICE,
        "abc,0": NO_DEVICE,
        "NoDevFiles": NO_DEVICE,
        "MIG-x": NO_DEVICE,
        uuids[1]: [1],
        uuids[1].upper(): [1],
        f"{uuids[3]},{uuids[0]}": [3, 0],
        uuids[2][:12]: [2],
        "GPU-": NO_DEVICE,
        "GPU-zzz": NO_DEVICE,
    }
    for value, gpus in expected.items():
        assert visible(host, start_program, value) == gpus, value


@pytest.mark.long
def test_an_index_of_cuda_visible_devices_is_read_like_atoi(
    host: SimulatedHost, start_program: StartProgram
) -> None:
    """Seen on 580.159.04."""
    zeros = "0x1", "0abc", "0;1", "0.5", "-0", "+0", " 0", "\t0", "0\n", "00", "0x", "4294967296"
    for value in zeros:
        assert visible(host, start_program, value) == [0], value
    for value in ("010", "08", "2147483648"):
        assert visible(host, start_program, value) == NO_DEVICE, value
    assert visible(host, start_program, "1x,02 y") == [1, 2]


@pytest.mark.long
def test_a_gpu_that_is_named_twice_is_an_invalid_device(
    host: SimulatedHost, start_program: StartProgram
) -> None:
    """Seen on 580.159.04. An invalid entry in between ends the list before the second name."""
    uuid = host.gpus[0].uuid
    for value in ("0,0", "0, 0", "0x0,0", f"{uuid},{uuid}", f"{uuid},{uuid[:12]}", "1,0,1"):
        assert visible(host, start_program, value) == INVALID_DEVICE, value
    for value in ("0,,0", "0,9,0", "0,-1,0"):
        assert visible(host, start_program, value) == [0], value


@pytest.mark.long
def test_cuda_visible_devices_has_indices_or_uuids(host: SimulatedHost, start_program: StartProgram) -> None:
    """Seen on 580.159.04: an entry of the other kind ends the list, also if the entry names a GPU again."""
    uuids = [gpu.uuid for gpu in host.gpus]
    assert visible(host, start_program, f"0,{uuids[0]},1") == [0]
    assert visible(host, start_program, f"0,{uuids[1]}") == [0]
    assert visible(host, start_program, f"{uuids[1]},0") == [1]
    assert visible(host, start_program, f"{uuids[1]},1,{uuids[2]}") == [1]


def test_no_host_is_no_device(start_program: StartProgram, host: SimulatedHost, tmp_path: object) -> None:
    program = start_program(host, LEASEHOLD_SIMGPU_DIR=str(tmp_path))
    assert program.init() == NO_DEVICE
    assert program.nvml_system("nvmlDeviceGetCount") == 9


@pytest.mark.long
def test_the_counter_counts_without_a_gap(host: SimulatedHost) -> None:
    done = subprocess.run(
        [sys.executable, str(COUNTER), "--bytes", "3MiB", "--interval-s", "0", "--counts", "300"],
        env=environment_of(host.environment()),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [f"count={count} gpu={host.gpus[0].uuid} ok" for count in range(300)]


def test_the_counter_ends_cleanly_when_told(host: SimulatedHost) -> None:
    counter = subprocess.Popen(
        [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "60"],
        env=environment_of(host.environment()),
        stdout=subprocess.PIPE,
    )
    with counter:
        assert counter.stdout is not None
        assert counter.stdout.readline().startswith(b"count=0 ")
        counter.terminate()
        assert counter.wait(timeout=30) == 0
    wait_until(lambda: not host.processes(), "the counter is gone")
