"""Members that the kernel's OOM killer ends: the result names the control group and its limit."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trio
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.driver import oom_watch
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.members import GONE, Member, MemberOutcome
from leasehold_worker.driver.oom_watch import OomCounts, OomWatch, exceeded, may_be_killed, oom_counts
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.process_readings import READ_TIMEOUT_S
from leasehold_worker.host.processes import ProcessIdentity

from tests.simgpu.control_groups import ControlGroup, NoControlGroupError
from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, counters, wait_counting
from tests.worker.driver.test_group import StartCounter, make_group, members_of, start_members
from tests.worker.scripted_coordinator import ScriptedCoordinator, make_command

LIMIT_BYTES = 640 * 2**20
"""More than a context of the simulated GPU, or the suspend would be refused."""

HUNGRY = """
import os, runpy, sys, threading, time
del sys.argv[0]
trigger = sys.argv.pop(0)
def eat():
    while not os.path.exists(trigger):
        time.sleep(0.01)
    b"x" * 2**30
threading.Thread(target=eat, daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A counter that takes much host memory once a file exists, as the driver does in a checkpoint."""


def write_version_2(group: Path, limit: object, hits: int, kills: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom {hits}\noom_kill {kills}\n")


def test_the_innermost_limit_that_was_reached_is_named(tmp_path: Path) -> None:
    inner, outer, unlimited = tmp_path / "a/b", tmp_path / "a", tmp_path
    groups = [inner, outer, unlimited, tmp_path / "missing"]
    for group, limit in ((inner, 1000), (outer, 2000), (unlimited, "max")):
        write_version_2(group, limit, 0, 0)
    before = oom_counts(groups)
    assert before[1] == OomCounts(outer, 2000, 0, 0)
    assert exceeded(before, oom_counts(groups)) is None
    write_version_2(outer, 2000, 1, 0)
    assert exceeded(before, oom_counts(groups)) is None, "nothing was killed"
    write_version_2(inner, 1000, 0, 1)
    write_version_2(outer, 2000, 1, 1)
    assert exceeded(before, oom_counts(groups)) == OomCounts(outer, 2000, 1, 1)
    (inner / "memory.events").unlink()
    assert exceeded(before, oom_counts(groups)) is None, (
        "the limit of the removed group may have been reached"
    )
    write_version_2(inner, 1000, 0, 1)
    write_version_2(outer, 2000, 0, 1)
    assert exceeded(before, oom_counts(groups)) is None, "the host had no memory"
    (inner / "memory.events").write_text("oom many\n")
    assert [each.group for each in oom_counts(groups)] == [outer, unlimited]


@pytest.mark.parametrize(("number", "may_be"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_a_process_that_died_of_another_signal_was_not_killed(number: signal.Signals, may_be: bool) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert may_be_killed(process.pid) is may_be
    assert may_be_killed(process.pid), "it is unknown once the process is reaped"


@pytest.mark.long
async def test_the_error_of_a_killed_member_names_the_limit(
    host: SimulatedHost,
    driver: Driver,
    start_counter: StartCounter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files are the test's. The member is really killed, by SIGKILL within the checkpoint."""
    group = tmp_path / "limited"
    monkeypatch.setattr(oom_watch, "memory_groups", lambda _: [group])
    for kills, expected in ((1, "the kernel's OOM killer ended it"), (0, "look at its output")):
        write_version_2(group, 4096, 0, 0)
        counters = await start_members(driver, start_counter, 2)
        members = make_group(driver, await members_of(driver, counters))
        host.set_fault("checkpoint", counters[1].process.pid, signal=signal.SIGKILL, times=1)

        async def rescan(kills: int = kills) -> tuple[Member, ...]:
            write_version_2(group, 4096, kills, kills)
            return ()

        with pytest.raises(OperationError, match=expected) as raised:
            await members.suspend(1, rescan)
        assert raised.value.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED
        assert members.outcomes[1].error is raised.value
        named = {key: raised.value.metadata.get(key) for key in ("control_group", "limit_bytes")}
        assert named == (
            {"control_group": str(group), "limit_bytes": "4096"} if kills else dict.fromkeys(named)
        )
        assert members.outcomes[0].error is None


async def test_processes_that_can_not_be_read_delay_a_rollback_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = OperationError(errors_pb2.ERROR_REASON_TARGET_CRASHED, "it has ended")
    members = [Member(ProcessIdentity(Pid(pid), pid), GONE) for pid in range(1, 101)]
    outcomes = [MemberOutcome(member, GONE, GONE, error=ended) for member in members]
    watch = OomWatch()

    async def at_once(_: int, read: Callable[[], object]) -> object:
        return dict.fromkeys((member.identity for member in members), ())

    async def never(_: int, read: Callable[[], object]) -> object:
        await trio.sleep(READ_TIMEOUT_S)
        raise OperationError(errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE, "not in time")

    monkeypatch.setattr(oom_watch, "read_process", at_once)
    await watch.begin([member.identity for member in members])
    monkeypatch.setattr(oom_watch, "read_process", never)
    begin = trio.current_time()
    await watch.explain(outcomes)
    assert trio.current_time() - begin <= oom_watch.EXPLANATION_TIMEOUT_S
    assert {outcome.error for outcome in outcomes} == {ended}


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    try:
        made = ControlGroup("memory")
    except NoControlGroupError as error:
        pytest.skip(str(error))
    with closing(made):
        if not (made.folder / "memory.events").exists():
            pytest.skip("the memory controller of this host is of version 1")
        yield made


def test_a_suspend_beyond_the_limit_names_the_control_group(
    group: ControlGroup,
    coordinator: ScriptedCoordinator,
    start_worker: Callable[..., WorkerProcess],
    tmp_path: Path,
) -> None:
    host = SimulatedHost.create(tmp_path / "host", gpus=1, chip="H100", timing=Timing.instant())
    start_worker(host)
    session, trigger = coordinator.next_session(), tmp_path / "trigger"
    run = counter_run("w1")
    run.spec.arguments[1:2] = ["-c", HUNGRY, str(trigger), run.spec.arguments[1]]
    session.run("c1", "w1", run=run)
    wait_counting(session, "w1")
    (process,) = counters(host)
    group.add(process.pid)
    group.limit_memory(LIMIT_BYTES)
    host.set_fault("checkpoint", process.pid, delay_s=2)
    session.send(make_command("c2", "w1", suspend=SuspendOperation()))
    session.wait(lambda f: f.command_update.command_id == "c2" and f.command_update.phase == "checkpoint")
    trigger.touch()
    failed = session.outcome("c2")
    assert failed.state == command_pb2.COMMAND_STATE_FAILED
    assert failed.error.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED
    assert "the kernel's OOM killer ended it" in failed.error.message, failed.error
    assert str(LIMIT_BYTES) in failed.error.message
    assert failed.error.metadata["control_group"] == str(group.folder)
    assert failed.error.metadata["limit_bytes"] == str(LIMIT_BYTES)
