"""Moving a process between GPUs: the map's rules and its effect."""

from __future__ import annotations

import pytest
from leasehold_simgpu import SimulatedHost

from .conftest import MakeHost, StartProgram
from .programs import CHECKPOINTED, INVALID_VALUE, MIB, OUT_OF_MEMORY, SUCCESS, Program

UNKNOWN = "GPU-00000000-0000-4000-8000-000000000000"


def suspend(controller: Program, target: Program) -> None:
    controller.init()
    assert controller.lock(target.pid) == SUCCESS
    assert controller.checkpoint(target.pid) == SUCCESS


def resume(controller: Program, target: Program, pairs: list[list[str]]) -> None:
    assert controller.restore(target.pid, pairs) == SUCCESS
    assert controller.unlock(target.pid) == SUCCESS


def rotation(host: SimulatedHost) -> list[list[str]]:
    uuids = [gpu.uuid for gpu in host.gpus]
    return [[old, new] for old, new in zip(uuids, uuids[1:] + uuids[:1], strict=True)]


def test_a_rotation_visits_every_gpu_and_comes_home(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]
    _, address = target.allocate(3 * MIB)
    target.fill(address, 3 * MIB, 11)
    for expected in (1, 2, 3, 0):
        suspend(controller, target)
        resume(controller, target, rotation(host))
        assert target.device_uuids()[0] == uuids[expected]
        assert target.holds(address, 3 * MIB, 11)
        assert [gpu.used_bytes for gpu in host.gpus] == [
            3 * MIB if index == expected else 0 for index in range(4)
        ]


def test_the_target_speaks_of_its_new_gpu(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=2, context_bytes=0)
    host.hog(1, 5 * MIB)
    target, controller = start_program(host), start_program(host)
    target.set_up()
    before = target.memory_info()
    bus_before = target.call("cuDeviceGetPCIBusId", 16, 0)
    suspend(controller, target)
    resume(controller, target, rotation(host))
    assert target.memory_info()[0] == before[0] - 5 * MIB
    assert target.call("cuDeviceGetPCIBusId", 16, 0) != bus_before
    assert list(target.nvml_processes()[host.gpus[1].uuid]) == [str(target.pid)]


def test_two_processes_swap_their_gpus(host: SimulatedHost, start_program: StartProgram) -> None:
    controller, first, second = (start_program(host) for _ in range(3))
    first.set_up(0)
    second.set_up(1)
    uuids = [gpu.uuid for gpu in host.gpus]
    swap = [[uuids[0], uuids[1]], [uuids[1], uuids[0]], [uuids[2], uuids[2]], [uuids[3], uuids[3]]]
    for program in (first, second):
        suspend(controller, program)
    for program in (first, second):
        resume(controller, program, swap)
    assert first.device_uuids()[0] == uuids[1]
    assert second.device_uuids()[1] == uuids[0]


@pytest.mark.parametrize(
    "change",
    ["partial", "one pair", "unknown old", "unknown new", "old twice", "new twice", "too many"],
)
def test_a_map_that_is_no_permutation_of_all_gpus_is_refused(
    host: SimulatedHost, controller: Program, target: Program, change: str
) -> None:
    pairs = rotation(host)
    match change:
        case "partial":
            pairs.pop()
        case "one pair":
            pairs = [[host.gpus[0].uuid, host.gpus[1].uuid]]
        case "unknown old":
            pairs[3][0] = UNKNOWN
        case "unknown new":
            pairs[0][1] = UNKNOWN
        case "old twice":
            pairs[1][0] = pairs[0][0]
        case "new twice":
            pairs[1][1] = pairs[0][1]
        case "too many":
            pairs.append(pairs[0])
    suspend(controller, target)
    assert controller.restore(target.pid, pairs) == INVALID_VALUE
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    resume(controller, target, rotation(host))


def test_another_chip_is_refused(make_host: MakeHost, start_program: StartProgram) -> None:
    host = make_host(gpus=2, chip=["H100", "L4"])
    target, controller = start_program(host), start_program(host)
    target.set_up()
    suspend(controller, target)
    assert controller.restore(target.pid, rotation(host)) == INVALID_VALUE
    assert controller.restore(target.pid) == SUCCESS


def test_the_mask_of_visible_devices_does_not_shrink_the_map(
    host: SimulatedHost, start_program: StartProgram
) -> None:
    target = start_program(host, CUDA_VISIBLE_DEVICES=host.gpus[2].uuid)
    controller = start_program(host)
    target.set_up()
    suspend(controller, target)
    one = [[host.gpus[2].uuid, host.gpus[3].uuid]]
    assert controller.restore(target.pid, one) == INVALID_VALUE
    resume(controller, target, rotation(host))
    assert target.device_uuids() == [host.gpus[3].uuid]


def test_a_forgotten_count_restores_where_it_was(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    suspend(controller, target)
    assert controller.restore(target.pid, rotation(host), count=0) == SUCCESS
    assert target.device_uuids()[0] == host.gpus[0].uuid


def test_a_full_destination_wedges(host: SimulatedHost, controller: Program, target: Program) -> None:
    target.allocate(2 * MIB)
    suspend(controller, target)
    host.hog(1, host.gpus[1].memory_bytes)
    assert controller.restore(target.pid, rotation(host)) == OUT_OF_MEMORY
    assert controller.restore(target.pid) == 304
