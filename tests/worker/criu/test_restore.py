"""Restoring behind a launcher, against a CRIU that speaks as the real one does."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.criu.restore import new_identities, restore
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity, identify, is_alive
from leasehold_worker.programs import programs
from leasehold_worker.programs.programs import abandon, exit_record, launched, wait_exit

from tests.worker.criu_cases import MakeCriu, end, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a process gets a pid of choice from root only")


@pytest.fixture
def pid() -> int:
    """One that was somebody's, and is nobody's now."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def image(tmp_path: Path, pid: int) -> Path:
    path = tmp_path / "images/i-1"
    path.mkdir(parents=True)
    (path / "pid").write_text(str(pid))
    return path


@pytest.fixture
def folder(tmp_path: Path, pid: int) -> Iterator[Path]:
    path = tmp_path / "w-1"
    path.mkdir()
    yield path
    if (who := launched(path)) is not None:
        end(who.program)


async def bring_back(
    facts: CriuFacts,
    image: Path,
    pid: int,
    folder: Path,
    timeout_s: float = 30.0,
) -> None:
    """Tries to restore, and waits for the launcher's end."""
    failure: OperationError | None = None
    async with trio.open_nursery() as nursery:
        try:
            await restore(
                facts,
                image,
                pid,
                [pid],
                folder,
                group=None,
                nursery=nursery,
                timeout_s=timeout_s,
            )
        except OperationError as error:
            failure = error
    if failure is not None:
        raise failure


async def test_the_restored_is_written_down_and_its_end_is_kept(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path
) -> None:
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]  # the launcher gets large numbers
    async with trio.open_nursery() as nursery:
        root = await restore(make_criu(""), image, pid, [pid], folder, group=None, nursery=nursery)
        for descriptor in held:
            os.close(descriptor)
        assert root == identify(pid)
        who = launched(folder)
        assert who is not None
        assert who.program == root
        assert exit_record(folder) is None
        assert os.listdir(image.parent) == ["i-1"], "CRIU's log is gone"
        open_files = f"/proc/{who.launcher_pid}/fd"
        await wait_for(lambda: sorted(os.listdir(open_files)) == ["0", "1", "2"])
        former = ProcessIdentity(Pid(pid), root.start_time_ticks - 1)
        assert new_identities([former]) == {former: root}
        os.kill(pid, signal.SIGTERM)
        record = await wait_exit(folder, root)
    assert record is not None
    assert record.returncode == -signal.SIGTERM
    assert new_identities([former]) == {}


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("restore-fails", "Can't fork for"),
        ("restore-crashes", "criu ended without an answer"),
        ("restore-killed", "criu ended without an answer"),
        ("restored-dies", "ended while it was being restored"),
    ],
)
async def test_a_restore_that_fails_says_why_and_leaves_nothing(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path, scenario: str, why: str
) -> None:
    with pytest.raises(OperationError, match=why) as caught:
        await bring_back(make_criu(scenario), image, pid, folder)
    assert caught.value.reason == errors_pb2.ERROR_REASON_CRIU_FAILED
    assert identify(pid) is None
    assert os.listdir(folder) == []
    assert os.listdir(image.parent) == ["i-1"]


async def test_a_failure_after_it_was_written_down_is_an_end_with_its_error(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path
) -> None:
    with pytest.raises(OperationError, match="criu failed"):
        await bring_back(make_criu("restore-fails-late"), image, pid, folder)
    assert launched(folder) is not None
    record = exit_record(folder)
    assert record is not None
    assert record.error == "criu failed"


async def test_what_was_given_up_is_never_let_run(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path
) -> None:
    """As by a worker that was started anew in the middle."""
    assert abandon(folder)
    with pytest.raises(OperationError, match="given up"):
        await bring_back(make_criu(""), image, pid, folder)
    assert identify(pid) is None
    assert launched(folder) is None


@pytest.mark.parametrize("cancelled", [False, True])
async def test_one_that_hangs_is_given_up(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path, cancelled: bool
) -> None:
    if cancelled:
        with trio.move_on_after(0.5) as scope:
            await bring_back(make_criu("restore-hangs"), image, pid, folder)
        assert scope.cancelled_caught
    else:
        with pytest.raises(OperationError, match=r"not complete within 0\.5 s|sent nothing for 0\.5 s"):
            await bring_back(make_criu("restore-hangs"), image, pid, folder, timeout_s=0.5)
    assert launched(folder) is None
    assert os.listdir(image.parent) == ["i-1"]


async def test_a_cancellation_that_comes_too_late_changes_nothing(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = make_criu("")
    hear = programs._read_record
    scope = trio.CancelScope()

    async def late(stream: trio.lowlevel.FdStream) -> object:
        if not scope.cancel_called:
            await wait_for(lambda: launched(folder))
            scope.cancel()
            await trio.sleep_forever()
        return await hear(stream)

    monkeypatch.setattr(programs, "_read_record", late)
    async with trio.open_nursery() as nursery:
        with scope:
            root = await restore(facts, image, pid, [pid], folder, group=None, nursery=nursery)
        assert is_alive(root)
        end(root)


async def test_a_program_without_a_readable_record_has_ended_when_its_restore_is_cancelled(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = make_criu("")
    scope = trio.CancelScope()
    restored: list[ProcessIdentity] = []

    async def late(_: trio.lowlevel.FdStream) -> object:
        who = await wait_for(lambda: launched(folder))
        assert who is not None
        open_files = f"/proc/{who.launcher_pid}/fd"
        await wait_for(lambda: sorted(os.listdir(open_files)) == ["0", "1", "2"])
        restored.append(who.program)
        monkeypatch.setattr(programs, "abandon", refuse)
        monkeypatch.setattr(programs, "launched", refuse)
        scope.cancel()
        await trio.sleep_forever()
        raise AssertionError

    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(programs, "_read_record", late)
    async with trio.open_nursery() as nursery:
        with scope:
            await restore(facts, image, pid, [pid], folder, group=None, nursery=nursery)
        assert scope.cancelled_caught
        assert not is_alive(restored[0])


@pytest.mark.long
async def test_a_success_that_was_told_with_the_timeout_is_not_lost(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = programs._read_record
    heard: list[object] = []

    async def lose(stream: trio.lowlevel.FdStream) -> object:
        heard.append(await hear(stream))
        if len(heard) == 1:
            await trio.sleep_forever()
        return heard[-1]

    monkeypatch.setattr(programs, "_read_record", lose)
    async with trio.open_nursery() as nursery:
        root = await restore(
            make_criu(""), image, pid, [pid], folder, group=None, nursery=nursery, timeout_s=2.0
        )
        assert is_alive(root)
        assert root == identify(pid)
        end(root)


async def test_a_worker_that_dies_in_the_middle_leaves_nothing(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path
) -> None:
    """Its end of the pipe is closed, which is all that the launcher sees of it."""
    facts = make_criu("restore-hangs")

    async def forget(stream: trio.lowlevel.FdStream) -> object:
        await stream.aclose()
        await trio.sleep_forever()
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch, trio.CancelScope() as scope:
        patch.setattr(programs, "_read_record", forget)
        patch.setattr(programs, "_give_up_restore", _nothing)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bring_back, facts, image, pid, folder)
            started = await wait_for(lambda: _launchers(folder))
            # A process that has ended has no command line any more; these have been waited for, too.
            await wait_for(lambda: not any(os.path.exists(f"/proc/{each}") for each in started))
            scope.cancel()
    assert os.listdir(folder) == []


async def _nothing(*_: object) -> None:
    await trio.lowlevel.checkpoint()


def _launchers(folder: Path) -> list[str]:
    """Processes that were started for a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


async def test_an_image_whose_lock_is_held_holds_up_no_worker(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path
) -> None:
    lock = os.open(image, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    late = threading.Timer(20, fcntl.flock, (lock, fcntl.LOCK_UN))  # if the event loop waits for it
    late.start()
    waits = re.compile(rf"-> FLOCK .*:{os.fstat(lock).st_ino} ")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bring_back, make_criu("restore-fails"), image, pid, folder)
        await wait_for(lambda: waits.search(Path("/proc/locks").read_text()))
        nursery.cancel_scope.cancel()
        fcntl.flock(lock, fcntl.LOCK_UN)
    late.cancel()
    os.close(lock)
    assert os.listdir(image.parent) == ["i-1"]


async def test_a_pid_that_is_taken_is_refused_before_anything_is_done(
    make_criu: MakeCriu, image: Path, folder: Path
) -> None:
    with pytest.raises(OperationError, match=f"pid {os.getpid()} ") as caught:
        await bring_back(make_criu(""), image, os.getpid(), folder)
    assert caught.value.reason == errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE
    assert os.listdir(folder) == []


async def test_the_id_of_a_thread_that_is_taken_is_refused(
    make_criu: MakeCriu, image: Path, pid: int, folder: Path
) -> None:
    """CRIU says of it: Unable to create a thread: -17."""
    ids: Queue[int] = Queue()
    done = threading.Event()

    def run() -> None:
        ids.put(threading.get_native_id())
        done.wait(30)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        taken = ids.get(timeout=30)
        (image / f"core-{taken}.img").touch()
        with pytest.raises(OperationError, match=f"pid {taken} .* or thread") as caught:
            await bring_back(make_criu(""), image, pid, folder)
    finally:
        done.set()
        thread.join()
    assert caught.value.reason == errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE
    assert (os.listdir(folder), os.listdir(image.parent)) == ([], ["i-1"])


@pytest.fixture
def zombie() -> Iterator[int]:
    """The pid of a process that has ended, and is not reaped."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


async def test_a_pid_that_a_zombie_keeps_is_refused_with_the_remedy(
    make_criu: MakeCriu, image: Path, folder: Path, zombie: int
) -> None:
    with pytest.raises(OperationError, match=f"pid {zombie} .* zombie.* an init"):
        await bring_back(make_criu(""), image, zombie, folder)
