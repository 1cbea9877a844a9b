"""Processes that make their reader wait for ever hold up neither the worker nor other users."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from leasehold.local.v1.local_service_pb2 import ClaimOpen, ClaimRequest
from leasehold.v1 import errors_pb2, operation_pb2, workload_pb2
from leasehold_worker.agent import assembly
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.progress import Progress
from leasehold_worker.criu import support
from leasehold_worker.driver.members import RUNNING as MEMBER_RUNNING
from leasehold_worker.driver.members import Member
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.errors import OperationError
from leasehold_worker.host import process_readings, processes
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.process_readings import READING, USER_READERS, read_process
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.operations import kill
from leasehold_worker.operations.kill import Killer
from leasehold_worker.planning import driver_checks
from leasehold_worker.planning.displacement import find_displaced
from leasehold_worker.planning.driver_checks import DriverChecks
from leasehold_worker.planning.findings import Findings
from leasehold_worker.planning.workload_checks import is_sequential
from leasehold_worker.workloads import workload

from tests.worker.conftest import Counter
from tests.worker.local_api.test_claims import EXEC, open_local, running
from tests.worker.workloads.test_workload import make

NOBODY = 65_534
MARK = "LEASEHOLD_WORKLOAD_ID=w-nobody"


def off_the_loop(read: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails on the loop's thread."""

    def guarded(*arguments: object) -> object:
        assert threading.current_thread() is not threading.main_thread(), f"{read.__name__} can take for ever"
        return read(*arguments)

    return guarded


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process can stall is read in threads, or the test fails."""
    for module, name in (
        (processes, "_environment"),
        (driver_checks, "loaded_library"),
        (driver_checks, "missing_device_nodes"),
        (driver_checks, "why_blocked"),
    ):
        monkeypatch.setattr(module, name, off_the_loop(getattr(module, name)))


@pytest.mark.usefixtures("guarded", "host")
async def test_no_plan_reads_processes_on_the_loop(
    tmp_path: Path, start_counter: Callable[..., Counter]
) -> None:
    counter = start_counter()
    await counter.wait_count()
    wanted = ClaimOpen(hold=EXEC, spec=workload_pb2.WorkloadSpec())
    async with open_local(tmp_path) as local:
        _, workload_id = await local.grant(Peer(counter.identity, os.geteuid(), "me"), wanted)
        preflight = local.parts.operations.preflight
        plan = await preflight.suspend(workload_id, operation_pb2.SuspendOperation())
        assert [member.identity for member in plan.members] == [counter.identity]
        assert {"runnable", "libcuda", "trace_permission"} <= {check.name for check in plan.findings.checks}
        await DriverChecks(local.parts.driver, local.parts.inventory).device_nodes(
            plan.findings, plan.members, []
        )


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Pids of processes whose environment can't be read. They are nobody's."""
    pids: set[int] = set()
    released = threading.Event()
    environment, user_id = processes._environment, processes.user_id

    def read(pid: int) -> bytes:
        if pid in pids:
            released.wait(30)
        return environment(pid)

    monkeypatch.setattr(processes, "_environment", read)
    monkeypatch.setattr(
        "leasehold_worker.host.process_readings.user_id", lambda pid: NOBODY if pid in pids else user_id(pid)
    )
    monkeypatch.setattr(process_readings, "READ_TIMEOUT_S", 0.05)
    yield pids
    released.set()


async def test_claims_of_processes_that_can_not_be_read_hold_up_no_other_user(
    tmp_path: Path, hanging: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = ClaimOpen(hold=EXEC, spec=workload_pb2.WorkloadSpec())
    async with open_local(tmp_path) as local:
        with ExitStack() as stack:
            for _ in range(USER_READERS + 2):
                peer = stack.enter_context(running("sleep", "1000"))
                hanging.add(peer.identity.pid)
                _, stream = local.begin(peer, ClaimRequest(open=nothing))
                with trio.fail_after(10):
                    await stream.ended.wait()
                assert stream.refusals[0].reason == errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE
            monkeypatch.setattr(process_readings, "READ_TIMEOUT_S", 60.0)
            await local.grant(stack.enter_context(running("sleep", "1000")), nothing)


async def test_a_reading_that_hangs_ends(hanging: set[int]) -> None:
    with running("sleep", "1000") as peer:
        hanging.add(peer.identity.pid)
        with pytest.raises(OperationError, match=rf"process {peer.identity.pid} can't be read within"):
            await read_process(peer.identity.pid, lambda: processes.variable_of(peer.identity.pid, "A"))
        assert await is_sequential(workload_pb2.WorkloadSpec(), []) is False
    assert process_readings._readers[NOBODY, READING].borrowed_tokens


async def test_a_member_on_a_strange_gpu_that_can_not_be_read_is_refused(hanging: set[int]) -> None:
    with running("sleep", "1000") as peer:
        hanging.add(peer.identity.pid)
        member = Member(peer.identity, MEMBER_RUNNING, gpu_uuids=("GPU-1",))
        with trio.fail_after(10), pytest.raises(OperationError, match="can't be read within"):
            await find_displaced([member], ["GPU-2"], {"GPU-1": "P40", "GPU-2": "P40"}, Findings())


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever looks for processes with NOBODY's mark hangs."""
    released = threading.Event()
    has_entries, has_real_user = processes.has_entries, processes.has_real_user

    def read(pid: int, mark: str) -> bool | None:
        return not released.wait(60) if mark == MARK else has_entries(pid, mark)

    monkeypatch.setattr("leasehold_worker.host.process_trees.has_entries", read)
    monkeypatch.setattr(
        "leasehold_worker.host.process_trees.has_real_user",
        lambda pid, uid: uid == NOBODY or has_real_user(pid, uid),
    )
    yield
    released.set()


@pytest.mark.usefixtures("hung", "host")
async def test_kills_that_hang_at_a_user_s_process_hold_up_no_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = ProcessIdentity(Pid(2**22 + 1), 0)
    default = trio.to_thread.current_default_thread_limiter()
    async with assembly.open_parts(WorkerConfig(), tmp_path / "workloads", lambda _: None) as opened:
        killer = Killer(opened.driver, opened.inventory, Rates())
        with monkeypatch.context() as patch, trio.fail_after(30):
            patch.setattr(workload, "MARKS_TIMEOUT_S", 0.02)
            patch.setattr(kill, "CHASE_S", 0.02)
            for number in range(2 * USER_READERS):
                await killer.kill(make(f"w-{number}", gone, MARK, NOBODY), Progress.unheard())
        with trio.fail_after(30):  # with one for each kill no thread would be left to the worker
            while default.borrowed_tokens:  # noqa: ASYNC110 - a limiter tells nobody
                await trio.sleep(0.01)
    # On a busy machine the search takes seconds. Those that hang outlast this timeout.
    monkeypatch.setattr(workload, "MARKS_TIMEOUT_S", 40.0)
    await make("w-mine", gone, "LEASEHOLD_WORKLOAD_ID=w-mine").find_tree()
    assert "workload w-0: the search for marked processes hangs" in caplog.text
    assert "workload w-mine" not in caplog.text


async def test_a_look_for_what_an_image_can_not_hold_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(process_readings, "LONG_READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(support, "obstacles", lambda *_, **__: released.wait(30))
    try:
        with running("sleep", "1000") as peer:
            async with open_local(tmp_path) as local:
                look = local.parts.criu.obstacles
                assert await look([], suspended=True) == []
                with trio.fail_after(10), pytest.raises(OperationError, match="can't be read within"):
                    await look([peer.identity], suspended=True)
    finally:
        released.set()


async def test_a_directory_of_users_that_does_not_answer_keeps_no_worker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(assembly, "DIRECTORY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("leasehold_worker.agent.assembly.user_name", lambda _: released.wait(30))
    try:
        with trio.fail_after(20):
            async with assembly.open_parts(WorkerConfig(), tmp_path / "workloads", lambda _: None) as opened:
                assert opened.programs.user == str(os.geteuid())
    finally:
        released.set()
