"""Probing and dumping: the conversation with CRIU, against one that speaks as the real one does."""

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold_worker.checkpoints import volume_calls
from leasehold_worker.criu import dump as dumping
from leasehold_worker.criu.dump import COMMITTED, dump
from leasehold_worker.criu.installation import decisive_errors, probe
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import ProcessIdentity, is_alive, wait_ended
from trio.testing import wait_all_tasks_blocked

from tests.worker.criu_cases import MakeCriu, program, wait_counted
from tests.worker.dead_volumes import dead_volume

END_TIMEOUT_S = 30.0


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[ProcessIdentity]:
    with program(tmp_path) as identity:
        yield identity


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "images/i-1.partial"
    path.mkdir(parents=True)
    return path


def renames(directory: Path) -> Callable[[], Awaitable[None]]:
    async def commit() -> None:
        await trio.lowlevel.checkpoint()
        directory.rename(directory.with_suffix(""))  # noqa: ASYNC240 - as quick as can be

    return commit


async def never() -> None:
    raise AssertionError("without reporting a complete image")


async def test_a_criu_that_works_is_found(make_criu: MakeCriu) -> None:
    facts = make_criu("")
    if os.geteuid() != 0:
        assert "root" in str(await probe(str(facts.path)))
    else:
        assert await probe(str(facts.path)) == facts


@pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root")
@pytest.mark.parametrize(
    ("scenario", "timeout_s", "reason"),
    [
        ("old", 30, "is version 3.17.1, which fails on current kernels: 4.2 is needed"),
        pytest.param("check-fails", 30, "(Kernel lacks what is needed)", marks=pytest.mark.long),
        pytest.param("silent", 0.5, "no answer within 0.5 s", marks=pytest.mark.long),
    ],
)
async def test_a_criu_that_does_not_work_is_refused_with_the_reason(
    make_criu: MakeCriu, scenario: str, timeout_s: float, reason: str
) -> None:
    assert reason in str(await probe(str(make_criu(scenario).path), timeout_s=timeout_s))


async def test_no_criu_and_no_program_are_reasons(tmp_path: Path) -> None:
    assert "is missing" in str(await probe(str(tmp_path / "criu")))
    plain = tmp_path / "criu"
    plain.write_text("#!/bin/true\n")
    plain.chmod(0o755)
    assert isinstance(await probe(str(plain)), str)


async def ended(process: ProcessIdentity) -> None:
    """Waits for the end of a process that CRIU has killed. CRIU itself does not wait for it."""
    with trio.fail_after(END_TIMEOUT_S):
        await wait_ended(process)


async def test_a_dump_ends_the_process_after_its_commit(
    make_criu: MakeCriu, counter: ProcessIdentity, directory: Path
) -> None:
    told: list[int] = []
    alive_at_commit = False

    async def commit() -> None:
        nonlocal alive_at_commit
        alive_at_commit = is_alive(counter)
        await renames(directory)()

    await dump(make_criu(""), counter.pid, directory, commit, progress=told.append)
    assert alive_at_commit
    await ended(counter)
    assert sorted(os.listdir(directory.with_suffix(""))) == ["inventory.img", "pages-1.img"]
    assert os.listdir(directory.parent) == [directory.with_suffix("").name], "its log is gone"
    assert told


async def test_a_commit_that_fails_leaves_the_process_running(
    make_criu: MakeCriu, counter: ProcessIdentity, directory: Path, tmp_path: Path
) -> None:
    async def commit() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        await dump(make_criu(""), counter.pid, directory, commit)
    await wait_counted(tmp_path)
    assert os.listdir(directory.parent) == []


@pytest.mark.parametrize("scenario", ["", "dump-writes"])
async def test_a_cancelled_dump_leaves_the_process_running(
    make_criu: MakeCriu, counter: ProcessIdentity, directory: Path, tmp_path: Path, scenario: str
) -> None:
    """In the middle of its writing, too, where CRIU can't be asked."""
    reached = trio.Event()

    async def commit() -> None:
        reached.set()
        await trio.sleep_forever()

    def progress(size: int) -> None:
        if scenario and size > 0:
            reached.set()

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: dump(make_criu(scenario), counter.pid, directory, commit, progress=progress)
            )
            await reached.wait()
            scope.cancel()
    await wait_counted(tmp_path)
    assert os.listdir(directory.parent) == []


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("dump-fails", r"it failed: inet: Connected TCP socket\)"),
        pytest.param("dump-crashes", "ended without an answer", marks=pytest.mark.long),
        pytest.param("dump-hangs", "not complete within 1 s", marks=pytest.mark.long),
    ],
)
async def test_a_dump_that_fails_says_why_and_leaves_the_process_running(
    make_criu: MakeCriu,
    counter: ProcessIdentity,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    why: str,
) -> None:
    timeout_s = 30.0
    if scenario == "dump-hangs":
        timeout_s = 1.0
        monkeypatch.setattr(dumping, "UNDO_TIMEOUT_S", 0.2)
        monkeypatch.setattr(dumping, "END_TIMEOUT_S", 0.2)
    with pytest.raises(OperationError, match=why) as caught:
        await dump(make_criu(scenario), counter.pid, directory, never, timeout_s=timeout_s)
    assert caught.value.reason == errors_pb2.ERROR_REASON_CRIU_FAILED
    assert "phase" not in caught.value.metadata
    await wait_counted(tmp_path)
    assert os.listdir(directory.parent) == []


async def test_a_failure_after_the_commit_is_told_apart(
    make_criu: MakeCriu, counter: ProcessIdentity, directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(OperationError, match="did not end the processes") as caught:
        await dump(make_criu("dump-stays"), counter.pid, directory, renames(directory))
    assert caught.value.metadata["phase"] == COMMITTED
    assert os.listdir(directory.parent) == [directory.with_suffix("").name], "the image is there"
    await wait_counted(tmp_path)


async def test_a_cancellation_after_the_commit_is_noticed_when_the_process_has_ended(
    make_criu: MakeCriu, counter: ProcessIdentity, directory: Path
) -> None:
    with trio.CancelScope() as scope:

        async def commit() -> None:
            await renames(directory)()
            scope.cancel()

        await dump(make_criu(""), counter.pid, directory, commit)
    await ended(counter)
    assert os.listdir(directory.parent) == [directory.with_suffix("").name]


async def test_a_volume_that_does_not_answer_holds_up_no_worker(
    make_criu: MakeCriu, counter: ProcessIdentity, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"

    async def fail_to_dump() -> None:
        with pytest.raises(OperationError, match="its directories can't be opened"):
            await dump(make_criu(""), counter.pid, volume / "i-1.partial", never)

    async with trio.open_nursery() as nursery:
        with dead_volume(volume), trio.fail_after(10):
            nursery.start_soon(fail_to_dump)
            await wait_all_tasks_blocked()
    await wait_counted(tmp_path)


async def test_a_volume_that_hangs_during_a_dump_holds_up_no_worker(
    make_criu: MakeCriu, counter: ProcessIdentity, directory: Path
) -> None:
    async def commit() -> None:
        with dead_volume(directory), trio.fail_after(10):
            await trio.sleep(2 * dumping.PROGRESS_INTERVAL_S)
        await renames(directory)()

    await dump(make_criu(""), counter.pid, directory, commit, progress=lambda _: None)
    await ended(counter)
    assert os.listdir(directory.parent) == [directory.with_suffix("").name]


async def test_a_failed_dump_on_a_volume_that_hangs_is_rolled_back(
    make_criu: MakeCriu,
    counter: ProcessIdentity,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.3)
    with ExitStack() as mounted:

        async def commit() -> None:
            await trio.lowlevel.checkpoint()
            mounted.enter_context(dead_volume(directory))
            raise OperationError(errors_pb2.ERROR_REASON_INSUFFICIENT_DISK, "no room is left")

        began = trio.current_time()
        with pytest.raises(OperationError, match="no room is left"):
            await dump(make_criu(""), counter.pid, directory, commit)
        assert trio.current_time() - began < 10, "nothing waits for the volume"
        await wait_counted(tmp_path)


def test_errors_that_did_not_matter_are_not_told() -> None:
    log = (
        "(0.1) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self\n"
        "(0.2) Warn  (criu/x.c:2): x\n(0.3) Error (criu/files.c:3): Can't dump it\n"
        "(0.4) Error (criu/cr-dump.c:4): Dumping FAILED.\n"
    )
    assert decisive_errors(log) == "Can't dump it"
