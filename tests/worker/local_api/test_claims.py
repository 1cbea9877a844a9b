"""Claims of processes of a host, in the test's own process: what is refused, and what is left behind."""

import logging
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
import trio
from google.protobuf import duration_pb2
from leasehold.local.v1 import local_service_pb2
from leasehold.local.v1.local_service_pb2 import ClaimOpen, ClaimRequest, ClaimResponse
from leasehold.v1 import errors_pb2, eviction_pb2, hook_pb2, workload_pb2
from leasehold.v1.operation_pb2 import AdoptOperation, RunOperation
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import Journal, open_journal
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import ProcessIdentity, identify, lineage
from leasehold_worker.leasing.allocation import Allocation, AllocRequest, Resources
from leasehold_worker.leasing.gpu_selection import PoolGpu
from leasehold_worker.leasing.leases import ForeignProcess
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.local_api import claim_waiting
from leasehold_worker.local_api import claims as local_claims
from leasehold_worker.local_api.claim_stream import ClaimStream
from leasehold_worker.local_api.claim_waiting import ClaimWaiting
from leasehold_worker.local_api.claims import LocalClaims
from leasehold_worker.local_api.queries import LocalQueries
from leasehold_worker.local_api.service import Mailbox
from leasehold_worker.workloads import host_shares
from leasehold_worker.workloads.messages import workload_message
from leasehold_worker.workloads.states import ENDED, RUNNING, SUSPENDING, WEDGED

from tests.worker.local_claims import make_claims

INVALID = errors_pb2.ERROR_REASON_INVALID_ARGUMENT
EXEC = local_service_pb2.CLAIM_HOLD_PROCESS


@dataclass
class Stream:
    """What a claimant is told."""

    responses: list[ClaimResponse] = field(default_factory=list)
    refusals: list[OperationError] = field(default_factory=list)
    ended: trio.Event = field(default_factory=trio.Event)

    def tell(self, response: ClaimResponse | OperationError | None) -> None:
        match response:
            case ClaimResponse():
                self.responses.append(response)
            case OperationError():
                self.refusals.append(response)
            case None:
                self.ended.set()

    def granted(self) -> list[str]:
        """Ids of the workloads that it was granted."""
        found = [response.granted for response in self.responses if response.HasField("granted")]
        return [granted.workload_id for granted in found]


@dataclass
class Local:
    """The claims of a worker that serves nobody else."""

    parts: Parts
    claims: LocalClaims
    answers: LocalQueries

    def begin(self, peer: Peer, request: ClaimRequest) -> tuple[ClaimStream, Stream]:
        stream = Stream()
        session = ClaimStream(peer, request, stream.tell)
        self.claims.begin(session)
        return session, stream

    async def refused(self, peer: Peer, wanted: ClaimOpen) -> OperationError:
        """The refusal of a claim, which leaves nothing behind."""
        _, stream = self.begin(peer, ClaimRequest(open=wanted))
        with trio.fail_after(10):
            await stream.ended.wait()
        assert self.holds_nothing()
        (refusal,) = stream.refusals
        return refusal

    async def grant(self, peer: Peer, wanted: ClaimOpen) -> tuple[ClaimStream, str]:
        session, stream = self.begin(peer, ClaimRequest(open=wanted))
        with trio.fail_after(10):
            while not stream.granted():
                assert not stream.refusals, stream.refusals
                await trio.sleep(0.01)
        return session, stream.granted()[0]

    def holds_nothing(self) -> bool:
        slots = self.parts.pool.slots.snapshot().slots
        resources = self.parts.resources.fetch_machine_resources()
        return (
            all(slot.lease is None for slot in slots)
            and resources.cpu_millicores_free == resources.cpu_millicores_total
            and all(workload.state in ENDED for workload in self.parts.workloads.all())
        )


@asynccontextmanager
async def open_local(tmp_path: Path) -> AsyncIterator[Local]:
    async with (
        open_journal(tmp_path / "journal.sqlite3") as journal,
        open_parts(WorkerConfig(), tmp_path / "workloads", lambda _: None) as parts,
    ):
        commands = Commands(
            parts.operations.perform, journal, lambda _: [], None, parts.nursery, lambda _: None
        )
        claims, answers = make_claims(parts, journal, commands)
        yield Local(parts, claims, answers)
        claims.suspend_streams()


@pytest.fixture
async def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Local]:
    """A worker with four GPUs, on which NVML is silent."""
    gpus = [PoolGpu(f"GPU-{slot}", "P40", 2**30, 1) for slot in range(4)]
    monkeypatch.setattr("leasehold_worker.agent.assembly.GpuPool", lambda _, *keep: GpuPool(gpus, *keep))
    async with open_local(tmp_path) as opened:
        yield opened


@contextmanager
def running(*command: str) -> Iterator[Peer]:
    """A process that could claim."""
    with subprocess.Popen(command, start_new_session=True) as process:
        identity = identify(process.pid)
        assert identity is not None
        try:
            yield Peer(identity, os.geteuid(), "me")
        finally:
            process.kill()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running("sleep", "1000") as started:
        yield started


def wanted(gpus: int = 1, **spec: object) -> ClaimOpen:
    """A claim of GPUs and a tenth of a core: a machine with one core has enough for several."""
    resources = workload_pb2.Resources(gpu_count=gpus, cpu_millicores=100)
    return ClaimOpen(spec=workload_pb2.WorkloadSpec(resources=resources, **spec))  # type: ignore[arg-type]


def seconds(number: int) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=number)


def helper(**terms: object) -> ClaimOpen:
    return wanted(helper=workload_pb2.HelperTerms(**terms))  # type: ignore[arg-type]


def waiting(number: int) -> ClaimOpen:
    open_ = wanted()
    open_.wait.CopyFrom(seconds(number))
    return open_


def with_gpus(**resources: object) -> ClaimOpen:
    open_ = wanted(2)
    open_.spec.resources.MergeFrom(workload_pb2.Resources(**resources))  # type: ignore[arg-type]
    return open_


@pytest.mark.parametrize(
    ("open_", "field_name", "text"),
    [
        (helper(grace=seconds(10**14)), "spec.helper.grace", "at most|604800 s"),
        (helper(grace=seconds(-5)), "spec.helper.grace", "-5 s is out of range"),
        (helper(signal_number=0), "spec.helper.signal_number", "1 to 64"),
        (helper(signal_number=65), "spec.helper.signal_number", "invalid signal 65"),
        (
            helper(process_strategy=eviction_pb2.PROCESS_STRATEGY_CHECKPOINT),
            "spec.helper.process_strategy",
            "suspended or stopped",
        ),
        (waiting(-1), "wait", "-1 s is out of range"),
        (wanted(hooks=[hook_pb2.Hook(name="a")]), "hooks[0].action", "has no action"),
        (wanted(hooks=[hook_pb2.Hook(name="a" * 65_536)]), "spec.hooks", "bytes, and the limit is"),
        (waiting(10**17), "wait", "out of range"),
        (with_gpus(gpu_uuids=["GPU-1"] * 5), "spec.resources.gpu_uuids", "5 GPUs, and the limit is 4"),
        (with_gpus(gpu_uuids=["x" * 9999]), "spec.resources.gpu_uuids", "9999 characters"),
        (with_gpus(gpu_name="x" * 129), "spec.resources.gpu_name", "129 characters"),
        (with_gpus(acceptable_gpu_units=[1] * 65), "spec.resources.acceptable_gpu_units", "65 numbers"),
    ],
)
async def test_terms_that_can_not_be_kept_are_refused(
    local: Local, peer: Peer, open_: ClaimOpen, field_name: str, text: str
) -> None:
    refusal = await local.refused(peer, open_)
    assert (refusal.reason, refusal.metadata) == (INVALID, {"field": field_name}), refusal
    with pytest.raises(OperationError, match=text):
        raise refusal


async def test_another_user_gets_no_command_run_as_the_workers_user(local: Local, peer: Peer) -> None:
    command = hook_pb2.CommandHook(arguments=["id"])
    hooks = [hook_pb2.Hook(name="a", phase=hook_pb2.HOOK_PHASE_AFTER_RESTORE, command=command)]
    other = Peer(peer.identity, 65_534, "nobody")
    refusal = await local.refused(other, wanted(hooks=hooks))
    assert refusal.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
    assert refusal.metadata == {"field": "hooks[0].command"}
    await local.grant(peer, wanted(hooks=hooks))
    (workload,) = local.parts.workloads.all()
    assert list(workload.spec.hooks) == hooks


async def test_only_what_matters_is_kept_of_a_spec(local: Local, peer: Peer) -> None:
    terms = workload_pb2.HelperTerms(grace=seconds(7 * 24 * 3600), signal_number=64)
    open_ = wanted(
        arguments=["x" * 1000] * 100,
        environment={"A": "x" * 100_000},
        working_directory="/" * 100_000,
        priority=-(2**31),
        helper=terms,
    )
    await local.grant(peer, open_)
    (workload,) = local.parts.workloads.all()
    spec = workload.spec
    assert (spec.resources, spec.priority, spec.helper) == (open_.spec.resources, -(2**31), terms)
    assert len(spec.arguments) == 5
    assert not spec.environment
    assert not spec.HasField("working_directory")
    assert spec.ByteSize() < 5000


async def test_a_user_has_so_many_claims_and_root_has_room_for_more(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_waiting, "USER_CLAIMED_LIMIT", 1)
    monkeypatch.setattr(claim_waiting, "CLAIMED_LIMIT", 2)
    nothing = ClaimOpen(hold=EXEC, spec=workload_pb2.WorkloadSpec())
    with running("sleep", "1000") as second, running("sleep", "1000") as third:
        theirs = [Peer(who.identity, 65_534, "nobody") for who in (peer, second)]
        await local.grant(theirs[0], nothing)
        for who, text in ((theirs[1], "user nobody has 1 claims"), (second, None), (third, "has 2 claims")):
            if text is None:
                await local.grant(who, nothing)
                continue
            _, stream = local.begin(who, ClaimRequest(open=nothing))
            with trio.fail_after(10):
                await stream.ended.wait()
            assert text in stream.refusals[0].message
            assert stream.refusals[0].reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES


async def test_a_run_under_the_id_of_a_workload_leaves_that_as_it_is(local: Local, peer: Peer) -> None:
    _, workload_id = await local.grant(peer, wanted())
    resources = workload_pb2.Resources(gpu_count=1)
    run = RunOperation(
        name="two", spec=workload_pb2.WorkloadSpec(arguments=["sleep", "1000"], resources=resources)
    )
    with pytest.raises(OperationError, match="run it under a new id"):
        await local.parts.operations.run(workload_id, run, Progress.unheard())
    assert [workload.root for workload in local.parts.workloads.all()] == [peer.identity]
    leases = [slot.lease for slot in local.parts.pool.slots.snapshot().slots]
    assert sum(lease is not None for lease in leases) == 1


@pytest.mark.parametrize("workload_id", ["", "..", "a/b"])
async def test_an_adopted_process_gets_no_folder_of_others(
    local: Local, peer: Peer, workload_id: str
) -> None:
    """The folder of an ended workload is removed, and "" names that of all workloads."""
    adopt = AdoptOperation(pid=peer.identity.pid)
    with pytest.raises(OperationError, match="invalid workload id"):
        await local.parts.adoption.adopt(workload_id, adopt, Progress.unheard())


async def test_a_release_that_can_not_be_done_is_no_command(
    local: Local, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    """A user could write to the journal and the log in a loop."""
    _, workload_id = await local.grant(peer, ClaimOpen(hold=EXEC, spec=wanted().spec))
    caplog.set_level(logging.INFO)
    ends = rf"was started by Leasehold: stop it instead, .*end its first process, pid {peer.identity.pid}$"
    with pytest.raises(OperationError, match=ends):
        await local.answers.release(peer, workload_id)
    workload = local.parts.workloads.get(workload_id)
    workload.absent = True  # its pid may belong to another process
    with pytest.raises(OperationError, match=r"of a coordinator's client$"):
        await local.answers.release(peer, workload_id)
    assert not workload_message(workload, "worker-a").status.HasField("root_pid")
    assert "release" not in caplog.text
    with running("sleep", "1000") as claimant:
        _, claim_id = await local.grant(claimant, wanted())
        local.parts.workloads.set_state(local.parts.workloads.get(claim_id), SUSPENDING)
        with pytest.raises(OperationError, match="is SUSPENDING, and releasing it would leave it so"):
            await local.answers.release(claimant, claim_id)
        assert "release" not in caplog.text
        local.parts.workloads.set_state(local.parts.workloads.get(claim_id), RUNNING)
        await local.answers.release(claimant, claim_id)
        assert "release begins" in caplog.text


async def test_a_standing_request_to_yield_is_told_after_each_change_and_to_each_stream(
    local: Local, peer: Peer
) -> None:
    """A change to RUNNING looks like a withdrawal to its client. The grace runs on meanwhile."""
    _, workload_id = await local.grant(peer, helper(grace=seconds(1000)))
    workload = local.parts.workloads.get(workload_id)
    local.claims.ask_to_yield(workload_id, 1000.0)
    resume = ClaimRequest(resume=local_service_pb2.ClaimResume(workload_id=workload_id))
    _, stream = local.begin(peer, resume)

    async def wait_frames(*kinds: str) -> None:
        with trio.fail_after(10):
            while [one.WhichOneof("frame") for one in stream.responses] != [*kinds]:
                assert len(stream.responses) <= len(kinds), stream.responses
                await trio.sleep(0.01)

    told = ["granted", "changed", "yield_request"]
    await wait_frames(*told)
    assert 0 < stream.responses[-1].yield_request.grace.ToSeconds() < 1000
    for state in (SUSPENDING, RUNNING):
        local.parts.workloads.set_state(workload, state)
        told += ["changed", "yield_request"]
        await wait_frames(*told)
    local.claims.withdraw_yield(workload)
    told += ["changed"]
    await wait_frames(*told)
    local.parts.workloads.set_state(workload, SUSPENDING)
    await wait_frames(*told, "changed")


async def test_no_lease_is_not_the_id_of_one(local: Local, peer: Peer) -> None:
    """A program without GPUs has an empty LEASEHOLD_LEASE_ID, and released the workload of another one."""
    await local.grant(peer, wanted(0))
    with pytest.raises(OperationError) as error:
        await local.answers.release(peer, "")
    assert error.value.reason == errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD


async def test_a_list_has_no_values_of_variables(local: Local, peer: Peer) -> None:
    await local.grant(peer, wanted())
    (workload,) = local.parts.workloads.all()
    for number in range(20):
        workload.spec.environment[f"NAME_{number}"] = "s3cret"
    (listed,) = (await local.answers.list(peer)).workloads
    assert set(listed.spec.environment.values()) == {""}
    assert len(listed.spec.environment) == 20


async def test_users_see_no_command_lines_of_others(local: Local, peer: Peer) -> None:
    await local.grant(peer, wanted(arguments=["train", "--token=s3cret"]))
    (slot,) = local.parts.pool.slots.snapshot().slots[:1]
    foreign = (ForeignProcess(7, "ann", "train --key=s3cret", 1), ForeignProcess(8, "user", "own", 1))
    local.parts.pool.slots.observe({slot.gpu_uuid: foreign}, {}, {})
    other = Peer(peer.identity, peer.uid + 1, "user")
    told = await local.answers.list(other)
    assert "s3cret" not in str(told)
    assert [process.command for process in told.gpus[0].foreign_processes] == ["", "own"]
    assert told.workloads[0].spec.resources == local.parts.workloads.all()[0].spec.resources
    assert str(await local.answers.list(peer)).count("s3cret") == 2
    assert "--token" in str(await local.answers.list(Peer(peer.identity, 0, "root")))


async def test_users_see_no_texts_of_errors_of_others(local: Local, peer: Peer) -> None:
    await local.grant(peer, wanted())
    (workload,) = local.parts.workloads.all()
    reason = errors_pb2.ERROR_REASON_HOOK_FAILED
    error = OperationError(reason, "hook a failed: password s3cret", {"output": "s3cret"})
    local.parts.workloads.set_state(workload, WEDGED, error)
    told = await local.answers.list(Peer(peer.identity, peer.uid + 1, "user"))
    assert "s3cret" not in str(told)
    assert told.workloads[0].status.error.reason == reason
    assert str(await local.answers.list(peer)).count("s3cret") == 2
    assert "s3cret" in str(await local.answers.list(Peer(peer.identity, 0, "root")))
    local.parts.workloads.set_state(workload, RUNNING)
    told = await local.answers.list(Peer(peer.identity, peer.uid + 1, "user"))
    assert not told.workloads[0].status.HasField("error")


async def test_lists_have_no_hooks(local: Local, peer: Peer) -> None:
    """Their copies would take most of the time of a list."""
    http = hook_pb2.HttpHook(method="POST", url="http://127.0.0.1:1/")
    hook = hook_pb2.Hook(name="a", phase=hook_pb2.HOOK_PHASE_AFTER_RESTORE, http=http)
    await local.grant(peer, wanted(hooks=[hook], arguments=["train"]))
    (workload,) = local.parts.workloads.all()
    assert workload.spec.hooks
    for caller in (peer, Peer(peer.identity, 0, "root")):
        (listed,) = (await local.answers.list(caller)).workloads
        listed.spec.hooks.extend(workload.spec.hooks)
        assert listed.spec == workload.spec, "only hooks are left out"


async def test_a_turn_of_the_loop_makes_one_list(local: Local, peer: Peer) -> None:
    class Turns(trio.abc.Instrument):
        """The number of lists that each turn of the loop made."""

        def before_io_wait(self, timeout: float) -> None:
            made.append(0)

    made: list[int] = [0]

    async def look() -> None:
        await local.answers.list(peer)
        made[-1] += 1

    instrument = Turns()
    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(look)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    assert max(made) == 1
    assert sum(made) == 20


async def test_a_list_always_fits(local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    await local.grant(peer, wanted(arguments=["x" * 1000]))
    assert (await local.answers.list(peer)).workloads[0].spec.arguments
    monkeypatch.setattr("leasehold_worker.local_api.queries.LIST_LIMIT_BYTES", 1000)
    (workload,) = (await local.answers.list(peer)).workloads
    assert not workload.spec.arguments
    assert workload.spec.resources.gpu_count == 1


async def test_a_claimant_that_leaves_as_it_is_granted_leaves_nothing_behind(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Resources.claim
    sessions: list[ClaimStream] = []

    async def claim_and_leave(
        resources: Resources,
        workload_id: str,
        request: AllocRequest,
        *,
        priority: int = 0,
        helper: bool = False,
    ) -> Allocation:
        allocation = await claim(resources, workload_id, request, priority=priority, helper=helper)
        sessions[0].close()
        return allocation

    monkeypatch.setattr(Resources, "claim", claim_and_leave)
    session, stream = local.begin(peer, ClaimRequest(open=wanted()))
    sessions.append(session)
    with trio.fail_after(10):
        while not session.scope.cancelled_caught:  # noqa: ASYNC110 - nothing else tells
            await trio.sleep(0.01)
    assert not stream.granted()
    assert local.holds_nothing()


async def test_a_claimant_that_leaves_before_its_grant_is_stored_leaves_nothing_behind(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_settled = Journal.wait_settled
    sessions: list[ClaimStream] = []

    async def leave_and_wait(journal: Journal) -> None:
        sessions[0].close()
        await wait_settled(journal)

    monkeypatch.setattr(Journal, "wait_settled", leave_and_wait)
    sessions.append(local.begin(peer, ClaimRequest(open=wanted()))[0])
    with trio.fail_after(10):
        while not (local.parts.workloads.all() and local.holds_nothing()):  # noqa: ASYNC110 - nothing else tells
            await trio.sleep(0.01)


def fail_to_create(*_: object) -> Path:
    raise OperationError(errors_pb2.ERROR_REASON_PERMISSION_OR_OS, "the kernel refused")


async def test_limits_that_can_not_be_enforced_keep_nobody_off(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ResourceLimits, "create", fail_to_create)
    open_ = wanted()
    open_.hold = EXEC
    await local.grant(peer, open_)
    assert "are not enforced: the kernel refused" in caplog.text


async def test_a_process_with_lower_limits_than_the_worker_is_not_moved_out_of_them(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of its user's slice, which any user could leave by `exec --cpu`."""
    pids = (peer.identity.pid, os.getpid())
    monkeypatch.setattr(host_shares, "is_limited_below", lambda *asked: asked == pids)
    monkeypatch.setattr(ResourceLimits, "create", fail_to_create)
    open_ = wanted()
    open_.hold = EXEC
    await local.grant(peer, open_)
    assert "stays under the limits of its control group" in caplog.text
    assert "the kernel refused" not in caplog.text


def fail(*_: object) -> bool:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("after", [0, 1], ids=["is_alive", "owner"])
async def test_what_goes_wrong_between_grant_and_registration_leaves_nothing_behind(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    if after == 0:
        monkeypatch.setattr(local_claims, "is_alive", fail)
    else:
        check, calls = ClaimWaiting.check_unowned, count()

        async def fail_after_the_grant(claim_waiting: ClaimWaiting, session: ClaimStream) -> None:
            await check(claim_waiting, session)
            if next(calls):
                fail()

        monkeypatch.setattr(ClaimWaiting, "check_unowned", fail_after_the_grant)
    refusal = await local.refused(peer, wanted())
    assert refusal.reason == errors_pb2.ERROR_REASON_INTERNAL
    assert local.holds_nothing()


async def test_the_ancestors_of_first_processes_are_read_beside_the_worker_s_loop(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's claims can be as many, and their ancestors as many, as to take minutes."""
    await local.grant(peer, wanted())
    threads: list[threading.Thread] = []

    def read(pid: int) -> Iterator[tuple[ProcessIdentity, int]]:
        if pid == peer.identity.pid:
            threads.append(threading.current_thread())
        return lineage(pid)

    monkeypatch.setattr(claim_waiting, "lineage", read)
    with running("sleep", "1000") as other:
        await local.grant(other, wanted())
    assert len(threads) == 2, "before the wait and after the grant"
    assert threading.main_thread() not in threads


async def test_descendants_are_read_beside_the_worker_s_loop(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def look(root: ProcessIdentity) -> list[ProcessIdentity]:
        threads.append(threading.current_thread())
        return process_tree(root)

    monkeypatch.setattr(claim_waiting, "process_tree", look)
    await local.grant(peer, wanted())
    assert threads
    assert threading.main_thread() not in threads, "a process with 1,500 children took 2 s"


async def test_a_claim_takes_in_neither_workloads_nor_the_worker(local: Local) -> None:
    with running("sh", "-c", "sleep 1000 & echo; wait") as parent:
        with trio.fail_after(10):
            while not (children := children_of(parent)):  # noqa: ASYNC110 - nothing else tells
                await trio.sleep(0.01)
        child = identify(children[0])
        assert child is not None
        session, workload_id = await local.grant(Peer(child, os.geteuid(), "me"), wanted())
        _, stream = local.begin(parent, ClaimRequest(open=wanted()))
        with trio.fail_after(10):
            await stream.ended.wait()
        (refusal,) = stream.refusals
        assert refusal.reason == errors_pb2.ERROR_REASON_ALREADY_REGISTERED
        assert f"has process {child.pid} of workload {workload_id}" in refusal.message
        session.close()
        with trio.fail_after(10):
            await local.parts.workloads.get(workload_id).ended.wait()
        os.kill(child.pid, 9)
    itself = identify(os.getpid())
    assert itself is not None
    refusal = await local.refused(Peer(itself, os.geteuid(), "me"), wanted())
    assert refusal.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
    assert "the worker is among its descendants" in refusal.message


def children_of(parent: Peer) -> list[int]:
    pid = parent.identity.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "too late"])
async def test_an_inherited_claim_is_no_answer_to_a_second_one(
    local: Local, peer: Peer, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """Once it has gone on, or the time for that is over."""
    if not resume:
        monkeypatch.setattr(local_claims, "RESUME_TIMEOUT_S", 0.05)
    open_ = wanted()
    if not resume:
        open_.hold = EXEC
    _, workload_id = await local.grant(peer, open_)
    local.claims.expect_resumption()
    if resume:
        go_on = ClaimRequest(resume=local_service_pb2.ClaimResume(workload_id=workload_id))
        _, stream = local.begin(peer, go_on)
        with trio.fail_after(10):
            while stream.granted() != [workload_id]:  # noqa: ASYNC110 - nothing else tells
                await trio.sleep(0.01)
    else:
        with trio.fail_after(10):
            while workload_id in local.claims._inherited:  # noqa: ASYNC110 - nothing else tells
                await trio.sleep(0.01)
    _, second = local.begin(peer, ClaimRequest(open=open_))
    with trio.fail_after(10):
        await second.ended.wait()
    assert [refusal.reason for refusal in second.refusals] == [errors_pb2.ERROR_REASON_ALREADY_REGISTERED]


def test_of_each_kind_only_the_newest_is_unsent() -> None:
    box = Mailbox()
    granted = ClaimResponse(granted=local_service_pb2.ClaimGranted(name="a"))
    box.put(granted)
    for number in range(10_000):
        box.put(ClaimResponse(waiting=local_service_pb2.ClaimWaiting(position=number)))
        box.put(ClaimResponse(changed=local_service_pb2.ClaimChanged(state=number % 2 + 1)))  # type: ignore[arg-type]
        box.put(ClaimResponse(yield_request=local_service_pb2.ClaimYield(grace=seconds(number))))
    refusal = OperationError(INVALID, "no")
    box.put(refusal)
    box.put(None)
    box.put(granted)
    assert len(box) == 6
    assert box.get() == granted
    waiting_ = box.get()
    assert isinstance(waiting_, ClaimResponse)
    assert waiting_.waiting.position == 9999
    changed, asked = box.get(), box.get()
    assert isinstance(changed, ClaimResponse)
    assert isinstance(asked, ClaimResponse)
    assert (changed.changed.state, asked.yield_request.grace.seconds) == (2, 9999)
    assert (box.get(), box.get(), len(box)) == (refusal, None, 0)
