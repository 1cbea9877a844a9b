"""The start of a program, where whoever asked for it goes away or hears nothing."""

import errno
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.files.file_descriptors import STARTED_WITH
from leasehold_worker.host.process_files import read_stat
from leasehold_worker.host.processes import ProcessIdentity, identify, is_alive
from leasehold_worker.programs import programs
from leasehold_worker.programs.programs import LaunchError, forget_start, launch, launched, wait_exit

from tests.worker.dead_volumes import dead_volume
from tests.worker.small_disks import fill, small_disk
from tests.worker.unreadable_files import require_bind_mounts, unreadable

START_TIMEOUT_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A workload's folder. What was started there is killed."""
    yield tmp_path
    if (who := launched(tmp_path)) and is_alive(who.program):
        with suppress(ProcessLookupError):  # it may end just now
            os.kill(who.pid, signal.SIGKILL)


async def start(
    folder: Path,
    nursery: trio.Nursery,
    working_directory: Path | None = None,
    arguments: Sequence[str] = ("sleep", "60"),
) -> ProcessIdentity:
    with (folder / "output").open("ab") as output:
        return await launch(
            folder,
            arguments,
            working_directory=working_directory or folder,
            environment=dict(os.environ),
            output=output.fileno(),
            group=None,
            nursery=nursery,
        )


def ignored_signals(status: Path) -> set[int]:
    """The signals that a process ignores, by its status. Those of the C library are nobody's to set."""
    lines = status.read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


async def heard(folder: Path) -> None:
    """Waits until the launcher has said who was started."""
    with trio.fail_after(START_TIMEOUT_S):
        while launched(folder) is None:  # noqa: ASYNC110 - a file tells nobody
            await trio.sleep(0.01)


async def test_a_start_that_is_cancelled_is_finished(folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            scope.cancel()
            root = await start(folder, nursery)
        assert is_alive(root)
        os.kill(root.pid, signal.SIGKILL)


async def test_a_launcher_that_is_not_heard_never_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = folder / "gate"
    os.mkfifo(gate)
    open_process = trio.lowlevel.open_process

    async def open_held(command: Sequence[str], **settings: Any) -> trio.Process:
        """Starts a launcher that waits at the gate, and so is slower than the worker."""
        held = ["sh", "-c", 'read _ <"$0"; exec "$@"', str(gate), *command]
        return await open_process(held, **settings)

    async def hear(descriptor: int) -> None:
        os.close(descriptor)

    monkeypatch.setattr(trio.lowlevel, "open_process", open_held)
    monkeypatch.setattr(programs, "_hear", hear)
    async with trio.open_nursery() as nursery:
        with pytest.raises(LaunchError, match="start was cancelled"):
            await start(folder, nursery)
    assert launched(folder) is None, "its launcher has ended, which the nursery waited for"


async def test_a_working_directory_that_does_not_answer_holds_up_no_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher does not wait for it either: its user could have any number of launchers wait."""
    monkeypatch.setattr(programs, "START_TIMEOUT_S", 0.5)
    volume = folder / "volume"
    with dead_volume(volume), trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            with pytest.raises(LaunchError, match="working directory"):
                await start(folder, nursery, volume)
    assert launched(folder) is None, "its launcher has ended, which the nursery waited for"


async def test_a_program_has_the_signals_of_any_program(folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery)
        ignored = ignored_signals(Path(f"/proc/{root.pid}/status"))
        os.kill(root.pid, signal.SIGKILL)
    assert ignored == set()


async def test_a_working_directory_that_is_not_there_starts_nothing(folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(LaunchError, match=r"^No such file or directory: '.*nowhere'$"):
            await start(folder, nursery, folder / "nowhere")
    assert launched(folder) is None


async def test_a_launcher_that_was_quicker_has_started_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hear(descriptor: int) -> None:
        await heard(folder)
        os.close(descriptor)

    monkeypatch.setattr(programs, "_hear", hear)
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery)
        assert is_alive(root)
        os.kill(root.pid, signal.SIGKILL)


async def test_without_room_to_forbid_a_start_the_launcher_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hear(descriptor: int) -> None:
        os.close(descriptor)

    def abandon(_: Path) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(programs, "_hear", hear)
    monkeypatch.setattr(programs, "abandon", abandon)
    root: ProcessIdentity | None = None
    async with trio.open_nursery() as nursery:
        try:
            root = await start(folder, nursery)
            os.kill(root.pid, signal.SIGKILL)
        except LaunchError:
            who = launched(folder)
            assert who is None or not is_alive(who.program)
    assert root is None or launched(folder) is not None


@pytest.fixture
def damaged_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker can neither read nor write the records of launchers, which can."""

    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(programs, "abandon", refuse)
    monkeypatch.setattr(programs, "launched", refuse)


@pytest.mark.usefixtures("damaged_disk")
async def test_a_launcher_that_waits_for_its_disk_is_ended_before_the_start_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_process = trio.lowlevel.open_process
    launchers: list[trio.Process] = []

    async def open_stopped(command: Sequence[str], **settings: Any) -> trio.Process:
        process = await open_process(command, **settings)
        process.send_signal(signal.SIGSTOP)
        launchers.append(process)
        return process

    async def hear(descriptor: int) -> None:
        os.close(descriptor)

    monkeypatch.setattr(trio.lowlevel, "open_process", open_stopped)
    monkeypatch.setattr(programs, "_hear", hear)
    async with trio.open_nursery() as nursery:
        try:
            with pytest.raises(
                LaunchError, match=f"cancelled: check the disk of {folder} .*Input/output error"
            ):
                await start(folder, nursery)
            assert launchers[0].returncode == -signal.SIGKILL
        finally:
            launchers[0].kill()
    who = launched(folder)
    assert who is None or not is_alive(who.program), "it may have been stopped only after its record"


TWO_PROCESSES = ["sh", "-c", 'sleep 60 & echo $! >"$0/second"; mv "$0/second" "$0/child"; wait']


async def start_unread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> tuple[ProcessIdentity | None, list[ProcessIdentity]]:
    """Starts a program of two processes, without a report of the launcher.

    Returns:
        What the worker takes for the program. None: the start has failed. And the two processes.
    """
    running: list[ProcessIdentity] = []

    async def hear(descriptor: int) -> None:
        with trio.fail_after(START_TIMEOUT_S):
            while not (folder / "child").exists():  # noqa: ASYNC110 - a file tells nobody
                await trio.sleep(0.01)
        who, second = launched(folder), identify(int((folder / "child").read_text()))
        assert who is not None
        assert second is not None
        running.extend([who.program, second])
        os.close(descriptor)

    monkeypatch.setattr(programs, "_hear", hear)
    try:
        root = await start(folder, nursery, arguments=[*TWO_PROCESSES, str(folder)])
    except LaunchError:
        root = None
    return root, running


@pytest.mark.usefixtures("damaged_disk")
async def test_a_program_without_a_readable_record_has_ended_when_its_start_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trio.open_nursery() as nursery:
        root, running = await start_unread(folder, monkeypatch, nursery)
        assert root is None
        assert len(running) == 2
        assert not any(map(is_alive, running))


@pytest.mark.usefixtures("damaged_disk")
async def test_a_program_that_does_not_end_has_been_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workload keeps the GPUs until its end."""
    monkeypatch.setattr(programs, "EXIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(programs, "send_signal", lambda *_: None)  # as if it were stuck in the kernel
    async with trio.open_nursery() as nursery:
        root, running = await start_unread(folder, monkeypatch, nursery)
        assert root == running[0]
        assert all(map(is_alive, running))
        for identity in running:
            with suppress(ProcessLookupError):  # the end of one may end another
                os.kill(identity.pid, signal.SIGKILL)


async def test_a_disk_that_hangs_holds_up_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of its records, which neither the worker nor the launcher can reach."""
    for name in ("START_TIMEOUT_S", "RECORD_TIMEOUT_S", "EXIT_TIMEOUT_S"):
        monkeypatch.setattr(programs, name, 0.5)
    disk = tmp_path / "disk"
    async with trio.open_nursery() as nursery:
        with (
            dead_volume(disk),
            (tmp_path / "output").open("ab") as output,
            trio.fail_after(15),
            pytest.raises(LaunchError, match=f"cancelled: check the disk of {disk}.* did not answer"),
        ):
            await launch(
                disk / "w",
                ["touch", str(tmp_path / "started")],
                working_directory=tmp_path,
                environment=dict(os.environ),
                output=output.fileno(),
                group=None,
                nursery=nursery,
            )
    assert not (tmp_path / "started").exists(), "its launcher has ended, which the nursery waited for"


async def test_records_on_a_disk_that_hangs_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "RECORD_TIMEOUT_S", 0.5)
    disk = tmp_path / "disk"
    with (
        dead_volume(disk),
        trio.fail_after(15),
        pytest.raises(OperationError, match="check the disk") as refused,
    ):
        await forget_start(disk / "w")
    assert refused.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE


async def test_a_program_has_the_descriptors_that_the_worker_was_started_with(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(STARTED_WITH + 100, before[1]), before[1]))
    try:
        async with trio.open_nursery() as nursery:
            program = await start(tmp_path, nursery)
            assert resource.prlimit(program.pid, resource.RLIMIT_NOFILE)[0] == STARTED_WITH
            os.kill(program.pid, signal.SIGKILL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", ["process", "exit"])
async def test_a_record_that_can_not_be_read_is_missing_after_a_while(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A workload would otherwise keep its GPUs for as long as the disk is damaged."""
    require_bind_mounts(tmp_path)
    monkeypatch.setattr(programs, "EXIT_TIMEOUT_S", 0.5)
    async with trio.open_nursery() as nursery:
        program = await start(folder, nursery)
        with unreadable(folder / name):
            os.kill(program.pid, signal.SIGKILL)
            with trio.fail_after(START_TIMEOUT_S):
                assert await wait_exit(folder, program) is None


ORPHAN = 'sleep 60 & echo $! >"$0/orphan"; read _ <"$0/gate"; exit 7'


async def test_a_full_disk_loses_neither_an_exit_status_nor_the_parent_of_orphans(tmp_path: Path) -> None:
    """The program may have filled the disk itself."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder):
        os.mkfifo(folder / "gate")
        async with trio.open_nursery() as nursery:
            program = await start(folder, nursery, arguments=["sh", "-c", ORPHAN, str(folder)])
            with (folder / "gate").open("wb") as gate:  # once the program has written its orphan, and waits
                fill(folder)
                gate.write(b"\n")
            record = await wait_exit(folder, program)
            assert record is not None
            assert record.returncode == 7
            who = launched(folder)
            assert who is not None
            orphan = int((folder / "orphan").read_text())
            stat = read_stat(orphan)
            assert stat is not None
            assert stat.parent_pid == who.launcher_pid
            assert b"Traceback" not in (folder / "output").read_bytes()
            os.kill(orphan, signal.SIGKILL)


async def test_a_start_on_a_full_disk_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder):
        (folder / "output").touch()
        fill(folder)
        async with trio.open_nursery() as nursery:
            with pytest.raises(LaunchError, match=f"No space left on device.*check the disk of {folder}"):
                await start(folder, nursery)
        assert launched(folder) is None
