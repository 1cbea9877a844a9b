"""What an earlier start of the worker left, taken back in the test's own process."""

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import trio
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import Operation, RestoreOperation, SuspendOperation
from leasehold.v1.workload_pb2 import WorkloadState
from leasehold.worker.v1.session_pb2 import CommandSpec, CommandUpdate
from leasehold_worker.agent import assembly, member_recovery
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.agent.disk_recovery import DiskRecovery
from leasehold_worker.agent.member_recovery import MemberRecovery
from leasehold_worker.agent.recovery import Recovery
from leasehold_worker.agent.strays import Strays
from leasehold_worker.commands import journal_file
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.intents import Intent, WorkloadIntent
from leasehold_worker.commands.journal import Journal, open_journal
from leasehold_worker.commands.journal_records import workload_record
from leasehold_worker.commands.ledger import Entry
from leasehold_worker.errors import OperationError, StartError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import boot_id
from leasehold_worker.leasing.gpu_selection import PoolGpu
from leasehold_worker.leasing.leases import Lease, LeaseId
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.log_context import ContextFilter
from leasehold_worker.operations.stop_restart import STOP_POLICY
from leasehold_worker.programs.programs import START_FILE, Started
from leasehold_worker.workloads.eviction import CHECKPOINT
from leasehold_worker.workloads.invariants import violations
from leasehold_worker.workloads.states import CHECKPOINTED, EXITED, RESTORING, RUNNING, STOPPED, UNKNOWN
from leasehold_worker.workloads.workload import CLAIM, Parked, Workload

from tests.worker.local_api.test_claims import running

GPU = "GPU-00000000-0000-0000-0000-000000000000"
OTHER_GPU = "GPU-00000000-0000-0000-0000-000000000001"
SUSPENDING = workload_pb2.WORKLOAD_STATE_SUSPENDING


def leave_halfway(
    journal: Journal,
    workload: Workload,
    command_id: str,
    phase: str = "lock",
    operation: Operation = Operation(suspend=SuspendOperation()),  # noqa: B008 - never changed
    reserved: tuple[Lease, ...] = (),
) -> None:
    """Writes down that the suspend of a workload was under way, or another operation."""
    workload_id = workload.workload_id
    command = CommandSpec(command_id=command_id, workload_id=workload_id, operation=operation)
    running_update = CommandUpdate(command_id=command_id, state=command_pb2.COMMAND_STATE_RUNNING)
    target = WorkloadIntent(workload_id, (), (), (), parked=workload.parked is not None)
    intent = Intent(phase, (target,), reserved=reserved)
    for key, statements in (
        (("workloads", workload_id), journal_file.keep_workload(workload_record(workload, boot_id()))),
        (("commands", command_id), journal_file.keep_command(Entry(command, 1, 0.0, running_update))),
        (("intents", command_id), journal_file.keep_intent(command_id, intent)),
    ):
        journal.put(key, statements)


def of_image(folder: Path, state: WorkloadState.ValueType) -> Workload:
    """A workload of an image, whose first process has ended."""
    with running("sleep", "1000") as peer:
        root = peer.identity
    policy, now = EvictionPolicy(process_strategy=CHECKPOINT), datetime.now(UTC)
    parked = Parked((GPU,), {}, policy, now, 0, "i-1")
    spec = workload_pb2.WorkloadSpec()
    return Workload("w1", "one", spec, root, folder / "output", now, None, state, parked=parked)


@asynccontextmanager
async def recovered(
    path: Path, on_update: Callable[[CommandUpdate], None] = lambda _: None
) -> AsyncIterator[tuple[Parts, Journal]]:
    """A worker's parts and journal after a recovery from this journal."""
    async with (
        open_journal(path) as journal,
        open_parts(WorkerConfig(), path.parent / "workloads", lambda _: None) as parts,
    ):
        carry_out = parts.operations.perform
        commands = Commands(carry_out, journal, lambda _: [], None, parts.nursery, on_update)
        recovery = Recovery(parts, journal, commands)
        recovery.rebuild()
        with trio.fail_after(20):
            await recovery.settle()
        yield parts, journal


@pytest.mark.parametrize("fails", ["settle", "look_at"])
async def test_a_defect_in_settling_one_workload_ends_neither_the_worker_nor_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    path = tmp_path / "journal.sqlite3"
    with running("sleep", "1000") as peer:
        spec, now = workload_pb2.WorkloadSpec(), datetime.now(UTC)
        one = Workload("w1", "one", spec, peer.identity, tmp_path / "output", now, None, origin=CLAIM)
        one.state = SUSPENDING
        async with open_journal(path) as journal:
            leave_halfway(journal, one, "c1")
            if fails == "look_at":
                journal.put(("intents", "c1"), journal_file.forget_command("c1"))
        monkeypatch.setattr(MemberRecovery, fails, fail)
        updates: list[CommandUpdate] = []
        async with recovered(path, updates.append) as (parts, journal):
            await journal.wait_settled()
            found = parts.workloads.get("w1")
            assert (found.state, found.error and found.error.reason) == (
                UNKNOWN,
                errors_pb2.ERROR_REASON_INTERNAL,
            )
    if fails == "settle":
        assert updates[-1].state == command_pb2.COMMAND_STATE_FAILED
        assert updates[-1].error.reason == errors_pb2.ERROR_REASON_INTERNAL
        assert not updates[-1].result.warnings, "there is nothing to warn of"


async def test_a_defect_in_settling_a_workload_at_rest_leaves_it_a_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    path = tmp_path / "journal.sqlite3"
    with running("sleep", "1000") as peer:
        spec, now = workload_pb2.WorkloadSpec(), datetime.now(UTC)
        one = Workload("w1", "one", spec, peer.identity, tmp_path / "output", now, None, origin=CLAIM)
        async with open_journal(path) as journal:
            leave_halfway(journal, one, "c1", "end")
        monkeypatch.setattr(DiskRecovery, "settle", fail)
        async with recovered(path) as (parts, _):
            found = parts.workloads.get("w1")
            assert found.state == RUNNING
            os.kill(peer.identity.pid, signal.SIGKILL)
            with trio.fail_after(20):
                await found.ended.wait()
            assert found.state == EXITED


async def test_a_failed_restore_of_an_image_whose_preempted_workloads_were_coming_back_leaves_the_image(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.sqlite3"
    one = of_image(tmp_path, CHECKPOINTED)
    one.absent = True
    async with open_journal(path) as journal:
        restore = Operation(restore=RestoreOperation(preempt=["w2"]))
        leave_halfway(journal, one, "c1", "restore", restore)
    updates: list[CommandUpdate] = []
    async with recovered(path, updates.append) as (parts, journal):
        await journal.wait_settled()
        found = parts.workloads.get("w1")
        assert (found.state, found.parked) == (CHECKPOINTED, one.parked)
    assert updates[-1].error.reason == errors_pb2.ERROR_REASON_INTERRUPTED


def test_the_message_of_an_interrupted_remap_names_the_gpus_of_its_workloads(tmp_path: Path) -> None:
    now, spec = datetime.now(UTC), workload_pb2.WorkloadSpec()
    lease = Lease(LeaseId("l-1"), "w1", (OTHER_GPU,), now, 1)
    with running("sleep", "1000") as peer:
        one = Workload("w1", "one", spec, peer.identity, tmp_path / "output", now, lease, RUNNING)
        message = member_recovery._interruption("remap", [one], None).message
    assert message == f"the worker restarted during the remap: now workload one is RUNNING on {OTHER_GPU}"


async def test_a_settled_command_is_named_in_the_log_and_has_no_duration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.sqlite3"
    async with open_journal(path) as journal:
        leave_halfway(journal, of_image(tmp_path, SUSPENDING), "c1", "image")
    updates: list[CommandUpdate] = []
    caplog.handler.addFilter(ContextFilter())
    async with recovered(path, updates.append) as (_, journal):
        await journal.wait_settled()
    assert updates[-1].HasField("result")
    assert not updates[-1].result.HasField("duration"), "the command began in an earlier process"
    (ended,) = [each for each in caplog.records if hasattr(each, "outcome")]
    assert ended.__dict__["names"] == {"epoch": "1", "command": "c1", "workload": "w1"}
    assert not hasattr(ended, "duration_s")
    assert ended.message.startswith("suspend FAILED: the worker restarted")


@pytest.mark.parametrize("ends_by", ["the undo", "a reboot"])
async def test_a_failed_restart_whose_processes_have_ended_meanwhile_leaves_the_workload_without_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """The started program could not be ended, so its workload was UNKNOWN with the lease of the restore."""
    monkeypatch.setattr(assembly, "GpuPool", lambda _, *options: GpuPool([PoolGpu(GPU)], *options))
    path = tmp_path / "journal.sqlite3"
    with running("sleep", "1000") as peer:
        root = peer.identity
    now, spec = datetime.now(UTC), workload_pb2.WorkloadSpec()
    lease = Lease(LeaseId("l-1"), "w1", (GPU,), now, 1)
    parked = Parked((GPU,), {}, STOP_POLICY, now, 0, "k-1")
    one = Workload("w1", "one", spec, root, tmp_path / "output", now, lease, UNKNOWN, parked=parked)
    one.error = OperationError(errors_pb2.ERROR_REASON_DRIVER_ERROR, "stuck in the kernel")
    async with open_journal(path) as journal:
        if ends_by == "the undo":
            restore = Operation(restore=RestoreOperation(preempt=["w2"]))
            leave_halfway(journal, one, "c1", "start", restore, reserved=(lease,))
        else:
            record = workload_record(one, "another boot")
            journal.put(("workloads", "w1"), journal_file.keep_workload(record))
    async with recovered(path) as (parts, _):
        found = parts.workloads.get("w1")
        assert (found.state, found.parked) == (STOPPED, parked)
        assert not [*violations(found)]
        assert parts.pool.slots.get(GPU).lease is None


@pytest.mark.parametrize(
    ("phase", "state", "operation"),
    [
        ("restore", RESTORING, Operation(restore=RestoreOperation())),
        ("image", SUSPENDING, Operation(suspend=SuspendOperation())),
    ],
    ids=["restore", "image"],
)
async def test_members_that_may_outlive_the_first_process_of_an_image_count_as_restored(
    tmp_path: Path, phase: str, state: WorkloadState.ValueType, operation: Operation
) -> None:
    path = tmp_path / "journal.sqlite3"
    async with open_journal(path) as journal:
        leave_halfway(journal, of_image(tmp_path, state), "c1", phase, operation)
    async with recovered(path) as (parts, _):
        found = parts.workloads.get("w1")
        assert found.restored, "they are suspended before they are killed"
        with trio.fail_after(20):
            await found.ended.wait()


@asynccontextmanager
async def found_stray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes | None
) -> AsyncIterator[Workload]:
    """The workload of a program that the journal does not know, and whose environment lies."""
    monkeypatch.setenv("LEASEHOLD_WORKLOAD", "another")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", OTHER_GPU)
    pool = GpuPool([PoolGpu(uuid, "P40", 2**30, 1) for uuid in (GPU, OTHER_GPU)])
    with running("sleep", "1000") as peer:
        async with open_parts(WorkerConfig(), tmp_path / "workloads", lambda _: None) as parts:
            monkeypatch.setattr(Inventory, "chips", {GPU: "P40", OTHER_GPU: "P40"})
            parts = replace(parts, pool=pool)
            for name in ("w1", "odd name"):
                folder = tmp_path / "workloads" / name
                folder.mkdir()
                identity = {"pid": peer.identity.pid, "start_time_ticks": peer.identity.start_time_ticks}
                launcher = {f"launcher_{fact}": value for fact, value in identity.items()}
                facts = {**identity, **launcher, "boot_id": boot_id()}
                (folder / "process").write_text(json.dumps(facts))
                if start is not None:
                    (folder / START_FILE).write_bytes(start)
            await Strays(parts, tmp_path / "workloads", tmp_path / "socket").take_back([])
            (found,) = parts.workloads.all()
            assert found.root == peer.identity
            yield found


@pytest.mark.parametrize("state", [RUNNING, RESTORING, SUSPENDING])
async def test_a_workload_whose_gpu_is_gone_says_so_and_is_not_ready(
    tmp_path: Path, state: WorkloadState.ValueType
) -> None:
    path = tmp_path / "journal.sqlite3"
    with running("sleep", "1000") as peer:
        now, gone = datetime.now(UTC), "GPU-00000000-0000-0000-0000-00000000000f"
        lease = Lease(LeaseId("l-1"), "w1", (gone,), now, 1)
        one = Workload(
            "w1", "one", workload_pb2.WorkloadSpec(), peer.identity, tmp_path / "output", now, lease, state
        )
        async with open_journal(path) as journal:
            journal.put(("workloads", "w1"), journal_file.keep_workload(workload_record(one, boot_id())))
        async with recovered(path) as (parts, _):
            found = parts.workloads.get("w1")
            parts.workloads.report(found)
            assert (found.state, found.lease) == (RUNNING, None)
            trouble = found.trouble
            assert trouble is not None
            assert trouble.message.startswith(f"workload one has lost its lease of {gone}, which")
            parts.nursery.start_soon(parts.readiness.run)
            await trio.testing.wait_all_tasks_blocked()
            assert found.awaits_readiness
            parts.workloads.set_state(found, EXITED)
            assert found.trouble is None
            parts.nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("name", "told"), [("one", "one"), ("a b\n", "w1"), ("x" * 65, "w1"), ("", "w1")])
async def test_a_stray_has_the_name_and_the_gpus_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    start = msgspec.json.encode(Started(name, (GPU, GPU, "GPU-none")))
    async with found_stray(tmp_path, monkeypatch, start) as found:
        assert found.name == told, "a name that a coordinator takes"
        assert found.lease is not None
        assert found.lease.gpu_uuids == (GPU,)


@pytest.mark.parametrize("start", [None, b"{}", b"x"])
async def test_a_stray_without_a_record_of_its_start_gets_no_gpu_by_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes | None
) -> None:
    async with found_stray(tmp_path, monkeypatch, start) as found:
        assert (found.name, found.lease) == ("w1", None)


async def test_a_file_in_place_of_the_folders_of_workloads_is_named(tmp_path: Path) -> None:
    (tmp_path / "workloads").touch()
    with pytest.raises(StartError, match=r"workloads can't be made \(File exists\)"):
        async with open_parts(WorkerConfig(state_dir=tmp_path), tmp_path / "workloads", lambda _: None):
            pass
