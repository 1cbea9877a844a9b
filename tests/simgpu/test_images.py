"""What a host keeps for processes that CRIU wrote to disk: test_criu_real.py does it for real."""

from leasehold_simgpu import SimulatedHost, layout

from .conftest import MakeHost, StartProgram
from .programs import CHECKPOINTED, MIB, OPERATING_SYSTEM, SUCCESS, Program


def record_of(host: SimulatedHost, pid: int) -> layout.Process | None:
    return next((record for record in host._state.processes if record.pid == pid), None)


def suspend(controller: Program, target: Program) -> None:
    controller.init()
    assert controller.lock(target.pid, 1000) == SUCCESS
    assert controller.checkpoint(target.pid) == SUCCESS


def test_the_record_of_a_process_that_ended_while_checkpointed_waits_for_it(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    target.allocate(MIB)
    suspend(controller, target)
    target.kill()
    assert host.process(target.pid) is None
    start_program(host).init()
    record = record_of(host, target.pid)
    assert record is not None
    assert record.status & layout.STATE_MASK == CHECKPOINTED
    assert record.allocated_bytes[0] == MIB


def test_a_process_that_returns_has_the_memory_of_its_image(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    target.allocate(MIB)
    suspend(controller, target)
    record = record_of(host, target.pid)
    assert record is not None
    record.allocated_bytes[0] = 2 * MIB  # of a process that came back from the image before, and ended
    assert controller.restore(target.pid) == SUCCESS
    assert record.allocated_bytes[0] == MIB


def test_the_record_of_a_process_that_ended_while_running_waits_for_nobody(
    host: SimulatedHost, target: Program, start_program: StartProgram
) -> None:
    target.kill()
    start_program(host).init()
    assert record_of(host, target.pid) is None


def test_where_no_other_slot_is_left_the_oldest_that_waits_is_taken(
    make_host: MakeHost, start_program: StartProgram
) -> None:
    host = make_host(gpus=1)
    for number, record in enumerate(host._state.processes):
        record.pid = 2**22 + number + 1  # above every pid that the kernel gives
        record.id = 1000 - number
        record.status = CHECKPOINTED
    program = start_program(host)
    assert program.init() == SUCCESS
    record = record_of(host, program.pid)
    assert record is not None
    assert record_of(host, 2**22 + layout.MAX_PROCESSES) is None
    assert record_of(host, 2**22 + 1) is not None


def test_a_process_whose_record_is_anothers_can_use_no_gpu(host: SimulatedHost, target: Program) -> None:
    record = record_of(host, target.pid)
    assert record is not None
    record.id += 1
    assert target.allocate(MIB) == [OPERATING_SYSTEM, None]
