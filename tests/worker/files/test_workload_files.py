"""Workloads that put something else in the place of their files."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.operation_pb2 import RunOperation, StopOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.worker.v1.session_pb2 import ConnectResponse, OutputChunk, ReadOutput
from leasehold_worker.files.workload_files import NotRegularError, open_output, read_kept, read_regular
from leasehold_worker.programs import shim
from leasehold_worker.programs.output_bounds import shorten
from leasehold_worker.programs.programs import exit_record, launched

from tests import prefork
from tests.worker import conftest
from tests.worker.conftest import WorkerProcess
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session

Start = Callable[..., WorkerProcess]


def run(session: Session, workload_id: str, script: str) -> None:
    """Runs a shell in its working directory, and waits until it has printed "done" to a file there."""
    spec = WorkloadSpec(arguments=["sh", "-c", script])
    outcome = session.run(f"run-{workload_id}", workload_id, run=RunOperation(name=workload_id, spec=spec))
    assert outcome.state == command_pb2.COMMAND_STATE_SUCCEEDED, outcome.error


def read(session: Session, workload_id: str, number: int) -> OutputChunk:
    request = ReadOutput(read_id=f"{workload_id}-{number}", workload_id=workload_id)
    session.down.put(ConnectResponse(read_output=request))
    return session.wait(lambda frame: frame.output_chunk.read_id == request.read_id).output_chunk


@pytest.mark.parametrize("replacement", ["mkfifo", "ln -s /etc/hostname", "mkdir"])
def test_what_is_in_the_place_of_a_log_is_not_read_and_holds_nobody_up(
    start_worker: Start, coordinator: ScriptedCoordinator, replacement: str
) -> None:
    worker = start_worker(None)
    session = coordinator.next_session()
    run(session, "w1", f"rm ../output.log; {replacement} ../output.log; exec sleep 1000")
    number = 0
    while not (chunk := read(session, "w1", number)).HasField("error"):  # until the shell has replaced it
        assert not chunk.data
        number += 1
    assert chunk.error.reason == errors_pb2.ERROR_REASON_OUTPUT_UNAVAILABLE
    for more in range(20):  # more than may be read at once
        assert read(session, "w1", number + 1 + more).HasField("error")
    stopped = session.run("c9", "w1", stop=StopOperation(force=True))
    assert stopped.state == command_pb2.COMMAND_STATE_SUCCEEDED
    assert worker.stop() == 0


def test_a_program_that_empties_its_directory_keeps_its_log_and_its_end(
    start_worker: Start, coordinator: ScriptedCoordinator
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    run(session, "w1", "touch mine; rm -rf ./* ./.[!.]*; echo whole; exit 7")
    event = session.wait(lambda frame: frame.workload_event.workload.status.HasField("exit"))
    assert event.workload_event.workload.status.exit.code == 7
    assert read(session, "w1", 0).data == b"whole\n"


@pytest.mark.parametrize(
    "record",
    [
        b'{"returncode": 99999999999, "end_time": 1.0}',
        b'{"returncode": 0, "end_time": 1e300}',
        b'{"returncode": 0, "end_time": 1.0, "error": "\xff"}',
        b"[" * 60_000,
        b"",
    ],
    ids=["no exit code", "no time", "no text", "deep", "empty"],
)
def test_a_record_that_no_launcher_wrote_is_none(tmp_path: Path, record: bytes) -> None:
    for name in (shim.EXIT_FILE, shim.PROCESS_FILE):
        (tmp_path / name).write_bytes(record)
    assert exit_record(tmp_path) is None
    assert launched(tmp_path) is None


def test_a_pipe_in_the_place_of_a_record_holds_nobody_up(tmp_path: Path) -> None:
    for name in (shim.EXIT_FILE, shim.PROCESS_FILE):
        os.mkfifo(tmp_path / name)
    assert exit_record(tmp_path) is None
    assert launched(tmp_path) is None


def test_output_goes_into_regular_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "w-1"
    first = open_output(folder, folder / "work")
    os.write(first, b"once ")
    os.close(first)
    again = open_output(folder, folder / "work")
    os.write(again, b"more")
    os.close(again)
    output = folder / "output.log"
    assert read_regular(output, 100, 5) == b"more"
    replacements: list[Callable[[], None]] = [
        lambda: os.mkfifo(output),
        lambda: output.symlink_to(tmp_path / "victim"),
        output.mkdir,
    ]
    for replace in replacements:
        output.unlink()
        replace()
        with pytest.raises(NotRegularError):
            open_output(folder, folder / "work")
        with pytest.raises(NotRegularError):
            read_regular(output, 100)
    assert not (tmp_path / "victim").exists()


def test_the_oldest_part_of_a_long_output_is_dropped_and_readers_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "w-1"
    descriptor = open_output(folder, folder / "work")
    os.write(descriptor, b"old\n" * 50_000)
    output = folder / "output.log"
    shorten(output, 131_072)
    os.write(descriptor, b"new\n")
    os.close(descriptor)
    found = output.stat()
    assert found.st_size == 200_004
    assert found.st_blocks * 512 <= 131_072
    begin, data = read_kept(output, 1_000_000, 0)
    assert 0 < begin == 200_004 - len(data)
    assert data == b"old\n" * ((len(data) - 4) // 4) + b"new\n"
    assert read_kept(output, 10, 200_000) == (200_000, b"new\n")
    assert read_kept(output, 10, 200_004) == (200_004, b"")
    assert read_kept(output, 10, -4) == (200_000, b"new\n")
    assert read_kept(output, 1_000_000, -200_005) == (begin, data)
    assert read_kept(output, 10, 2**62) == (2**62, b"")


def test_blocks_that_a_program_reserves_beyond_the_end_are_freed(tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    output.write_text("kept\n")
    reserved = subprocess.run(["fallocate", "--keep-size", "--length", "4MiB", str(output)], check=False)
    if reserved.returncode != 0:
        pytest.skip("this file system reserves no blocks")
    assert output.stat().st_blocks * 512 >= 4 * 2**20
    shorten(output, 65_536)
    assert output.stat().st_blocks * 512 <= 65_536
    assert output.read_text() == "kept\n"


@pytest.mark.long
def test_a_reader_of_a_worker_is_told_where_what_is_kept_begins(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    config = tmp_path / "worker.toml"
    config.write_text("output_limit = 65536\n")
    start_worker(None, config=str(config))
    session = coordinator.next_session()
    run(session, "w1", "head -c 1000000 /dev/zero | tr '\\0' x; exec sleep 1000")
    number = 0
    while not (chunk := read(session, "w1", number)).offset:
        number += 1
    assert chunk.data.startswith(b"x")
    assert chunk.offset + len(chunk.data) <= 1_000_000


def test_the_files_of_the_oldest_ended_workloads_are_removed(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = "from leasehold_worker.workloads import registry; registry.ENDED_LIMIT = 1; "
    monkeypatch.setattr(conftest, "WORKER", few + prefork.WORKER)
    start_worker(None)
    session = coordinator.next_session()
    for workload_id in ("w1", "w2"):
        run(session, workload_id, "true")
    wait_for_folders(tmp_path, "w2")


def test_a_workload_that_ends_last_is_kept_although_it_began_first(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = "from leasehold_worker.workloads import registry; registry.ENDED_LIMIT = 1; "
    monkeypatch.setattr(conftest, "WORKER", few + prefork.WORKER)
    start_worker(None)
    session = coordinator.next_session()
    run(session, "long", "exec sleep 1000")
    for workload_id in ("w1", "w2"):
        run(session, workload_id, "true")
    wait_for_folders(tmp_path, "long", "w2")
    stopped = session.run("stop", "long", stop=StopOperation())
    assert stopped.state == command_pb2.COMMAND_STATE_SUCCEEDED, stopped.error
    wait_for_folders(tmp_path, "long")


def wait_for_folders(folder: Path, *names: str) -> None:
    """Waits until these are the folders of workloads."""
    deadline = time.monotonic() + 30
    while (left := sorted(path.name for path in (folder / "state/workloads").iterdir())) != list(names):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize(
    "workload_id",
    [
        "../../elsewhere",
        pytest.param("..", marks=pytest.mark.long),
        pytest.param("a/b", marks=pytest.mark.long),
        "",
        pytest.param("x" * 129, marks=pytest.mark.long),
    ],
)
def test_an_id_that_is_no_name_of_a_folder_is_refused(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path, workload_id: str
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    spec = WorkloadSpec(arguments=["true"])
    refused = session.run("c1", workload_id, run=RunOperation(name="one", spec=spec))
    assert refused.error.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    assert not (tmp_path / "elsewhere").exists()
