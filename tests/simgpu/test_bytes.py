"""Device memory lies on a simulated GPU: checkpoints copy it out and poison it, restores copy it in."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold_simgpu import GIB, ProcessState, SimulatedHost
from leasehold_simgpu.state_file import StateFile

from tests.grids import grid

from .conftest import MakeHost, StartProgram
from .programs import (
    CHECKPOINTED,
    LOCKED,
    MIB,
    NOT_INITIALIZED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    RUNNING,
    SUCCESS,
    Program,
    environment_of,
    wait_until,
)

POISON = 0xDB
EVICT = 1
"""SIMGPU_EVICT of state.h."""


def written_bytes(host: SimulatedHost, gpu: int) -> int:
    """What the memory of a GPU takes in the file system."""
    files = (host.directory / "memory").glob(f"{gpu}-*")
    return sum(file.stat().st_blocks * 512 for file in files)


def filled(program: Program, size: int = MIB, seed: int = 7) -> int:
    """The address of a new allocation with a pattern in it."""
    error, address = program.allocate(size)
    assert error == SUCCESS
    program.fill(address, size, seed)
    assert isinstance(address, int)
    return address


def suspend(controller: Program, target: Program) -> None:
    assert controller.lock(target.pid, 5000) == SUCCESS
    assert controller.checkpoint(target.pid) == SUCCESS


def resume(controller: Program, target: Program, pairs: list[list[str]] | None = None) -> None:
    assert controller.restore(target.pid, pairs) == SUCCESS
    assert controller.unlock(target.pid) == SUCCESS


def turn(host: SimulatedHost) -> list[list[str]]:
    """The map that leads each GPU to the next one."""
    uuids = [gpu.uuid for gpu in host.gpus]
    return [[old, new] for old, new in zip(uuids, uuids[1:] + uuids[:1], strict=True)]


def permissions_at(pid: int, address: int) -> str:
    """How a process may use the memory at an address."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1]
    return "unmapped"


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def begin_with_stopped_target(host: SimulatedHost, controller: Program, call: str, target: Program) -> None:
    """Begins a call that has reached its target, and asks it for what it can't do before it goes on."""
    fault = host.set_fault(call, target.pid, signal=signal.SIGSTOP, hang=True, times=1)
    controller.begin(call, target.pid)
    os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)
    host.clear_faults(fault_id=fault.id)
    assert controller.is_waiting()


@pytest.fixture
def exclusive(make_host: MakeHost) -> SimulatedHost:
    return make_host(gpus=2, context_bytes=0, exclusive_memory=True)


def test_a_checkpoint_moves_the_bytes_to_the_host_and_a_restore_moves_them_to_the_new_gpu(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    address = filled(target, 16 * MIB)
    assert [written_bytes(host, gpu) for gpu in range(4)] == [16 * MIB, 0, 0, 0]
    before = resident_bytes(target.pid)
    controller.init()
    suspend(controller, target)
    assert [written_bytes(host, gpu) for gpu in range(4)] == [0] * 4
    assert resident_bytes(target.pid) - before > 15 * MIB
    resume(controller, target, turn(host))
    assert [written_bytes(host, gpu) for gpu in range(4)] == [0, 16 * MIB, 0, 0]
    assert resident_bytes(target.pid) - before < MIB
    assert target.holds(address, 16 * MIB, 7), "at the same address"


def test_a_device_address_can_not_be_read_on_the_cpu(controller: Program, target: Program) -> None:
    address = filled(target)
    assert permissions_at(target.pid, address) == "---p"
    suspend(controller, target)
    assert permissions_at(target.pid, address) == "---p"


def test_a_suspended_process_has_no_descriptor_and_no_mapping_of_a_gpu(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    filled(target)
    suspend(controller, target)
    folder = str(host.directory / "memory")
    assert folder not in Path(f"/proc/{target.pid}/maps").read_text()
    open_files = [str(file.readlink()) for file in Path(f"/proc/{target.pid}/fd").iterdir()]
    assert not [file for file in open_files if file.startswith(folder)]


def test_a_driver_that_only_says_that_it_restored_leaves_poison(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    address = filled(target)
    controller.init()
    suspend(controller, target)
    host.set_fault("restore", target.pid, skip=True, state=ProcessState.RUNNING)
    assert controller.restore(target.pid) == SUCCESS
    assert not target.holds(address, MIB, 7)
    assert target.first_byte(address) == POISON


def test_a_driver_that_only_says_that_it_checkpointed_loses_the_bytes(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    address = filled(target)
    controller.init()
    controller.lock(target.pid)
    host.set_fault("checkpoint", target.pid, skip=True, state=ProcessState.CHECKPOINTED)
    assert controller.checkpoint(target.pid) == SUCCESS
    resume(controller, target)
    assert not target.holds(address, MIB, 7)


def test_memory_that_was_not_written_since_its_allocation_is_poison(target: Program) -> None:
    _, fresh = target.allocate(3 * MIB + 5)
    assert [target.first_byte(fresh + place) for place in (0, MIB, 3 * MIB + 4)] == [POISON] * 3
    assert target.free(filled(target)) == SUCCESS
    _, again = target.allocate(MIB)
    assert target.first_byte(again) == POISON


def test_a_write_of_some_bytes_leaves_poison_around_them(controller: Program, target: Program) -> None:
    _, address = target.allocate(MIB)
    places = [address, address + 8191, address + 8192, address + 12_287, address + 12_288, address + MIB - 1]
    assert target.call("cuMemsetD8", address + 8192, 0x41, 4096) == [SUCCESS]
    assert target.call("cuMemsetD8", address + 20_000, 0x42, 10_000) == [SUCCESS]
    controller.init()
    for _ in range(2):
        assert [target.first_byte(place) for place in places] == [POISON] * 2 + [0x41] * 2 + [POISON] * 2
        ends = (19_999, 20_000, 29_999, 30_000)
        assert [target.first_byte(address + end) for end in ends] == [POISON, 0x42, 0x42, POISON]
        suspend(controller, target)
        resume(controller, target)


@pytest.fixture
def broken_files(tmp_path: Path) -> Callable[[str], str]:
    """Makes a library to preload, with a function of the C library that fails."""

    def make(source: str) -> str:
        (tmp_path / "broken.c").write_text(source)
        library = tmp_path / "broken.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "broken.c"], check=True)
        return str(library)

    return make


NO_HOLES = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
int fallocate(int file, int mode, off_t offset, off_t length) { errno = EOPNOTSUPP; return -1; }
"""
UNREADABLE = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
off_t lseek(int file, off_t offset, int from) {
    if (from == SEEK_DATA) { errno = EIO; return -1; }
    return syscall(SYS_lseek, file, offset, from);
}
"""


def test_a_file_system_that_makes_no_holes_gets_poison(
    exclusive: SimulatedHost, start_program: StartProgram, broken_files: Callable[[str], str]
) -> None:
    first = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-1", LD_PRELOAD=broken_files(NO_HOLES))
    second = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-2")
    controller = start_program(exclusive)
    controller.init()
    for program in (first, second):
        program.set_up()
    mine, others = filled(first, seed=1), filled(second, seed=2)
    filled(first, 2 * MIB, seed=3)
    suspend(controller, first)
    assert second.first_byte(others) == POISON
    resume(controller, first, turn(exclusive))
    assert first.holds(mine, MIB, 2), "the newcomer had overwritten it"


def test_device_memory_that_can_not_be_read_fails_the_checkpoint(
    host: SimulatedHost,
    controller: Program,
    start_program: StartProgram,
    broken_files: Callable[[str], str],
) -> None:
    target = start_program(host, LD_PRELOAD=broken_files(UNREADABLE))
    target.set_up()
    filled(target)
    assert controller.lock(target.pid, 5000) == SUCCESS
    assert controller.checkpoint(target.pid) == OPERATING_SYSTEM
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]
    assert written_bytes(host, 0) == MIB


@pytest.mark.parametrize("state", grid((RUNNING, LOCKED, CHECKPOINTED), CHECKPOINTED))
@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_the_bytes_follow_a_state_that_a_fault_forces(
    host: SimulatedHost, controller: Program, target: Program, call: str, state: int
) -> None:
    address = filled(target)
    controller.init()
    host.set_fault(call, target.pid, error=OPERATING_SYSTEM, state=state)
    steps = ["lock", "checkpoint", "restore", "unlock"]
    for step in steps[: steps.index(call) + 1]:
        getattr(controller, step)(target.pid)
    host.clear_faults()
    assert controller.get_state(target.pid) == [SUCCESS, state]
    assert (written_bytes(host, 0) == 0) == (state == CHECKPOINTED)
    if state == CHECKPOINTED:
        assert controller.restore(target.pid) == SUCCESS
    if state != RUNNING:
        assert controller.unlock(target.pid) == SUCCESS
    assert target.holds(address, MIB, 7)


def test_memory_that_a_checkpoint_leaves_on_the_gpu_moves_with_the_restore(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    address = filled(target)
    controller.init()
    host.set_fault("checkpoint", target.pid, keep_memory=True)
    suspend(controller, target)
    assert written_bytes(host, 0) == MIB
    resume(controller, target, turn(host))
    assert [written_bytes(host, gpu) for gpu in (0, 1)] == [0, MIB]
    assert target.holds(address, MIB, 7)


@pytest.mark.long
def test_two_workloads_share_a_gpu_and_their_bytes_stay_apart(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    other = start_program(host)
    other.set_up()
    mine, others = filled(target, seed=1), filled(other, seed=2)
    controller.init()
    suspend(controller, target)
    newcomer = start_program(host)
    newcomer.set_up()
    third = filled(newcomer, seed=3)
    resume(controller, target)
    assert target.holds(mine, MIB, 1)
    assert other.holds(others, MIB, 2)
    assert newcomer.holds(third, MIB, 3)


def test_on_an_exclusive_gpu_two_workloads_overwrite_each_other(
    exclusive: SimulatedHost, start_program: StartProgram
) -> None:
    first = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-1")
    second = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-2")
    first.set_up()
    second.set_up()
    address = filled(first, seed=1)
    filled(second, seed=2)
    assert not first.holds(address, MIB, 1)


def test_on_an_exclusive_gpu_processes_of_one_workload_stay_apart(
    exclusive: SimulatedHost, start_program: StartProgram
) -> None:
    marked = [start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-1") for _ in "ab"]
    for program in marked:
        program.set_up()
    addresses = [filled(program, seed=seed) for seed, program in enumerate(marked)]
    controller = start_program(exclusive)
    controller.init()
    suspend(controller, marked[0])
    suspend(controller, marked[1])
    resume(controller, marked[1])
    resume(controller, marked[0])
    for seed, program in enumerate(marked):
        assert program.holds(addresses[seed], MIB, seed)


@pytest.mark.long
def test_on_an_exclusive_gpu_processes_without_a_mark_belong_to_their_session(
    exclusive: SimulatedHost, start_program: StartProgram
) -> None:
    ours = [start_program(exclusive) for _ in "ab"]
    elsewhere = start_program(exclusive)
    elsewhere.begin_session()
    for program in (*ours, elsewhere):
        program.set_up()
    addresses = [filled(program, seed=seed) for seed, program in enumerate(ours)]
    assert [program.holds(addresses[seed], MIB, seed) for seed, program in enumerate(ours)] == [True, True]
    filled(elsewhere, seed=2)
    assert [program.holds(addresses[seed], MIB, seed) for seed, program in enumerate(ours)] == [False, True]


@pytest.mark.long
def test_on_an_exclusive_gpu_a_restore_that_ignores_its_map_corrupts_who_is_there_now(
    exclusive: SimulatedHost, start_program: StartProgram
) -> None:
    """The controller believes that the first moved on, and has given its GPU away."""
    first = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-1")
    controller = start_program(exclusive)
    controller.init()
    first.set_up()
    mine = filled(first, seed=1)
    suspend(controller, first)
    second = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-2")
    second.set_up()
    others = filled(second, seed=2)
    exclusive.set_fault("restore", first.pid, ignore_gpu_pairs=True, times=1)
    resume(controller, first, turn(exclusive))
    assert first.holds(mine, MIB, 1)
    assert not second.holds(others, MIB, 2)


def test_on_an_exclusive_gpu_a_gpu_that_is_given_away_before_the_checkpoint_corrupts(
    exclusive: SimulatedHost, start_program: StartProgram
) -> None:
    first = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-1")
    second = start_program(exclusive, LEASEHOLD_WORKLOAD_ID="w-2")
    controller = start_program(exclusive)
    controller.init()
    for program in (first, second):
        program.set_up()
    mine = filled(first, seed=1)
    assert controller.lock(first.pid) == SUCCESS
    others = filled(second, seed=2)
    assert controller.checkpoint(first.pid) == SUCCESS
    assert second.first_byte(others) == POISON, "the checkpoint has poisoned it"
    resume(controller, first, turn(exclusive))
    assert not first.holds(mine, MIB, 1), "the newcomer had overwritten it"


@pytest.mark.parametrize("call", ["checkpoint", pytest.param("restore", marks=pytest.mark.long)])
def test_a_controller_killed_while_bytes_move_leaves_a_whole_process(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram, call: str
) -> None:
    address = filled(target)
    second = start_program(host)
    second.init()
    controller.init()
    controller.lock(target.pid)
    if call == "restore":
        controller.checkpoint(target.pid)
    begin_with_stopped_target(host, controller, call, target)
    controller.kill()
    target.send_signal(signal.SIGCONT)
    assert second.get_state(target.pid) == [SUCCESS, CHECKPOINTED if call == "checkpoint" else LOCKED]
    if call == "checkpoint":
        assert second.restore(target.pid) == SUCCESS
    assert second.unlock(target.pid) == SUCCESS
    assert target.holds(address, MIB, 7)


def test_a_controller_killed_before_bytes_move_has_changed_nothing(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    address = filled(target)
    second = start_program(host)
    host.set_fault("checkpoint", target.pid, hang=True, times=1)
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    controller.kill()
    assert second.get_state(target.pid) == [SUCCESS, LOCKED]
    assert second.unlock(target.pid) == SUCCESS
    assert target.holds(address, MIB, 7)


def test_a_request_whose_controller_died_before_the_wake_up_is_served(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    address = filled(target)
    controller.init()
    assert controller.lock(target.pid, 5000) == SUCCESS
    # What a controller leaves that is killed between its store and its wake-up.
    records = StateFile.open(host.directory).host.processes
    next(record for record in records if record.pid == target.pid).request = EVICT
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    resume(controller, target)
    assert target.holds(address, MIB, 7)


def test_a_target_killed_while_bytes_move_ends_the_call(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    filled(target)
    controller.lock(target.pid)
    begin_with_stopped_target(host, controller, "checkpoint", target)
    target.kill()
    assert controller.answer() == OPERATING_SYSTEM


@pytest.mark.long
def test_too_little_host_memory_fails_the_checkpoint_and_changes_nothing(
    controller: Program, target: Program
) -> None:
    address, second = filled(target), filled(target, 64 * MIB, seed=8)
    controller.lock(target.pid)
    unlimited = resource.prlimit(target.pid, resource.RLIMIT_DATA)
    resource.prlimit(target.pid, resource.RLIMIT_DATA, (32 * MIB, unlimited[1]))
    assert controller.checkpoint(target.pid) == OUT_OF_MEMORY
    resource.prlimit(target.pid, resource.RLIMIT_DATA, unlimited)
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]
    assert controller.unlock(target.pid) == SUCCESS
    assert target.holds(address, MIB, 7)
    assert target.holds(second, 64 * MIB, 8)


def test_large_allocations_take_what_was_written_of_them(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    _, address = target.allocate(60 * GIB)
    middle = address + 30 * GIB
    target.fill(middle, MIB, 7)
    before = resident_bytes(target.pid)
    controller.init()
    suspend(controller, target)
    assert resident_bytes(target.pid) - before < 8 * MIB
    resume(controller, target, turn(host))
    assert written_bytes(host, 1) <= 2 * MIB
    assert target.holds(middle, MIB, 7)
    assert target.first_byte(address) == POISON


@pytest.mark.long
def test_memory_that_is_freed_goes_back_to_the_file_system_and_is_given_out_again(
    host: SimulatedHost, target: Program
) -> None:
    addresses = [filled(target, 16 * MIB, seed) for seed in range(3)]
    assert target.free(addresses[1]) == SUCCESS
    assert written_bytes(host, 0) == 32 * MIB
    again = filled(target, 4 * MIB, 9)
    last = filled(target, 32 * MIB, 10)
    assert target.holds(addresses[0], 16 * MIB, 0)
    assert target.holds(again, 4 * MIB, 9)
    assert target.holds(addresses[2], 16 * MIB, 2)
    assert target.holds(last, 32 * MIB, 10)
    for address in (addresses[0], again, addresses[2], last):
        assert target.free(address) == SUCCESS
    assert written_bytes(host, 0) == 0


def test_memory_of_a_dead_process_is_empty_for_the_next_one(
    host: SimulatedHost, target: Program, start_program: StartProgram
) -> None:
    filled(target, 16 * MIB)
    target.kill()
    program = start_program(host)
    program.set_up()
    _, address = program.allocate(16 * MIB)
    assert program.first_byte(address) == POISON
    assert written_bytes(host, 0) == 0


@pytest.mark.long
def test_memory_of_all_dead_processes_is_released_when_the_next_one_starts_cuda(
    host: SimulatedHost, target: Program, start_program: StartProgram
) -> None:
    lives = start_program(host)
    for program in (target, lives):
        for ordinal in (1, 2):
            program.set_up(ordinal)
            address = filled(program, seed=ordinal)
    target.kill()
    assert [written_bytes(host, gpu) for gpu in range(4)] == [0, 2 * MIB, 2 * MIB, 0]
    assert start_program(host).init() == SUCCESS
    assert [written_bytes(host, gpu) for gpu in range(4)] == [0, MIB, MIB, 0]
    assert lives.holds(address, MIB, 2)
    lives.kill()
    newcomer = start_program(host)
    newcomer.set_up(3)
    newcomer.allocate(MIB)
    assert list((host.directory / "memory").iterdir()) == []


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a time namespace, as CRIU does for an image"
)
def test_a_process_of_another_time_namespace_sees_who_lives(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    address = filled(target)
    namespace = ("unshare", "--time", "--boottime", "1000", "--fork", "--kill-child")
    program = Program(environment_of(host.environment()), namespace)
    try:
        program.set_up()
        own = filled(program, seed=8)
        assert target.holds(address, MIB, 7)
        pid = int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text())
        controller.init()
        assert controller.lock(pid, 5000) == SUCCESS
        assert controller.checkpoint(pid) == SUCCESS
        suspend(controller, target)
        assert controller.restore(pid, None) == SUCCESS
        assert controller.unlock(pid) == SUCCESS
        resume(controller, target)
        assert target.holds(address, MIB, 7)
        assert program.holds(own, MIB, 8)
    finally:
        program.close()


def test_bytes_of_every_gpu_of_a_process_move(
    host: SimulatedHost, controller: Program, start_program: StartProgram
) -> None:
    program = start_program(host)
    addresses = []
    for ordinal in range(4):
        program.set_up(ordinal)
        addresses.append([filled(program, MIB, seed=10 * ordinal + number) for number in range(3)])
    controller.init()
    for _ in range(3):
        suspend(controller, program)
        resume(controller, program, turn(host))
    for ordinal in range(4):
        program.set_up(ordinal)
        for number, address in enumerate(addresses[ordinal]):
            assert program.holds(address, MIB, 10 * ordinal + number)


def test_a_fork_of_a_suspended_process_takes_nothing_from_it(controller: Program, target: Program) -> None:
    address = filled(target)
    controller.init()
    suspend(controller, target)
    assert target.call_in_forked_child("cuDeviceGet") == NOT_INITIALIZED
    resume(controller, target)
    assert target.call_in_forked_child("cuDeviceGet") == NOT_INITIALIZED
    assert target.holds(address, MIB, 7)


def test_copies_and_fills_on_the_device(target: Program) -> None:
    _, first = target.allocate(4 * MIB)
    second = filled(target, 3 * MIB, 5)
    assert target.call("cuMemcpyDtoD", first + 13, second, 3 * MIB) == [SUCCESS]
    assert target.holds(first + 13, 3 * MIB, 5)
    assert target.call("cuMemsetD8", first, 0x41, 4 * MIB) == [SUCCESS]
    assert target.first_byte(first + 4 * MIB - 1) == 0x41
    assert target.call("cuMemsetD32", first, 0x01020304, MIB) == [SUCCESS]
    assert [target.first_byte(first + 4 * MIB - place) for place in (4, 3, 2, 1)] == [4, 3, 2, 1]


def test_a_stopped_target_keeps_its_bytes_and_the_call_waits(controller: Program, target: Program) -> None:
    address = filled(target)
    controller.init()
    suspend(controller, target)
    target.stop()
    controller.begin("restore", target.pid)
    assert controller.is_waiting()
    target.send_signal(signal.SIGCONT)
    assert controller.answer() == SUCCESS
    assert controller.unlock(target.pid) == SUCCESS
    assert target.holds(address, MIB, 7)


@pytest.mark.long
def test_moves_in_parallel_on_one_gpu_keep_all_bytes(
    host: SimulatedHost, start_program: StartProgram
) -> None:
    targets, controllers = ([start_program(host) for _ in range(3)] for _ in "ab")
    addresses = []
    for seed, target in enumerate(targets):
        target.set_up()
        addresses.append(filled(target, MIB, seed))
    for controller, target in zip(controllers, targets, strict=True):
        controller.init()
        suspend(controller, target)
    for _ in range(5):
        for controller, target in zip(controllers, targets, strict=True):
            controller.begin("restore", target.pid)
        assert [controller.answer() for controller in controllers] == [SUCCESS] * 3
        for controller, target in zip(controllers, targets, strict=True):
            controller.begin("checkpoint", target.pid)
        assert [controller.answer() for controller in controllers] == [SUCCESS] * 3
    for seed, (controller, target) in enumerate(zip(controllers, targets, strict=True)):
        resume(controller, target)
        assert target.holds(addresses[seed], MIB, seed)
    wait_until(lambda: host.gpus[0].used_bytes == 3 * MIB, "all are back")
