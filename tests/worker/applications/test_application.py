"""Applications that save themselves: real processes over the real socket, called as the worker calls them."""

import errno
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from leasehold.local.v1.kernel_pb2 import KernelHello
from leasehold.local.v1.local_service_pb2 import ServeKernelRequest
from leasehold.v1 import workload_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold_worker.applications import checkpointing
from leasehold_worker.applications import registry as kernels_module
from leasehold_worker.applications.checkpointing import restore, save
from leasehold_worker.applications.stream import ApplicationStream
from leasehold_worker.applications.timeouts import ApplicationTimeouts
from leasehold_worker.checkpoints import volume_calls
from leasehold_worker.checkpoints.application_file import ApplicationReader, StoredCheckpoint
from leasehold_worker.checkpoints.application_format import PAYLOAD_OFFSET
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.folders import disk_errors
from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.processes import identify, wait_ended
from leasehold_worker.local_api import service
from leasehold_worker.workloads.states import RUNNING, SUSPENDING

from tests.grids import grid
from tests.worker.kernel_host import SIZE, Served, open_served
from tests.worker.kernel_programs import AGAIN, ASYNCIO, CARELESS, FORKS, STRANGER, THREADS, TRIO, TWICE

T = TypeVar("T")

RESTLESS = ApplicationTimeouts(quiescence_s=0.5)
# Of each step that hangs. Where the one before shares its deadline, that has time to answer.
HANGING = {
    "can_checkpoint": (
        ApplicationTimeouts(answer_s=0.2),
        "did not say whether it can save itself within 0.2 s",
    ),
    "estimate": (ApplicationTimeouts(answer_s=3.0), "did not estimate its size within 3 s"),
    "prepare": (ApplicationTimeouts(quiescence_s=0.2, cancel_s=0.2), "did not become quiescent within 0.2 s"),
    "is_quiescent": (
        ApplicationTimeouts(quiescence_s=3.0, cancel_s=0.2),
        "did not become quiescent within 3 s",
    ),
    "checkpoint": (ApplicationTimeouts(checkpoint_s=0.2, cancel_s=0.2), "did not save itself within 0.2 s"),
}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with open_served(tmp_path) as world:
        yield world


async def refused(call: Callable[[], Awaitable[object]]) -> OperationError:
    with pytest.raises(OperationError) as error:
        await call()
    return error.value


def name(error: OperationError) -> str:
    return ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


@pytest.mark.parametrize("program", [THREADS, TRIO, ASYNCIO], ids=["threads", "trio", "asyncio"])
async def test_what_an_application_saves_another_one_goes_on_from(served: Served, program: str) -> None:
    application, kernel = await served.serve(program=program)
    assert kernel.facts.kernel_id == "app"
    assert await kernel.health() == workload_pb2.KERNEL_HEALTH_DEGRADED
    steps: list[str] = []
    saved = await save(kernel, served.store, resume=True, progress=lambda step, _: steps.append(step))
    header = saved.checkpoint.header
    assert (header.workload_name, header.size_bytes, header.custom) == (
        "app",
        SIZE,
        {"size": str(SIZE)},
    )
    assert list(dict.fromkeys(steps)) == ["ask", "prepare", "checkpoint", "store", "cancel"]
    asked = ["can_checkpoint", "estimate", "prepare", "is_quiescent", "checkpoint", "cancel"]
    assert application.said()[1:] == asked
    await served.end(application)

    successor, kernel = await served.restored(program=program)
    assert "begun" not in successor.output.read_text()
    restored = await restore(kernel, served.store, workload_id=header.workload_id)
    assert restored.checkpoint == saved.checkpoint
    assert restored.warnings == ()
    assert await successor.wait_line("begun") == f"begun {SIZE} {header.checkpoint_id}"


@pytest.mark.long
async def test_without_resuming_it_stays_at_rest_until_it_is_told_to_go_on(served: Served) -> None:
    application, kernel = await served.serve()
    await save(kernel, served.store, resume=False)
    assert "cancel" not in application.said()
    await kernel.cancel()
    await kernel.cancel()
    assert application.said().count("cancel") == 1
    await save(kernel, served.store, resume=True)
    assert len(served.store.scan(kernel.workload.workload_id)) == 2


@pytest.mark.long
async def test_an_application_that_does_not_know_its_size_saves_itself(served: Served) -> None:
    _, kernel = await served.serve("unsized")
    assert await kernel.size_estimate() is None
    saved = await save(kernel, served.store, resume=True)
    assert saved.checkpoint.header.size_bytes == SIZE


@pytest.mark.parametrize(
    ("mode", "reason", "match", "cancelled"),
    [
        ("busy", "KERNEL_NOT_READY", "in the middle of something", False),
        pytest.param("huge", "INSUFFICIENT_DISK", "expects to save 888.2 PiB", False, marks=pytest.mark.long),
        pytest.param(
            "restless", "KERNEL_FAILED", "did not become quiescent within 0.5 s", True, marks=pytest.mark.long
        ),
        ("encode-fails", "KERNEL_FAILED", "ValueError: no more", True),
        pytest.param(
            "raises-in-can_checkpoint",
            "KERNEL_FAILED",
            "failed to say whether it can save itself: ValueError: told",
            False,
            marks=pytest.mark.long,
        ),
        pytest.param("raises-in-estimate", "KERNEL_FAILED", "told to", False, marks=pytest.mark.long),
        ("raises-in-prepare", "KERNEL_FAILED", "told to", True),
        pytest.param("raises-in-is_quiescent", "KERNEL_FAILED", "told to", True, marks=pytest.mark.long),
        pytest.param("raises-in-checkpoint", "KERNEL_FAILED", "told to", True, marks=pytest.mark.long),
    ],
)
async def test_what_goes_wrong_is_undone(
    served: Served, mode: str, reason: str, match: str, cancelled: bool
) -> None:
    application, kernel = await served.serve(mode)
    timeouts = RESTLESS if mode == "restless" else ApplicationTimeouts()
    error = await refused(lambda: save(kernel, served.store, resume=False, timeouts=timeouts))
    assert name(error) == reason
    assert match in error.message
    assert ("cancel" in application.said()) is cancelled
    assert served.files() == []
    assert served.kernel() is kernel


@pytest.mark.long
@pytest.mark.parametrize("step", grid(HANGING, "checkpoint"))
async def test_one_that_hangs_in_a_step_loses_its_stream_and_comes_back(served: Served, step: str) -> None:
    application, kernel = await served.serve(f"hangs-in-{step}")
    timeouts, told = HANGING[step]
    error = await refused(lambda: save(kernel, served.store, resume=False, timeouts=timeouts))
    assert name(error) == "KERNEL_FAILED"
    assert told in error.message
    assert served.files() == []
    application.say("release")
    kernel = await served.applications.wait_served(kernel.workload.workload_id, 20)
    if step in ("prepare", "is_quiescent", "checkpoint"):
        await application.wait_line("cancel")
    await save(kernel, served.store, resume=True)


@pytest.mark.long
async def test_one_that_stalls_while_it_saves_goes_on(served: Served) -> None:
    application, kernel = await served.serve("stalls-in-the-middle")
    timeouts = ApplicationTimeouts(checkpoint_s=0.5, cancel_s=0.2)
    error = await refused(lambda: save(kernel, served.store, resume=False, timeouts=timeouts))
    assert "did not save itself within 0.5 s" in error.message
    assert served.files() == []
    application.say("release")
    await application.wait_line("cancel")


@pytest.mark.parametrize(
    "mode",
    grid(
        ("dies-in-prepare", "dies-in-is_quiescent", "dies-in-checkpoint", "dies-in-the-middle"),
        "dies-in-the-middle",
    ),
)
async def test_one_that_dies_leaves_nothing(served: Served, mode: str) -> None:
    _, kernel = await served.serve(mode)
    error = await refused(lambda: save(kernel, served.store, resume=False))
    assert name(error) == "KERNEL_FAILED"
    assert "disconnected" in error.message
    assert served.files() == []
    with trio.fail_after(10):
        await kernel.workload.ended.wait()
    assert served.applications.of(kernel.workload.workload_id) is None


async def test_a_cancelled_save_lets_the_application_go_on(served: Served) -> None:
    application, kernel = await served.serve("stalls-in-the-middle")
    with trio.CancelScope() as scope:

        def follow(step: str, size: int) -> None:
            if step == "checkpoint" and size:
                application.say("release")
                scope.cancel()

        await save(kernel, served.store, resume=False, progress=follow)
    assert scope.cancelled_caught
    assert application.said()[-1] == "cancel"
    assert served.files() == []
    assert await kernel.can_checkpoint()


def hanging(answers: threading.Event, function: Callable[..., T]) -> Callable[..., T]:
    """A function that waits for its volume first."""

    def call(*arguments: object) -> T:
        answers.wait(20)
        return function(*arguments)

    return call


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "at its deadline"])
async def test_a_volume_that_hangs_during_a_save_keeps_no_application_at_rest(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.3)
    if not is_cancelled:
        monkeypatch.setattr(checkpointing, "DELETE_TIMEOUT_S", 0.3)
    application, kernel = await served.serve()
    answers = threading.Event()
    try:
        with monkeypatch.context() as patch, trio.fail_after(10):
            patch.setattr(os, "pwrite", hanging(answers, os.pwrite))
            with trio.move_on_after(1 if is_cancelled else 60) as scope:
                error = await refused(lambda: save(kernel, served.store, resume=True))
                assert name(error) == "STORAGE_UNAVAILABLE"
            assert scope.cancelled_caught == is_cancelled
        assert application.said()[-1] == "cancel"
    finally:
        answers.set()
    with trio.fail_after(10):
        while os.listdir(served.store.root):  # noqa: ASYNC110 - a thread deletes them
            await trio.sleep(0.01)
    await save(kernel, served.store, resume=True)


async def test_a_restore_from_a_volume_that_hangs_takes_no_older_checkpoint(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = await saved_twice(served)
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.3)
    _, kernel = await served.restored()
    answers = threading.Event()
    opened: list[str] = []

    def hang(self: ApplicationStore, checkpoint: StoredCheckpoint) -> ApplicationReader:
        opened.append(checkpoint.checkpoint_id)
        answers.wait(20)
        return original(self, checkpoint)

    original = ApplicationStore.open
    try:
        with monkeypatch.context() as patch, trio.fail_after(10):
            patch.setattr(ApplicationStore, "open", hang)
            error = await refused(lambda: restore(kernel, served.store, workload_id=older.header.workload_id))
    finally:
        answers.set()
    assert name(error) == "STORAGE_UNAVAILABLE"
    assert opened == [newer.checkpoint_id]


@pytest.mark.long
async def test_a_restore_from_a_volume_that_fails_takes_no_older_checkpoint(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, _ = await saved_twice(served)
    _, kernel = await served.restored()
    tried: list[ApplicationReader] = []

    def fail(reader: ApplicationReader, _: Callable[[], None]) -> None:
        tried.append(reader)
        with disk_errors(served.store.root):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ApplicationReader, "verify", fail)
    error = await refused(lambda: restore(kernel, served.store, workload_id=older.header.workload_id))
    assert name(error) == "PERMISSION_OR_OS"
    assert len(tried) == 1


@pytest.mark.long
async def test_a_budget_holds_even_where_the_estimate_was_wrong(served: Served) -> None:
    application, kernel = await served.serve(size=SIZE)
    error = await refused(lambda: save(kernel, served.store, resume=True, available_bytes=SIZE - 1))
    assert name(error) == "INSUFFICIENT_DISK"
    assert "prepare" not in application.said()
    await served.end(application)
    # An estimate of 0 says that it is unknown.
    other, kernel = await served.serve("encode-fails", size=0)
    error = await refused(lambda: save(kernel, served.store, resume=True, available_bytes=65_535))
    assert name(error) == "INSUFFICIENT_DISK"
    assert "cancel" in other.said()
    assert served.files() == []


def peak_bytes(*, anew: bool = False) -> int:
    """The most that this process has had in memory: ever, or since it was last asked to begin anew."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak is what there is now
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in each)
    return int(line.split()[1]) * 1024


@pytest.mark.long
async def test_fifty_megabytes_take_little_memory(served: Served) -> None:
    size = 50_000_000
    application, kernel = await served.serve(size=size)
    before = peak_bytes(anew=True)
    saved = await save(kernel, served.store, resume=False)
    await served.end(application)
    successor, kernel = await served.restored()
    await restore(kernel, served.store, workload_id=saved.checkpoint.header.workload_id)
    assert peak_bytes() - before < size // 2
    assert await successor.wait_line("begun") == f"begun {size} {saved.checkpoint.checkpoint_id}"


async def saved_twice(served: Served, size: int = SIZE) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    application, kernel = await served.serve(size=size)
    older = await save(kernel, served.store, resume=True)
    newer = await save(kernel, served.store, resume=False)
    await served.end(application)
    return older.checkpoint, newer.checkpoint


def alter(checkpoint: StoredCheckpoint, position: int = PAYLOAD_OFFSET + 1000) -> None:
    with checkpoint.path.open("r+b") as file:
        file.seek(position)
        file.write(b"\xff")


@pytest.mark.long
@pytest.mark.parametrize(
    "position", [pytest.param(60, marks=pytest.mark.long), PAYLOAD_OFFSET + 1000], ids=["header", "payload"]
)
async def test_an_altered_one_is_passed_over_with_a_warning(served: Served, position: int) -> None:
    older, newer = await saved_twice(served)
    alter(newer, position)
    successor, kernel = await served.restored()
    restored = await restore(kernel, served.store, workload_id=older.header.workload_id)
    assert restored.checkpoint == older
    (warning,) = restored.warnings
    assert newer.checkpoint_id in warning
    assert successor.said().count("restore") == 1


@pytest.mark.long
async def test_the_one_that_was_named_is_restored_or_none(served: Served) -> None:
    older, newer = await saved_twice(served)
    alter(newer)
    successor, kernel = await served.restored()
    named = partial(restore, kernel, served.store, workload_id=older.header.workload_id)
    error = await refused(lambda: named(checkpoint_id=newer.checkpoint_id))
    assert name(error) == "CHECKPOINT_CORRUPT"
    error = await refused(lambda: named(checkpoint_id="k-9-0123456789abcdef"))
    assert name(error) == "UNKNOWN_CHECKPOINT"
    assert "begun" not in successor.output.read_text()
    assert (await named(checkpoint_id=older.checkpoint_id)).checkpoint == older
    await successor.wait_line("begun")


@pytest.mark.long
async def test_another_version_is_not_restored(served: Served) -> None:
    older, _ = await saved_twice(served)
    successor, kernel = await served.restored(version=2)
    error = await refused(lambda: restore(kernel, served.store, workload_id=older.header.workload_id))
    assert name(error) == "CHECKPOINT_INCOMPATIBLE"
    assert "version 1" in error.message
    assert successor.said() == []


@pytest.mark.long
async def test_one_that_fails_to_be_restored_does_not_begin(served: Served) -> None:
    older, _ = await saved_twice(served)
    successor, kernel = await served.restored("decode-fails")
    error = await refused(lambda: restore(kernel, served.store, workload_id=older.header.workload_id))
    assert name(error) == "KERNEL_FAILED"
    assert "ValueError: can't be read" in error.message
    assert "begun" not in successor.output.read_text()


@pytest.mark.long
async def test_one_that_its_application_can_not_be_restored_from_is_passed_over(served: Served) -> None:
    older, newer = await saved_twice(served)
    successor, kernel = await served.restored("raises-once-in-restore")
    restored = await restore(kernel, served.store, workload_id=older.header.workload_id)
    assert restored.checkpoint == older
    (warning,) = restored.warnings
    assert "restored from an older checkpoint" in warning
    assert "ValueError: told to" in warning
    assert successor.said().count("restore") == 2
    assert await successor.wait_line("begun") == f"begun {SIZE} {older.checkpoint_id}"
    assert newer.path.exists(), "it is not deleted for that"


@pytest.mark.long
async def test_one_that_dies_while_it_is_restored_is_given_no_older_one(served: Served) -> None:
    older, _ = await saved_twice(served)
    _, kernel = await served.restored("dies-in-restore")
    error = await refused(lambda: restore(kernel, served.store, workload_id=older.header.workload_id))
    assert name(error) == "KERNEL_FAILED"
    assert "disconnected before it could restore itself" in error.message


@pytest.mark.long
async def test_a_restore_has_a_deadline(served: Served) -> None:
    older, _ = await saved_twice(served, size=1000)
    successor, kernel = await served.restored("hangs-in-restore")
    timeouts = ApplicationTimeouts(restore_s=1.0)
    workload_id = older.header.workload_id
    newest = partial(restore, kernel, served.store, workload_id=workload_id, timeouts=timeouts)
    error = await refused(newest)
    assert "did not restore itself within 1 s" in error.message
    assert successor.said().count("restore") == 1
    assert "begun" not in successor.output.read_text()


async def test_nothing_to_restore_is_said(served: Served) -> None:
    _, kernel = await served.restored()
    error = await refused(lambda: restore(kernel, served.store, workload_id="w-none"))
    assert name(error) == "UNKNOWN_CHECKPOINT"


@pytest.mark.long
async def test_an_application_that_works_is_not_restored(served: Served) -> None:
    application, kernel = await served.serve()
    saved = await save(kernel, served.store, resume=True)
    workload_id = saved.checkpoint.header.workload_id
    error = await refused(lambda: restore(kernel, served.store, workload_id=workload_id))
    assert "has already started" in error.message
    assert "restore" not in application.said()


async def test_a_workload_has_one_kernel(served: Served) -> None:
    application, kernel = await served.serve(program=TWICE)
    assert await application.wait_line("refused") == "refused ALREADY_REGISTERED"
    assert served.kernel() is kernel


async def test_a_workload_registers_its_applications_at_a_rate(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each registration makes events of the session and writes to the journal."""
    monkeypatch.setattr(kernels_module, "REGISTRATIONS_BURST", 2)
    application = served.start(AGAIN, size=2)
    await application.wait_line("done")
    (workload,) = served.parts.workloads.all()
    with trio.fail_after(20):
        while workload.kernel is not None:
            await served.parts.workloads.wait_changed()
    generation = workload.generation
    identity = identify(application.process.pid)
    assert identity is not None
    session = ApplicationStream(Peer(identity, os.geteuid(), "me"))
    served.applications.begin(session)
    facts = workload_pb2.Kernel(kernel_id="app", kind="app")
    await session.take_in(ServeKernelRequest(hello=KernelHello(kernel=facts)))
    with trio.fail_after(5):
        refusal = await session.hand_out()
    assert isinstance(refusal, OperationError)
    assert name(refusal) == "INSUFFICIENT_RESOURCES"
    assert "a workload has 2 registrations at once, and one per 10 s: try again in" in refusal.message
    assert refusal.metadata["bound"] == "registrations"
    assert workload.generation == generation


async def test_an_application_waits_until_it_may_register_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_module, "REGISTRATIONS_BURST", 1)
    monkeypatch.setattr(kernels_module, "REGISTRATION_INTERVAL_S", 0.5)
    application = served.start(AGAIN, size=3)
    await application.wait_line("done")


@pytest.mark.long
async def test_a_stranger_can_not_speak_for_a_workload(served: Served) -> None:
    _, kernel = await served.serve()
    stranger = served.start(STRANGER, kernel.workload.workload_id)
    assert await stranger.wait_line("refused") == "refused UNKNOWN_WORKLOAD"
    assert served.kernel() is kernel


async def test_who_says_nothing_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "HELLO_TIMEOUT_S", 0.2)
    code = """
import sys, grpc
from leasehold.local.v1.local_service_pb2_grpc import LocalServiceStub
import threading
def silent():
    threading.Event().wait(20)
    yield
with grpc.insecure_channel("unix:" + sys.argv[1]) as channel:
    try:
        next(LocalServiceStub(channel).ServeKernel(silent()))
    except grpc.RpcError as error:
        print(error.code().name, flush=True)
    import os; os._exit(0)
"""
    command = [sys.executable, "-c", code, str(served.folder / "worker.sock")]
    with trio.fail_after(15):
        done = await trio.run_process(command, capture_stdout=True)
    assert done.stdout == b"INVALID_ARGUMENT\n"


@pytest.mark.long
async def test_there_is_room_for_so_many_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KERNELS_LIMIT", 1)
    async with open_served(tmp_path) as served:
        _, kernel = await served.serve()
        stranger = served.start(STRANGER, kernel.workload.workload_id)
        assert await stranger.wait_line("refused") == "refused INSUFFICIENT_RESOURCES"


@pytest.mark.long
async def test_an_end_is_seen_by_who_waits_for_a_kernel(served: Served) -> None:
    application, kernel = await served.serve()
    workload_id = kernel.workload.workload_id
    with trio.fail_after(10):
        assert await served.applications.wait_served(workload_id, 5) is kernel
    await served.end(application)
    error = await refused(lambda: served.applications.wait_served(workload_id, 5))
    assert name(error) == "KERNEL_NOT_READY"
    assert "ended before" in error.message


async def test_an_end_during_an_operation_is_seen_by_who_waits_for_a_kernel(served: Served) -> None:
    """The workload ends after the operation, which is what waits."""
    application, kernel = await served.serve()
    workload = kernel.workload
    served.parts.workloads.set_state(workload, SUSPENDING)
    application.process.kill()
    with trio.fail_after(20):
        await wait_ended(workload.root)
        error = await refused(lambda: served.applications.wait_served(workload.workload_id, 1000))
    assert "ended before" in error.message
    assert not workload.ended.is_set()
    served.parts.workloads.set_state(workload, RUNNING)
    with trio.fail_after(20):
        await workload.ended.wait()


async def test_how_an_application_is_is_told_with_its_workload(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_module, "HEALTH_INTERVAL_S", 0.05)
    _, kernel = await served.serve()
    with trio.fail_after(20):
        while kernel.workload.kernel is None or not kernel.workload.kernel.health:
            await served.parts.workloads.wait_changed()
    assert kernel.workload.kernel.health == workload_pb2.KERNEL_HEALTH_DEGRADED
    assert kernel.workload.kernel.kernel_id == "app"


@pytest.mark.long
async def test_a_program_that_does_not_close_its_kernel_ends_all_the_same(served: Served) -> None:
    application = served.start(CARELESS)
    await application.wait_line("begun")
    with trio.fail_after(20):
        assert await trio.to_thread.run_sync(partial(application.process.wait, 20)) == 0


async def test_another_user_can_not_speak_for_a_workload(served: Served) -> None:
    application, kernel = await served.serve()
    identity = identify(application.process.pid)
    assert identity is not None
    session = ApplicationStream(Peer(identity, 65534, "nobody"))
    served.applications.begin(session)
    await session.take_in(ServeKernelRequest(hello=KernelHello(kernel=kernel.facts)))
    with trio.fail_after(5):
        refusal = await session.hand_out()
    assert isinstance(refusal, OperationError)
    assert name(refusal) == "NOT_PERMITTED"
    assert await session.hand_out() is None


async def test_a_fork_of_an_application_ends_without_it(served: Served) -> None:
    application = served.start(FORKS)
    await application.wait_line("child 0")
    await application.wait_line("served True")
