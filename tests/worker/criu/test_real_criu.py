"""Dump and restore with a real CRIU, of plain processes and of processes on a simulated GPU."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import which

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold_simgpu import ProcessState, SimulatedHost
from leasehold_worker.checkpoints import publication
from leasehold_worker.checkpoints.image_store import ImageStore, PartialImage, StoredImage
from leasehold_worker.criu.dump import dump
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.criu.obstacles import obstacles, outside_connections
from leasehold_worker.criu.restore import new_identities, restore
from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.process import CheckpointProcess
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import ProcessIdentity, identify, is_alive
from leasehold_worker.programs.programs import launch, launched, wait_exit

from tests.worker.conftest import COUNTER
from tests.worker.criu_cases import COUNT, counts, end, real_criu, subject, wait_counted, wait_for

FAMILY = """
import os, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
read_end, write_end = os.pipe()
deleted = open("deleted", "w+"); deleted.write("kept"); deleted.flush(); os.unlink("deleted")
count = 0
while True:
    os.write(write_end, b"x")
    deleted.seek(0)
    if os.read(read_end, 1) == b"x" and deleted.read() == "kept" and child.poll() is None:
        print(count, flush=True)
        count += 1
    time.sleep(0.02)
"""

CONNECTED = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    client = socket.create_connection(server.getsockname())
    received = 0
    while data := client.recv(1 << 16):
        assert data == bytes((received + index) % 251 for index in range(len(data)))
        received += len(data)
        client.sendall(data[-1:])
    os._exit(0)
connection, _ = server.accept()
connection.settimeout(30)
sent = count = 0
while True:
    data = bytes((sent + index) % 251 for index in range(3000))
    connection.sendall(data)
    sent += len(data)
    while connection.recv(1)[0] != data[-1]:
        pass
    print(count, flush=True)
    count += 1
    time.sleep(0.001)
"""
"""Two processes that talk by TCP all the time, and compare each byte."""

CAP_SYS_RESOURCE = 24


@pytest.fixture(scope="module")
def criu() -> CriuFacts:
    """The CRIU of this host; where there is none that works, tests are skipped with the reason."""
    facts = real_criu()
    if isinstance(facts, str):
        pytest.skip(facts)
    return facts


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "w-1"
    path.mkdir()
    yield path
    if (who := launched(path)) is not None:
        end(who.program)


def firewall_rules() -> bytes:
    """Those of iptables. Empty: it is not there."""
    program = which("iptables-save")
    return subprocess.run([program], capture_output=True, check=True).stdout if program else b""


async def start(folder: Path, nursery: trio.Nursery, *arguments: str) -> ProcessIdentity:
    with (folder / "output.log").open("ab") as output:
        return await launch(
            folder,
            arguments,
            working_directory=folder,
            environment=dict(os.environ),
            output=output.fileno(),
            group=None,
            nursery=nursery,
        )


async def park(criu: CriuFacts, store: ImageStore, folder: Path, root: ProcessIdentity) -> StoredImage:
    """Makes an image, and removes what the launcher wrote of the life that ended."""
    tree = process_tree(root)
    assert obstacles(tree) == []
    image = store.begin("w-1")
    stored: list[StoredImage] = []

    async def commit() -> None:
        stored.append(await publication.publish(store, image, subject(*tree)))

    await dump(criu, root.pid, image.path, commit)
    record = await wait_exit(folder, root)
    assert record is not None
    assert record.returncode == -signal.SIGKILL
    for name in ("process", "exit"):
        (folder / name).unlink()
    return stored[0]


async def wake(
    criu: CriuFacts,
    store: ImageStore,
    folder: Path,
    image: StoredImage,
    nursery: trio.Nursery,
) -> ProcessIdentity:
    await publication.verify(store, image)
    manifest = image.manifest
    await wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in manifest.pids))
    return await restore(
        criu,
        image.path,
        manifest.subject.root_pid,
        manifest.pids,
        folder,
        group=None,
        nursery=nursery,
    )


async def test_a_process_goes_on_where_it_was(criu: CriuFacts, store: ImageStore, folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", COUNT)
        await wait_counted(folder)
        image = await park(criu, store, folder, root)
        assert not is_alive(root)
        now = await wake(criu, store, folder, image, nursery)
        assert now.pid == root.pid
        assert now != root
        await wait_counted(folder)
        found = counts(folder)
        assert found == list(range(len(found))), "none is lost or repeated, and all are in the same file"
        assert not list(store.root.glob("*/*.work"))
        await publication.verify(store, image)
        os.kill(now.pid, signal.SIGTERM)
        record = await wait_exit(folder, now)
    assert record is not None
    assert record.returncode == 7


async def test_a_family_with_threads_pipes_and_a_deleted_file_goes_on(
    criu: CriuFacts, store: ImageStore, folder: Path
) -> None:
    """Twice from the same image."""
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", FAMILY)
        await wait_counted(folder)
        tree = process_tree(root)
        assert len(tree) == 2
        image = await park(criu, store, folder, root)
        now = await wake(criu, store, folder, image, nursery)
        await wait_counted(folder)
        found = new_identities(tree)
        assert [who.pid for who in found.values()] == [who.pid for who in tree]
        assert not set(found.values()) & set(tree)
        assert set(process_tree(now)) == set(found.values())
        for who in found.values():
            end(who)
        await wait_exit(folder, now)


@pytest.mark.long
async def test_processes_that_talk_to_each_other_by_tcp_go_on(
    criu: CriuFacts, store: ImageStore, folder: Path
) -> None:
    """Twice from the same image."""
    rules = firewall_rules()
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", CONNECTED)
        await wait_counted(folder)
        tree = process_tree(root)
        assert len(tree) == 2
        refused = store.begin("w-1")

        async def refuse() -> None:
            raise OperationError(errors_pb2.ERROR_REASON_CANCELLED, "as asked")

        with pytest.raises(OperationError, match="as asked"):
            await dump(criu, root.pid, refused.path, refuse)
        await wait_counted(folder)
        image = await park(criu, store, folder, root)
        for _ in range(2):
            now = await wake(criu, store, folder, image, nursery)
            await wait_counted(folder)
            for who in new_identities(tree).values():
                end(who)
            await wait_exit(folder, now)
            (folder / "process").unlink()
            (folder / "exit").unlink()
    assert firewall_rules() == rules


async def test_a_connection_that_begins_after_the_preflight_is_seen_while_the_tree_is_stopped(
    criu: CriuFacts, store: ImageStore, folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        code = f"import socket; s = socket.create_connection({address}); s.sendall(s.recv(9)); s.recv(9)"
        async with trio.open_nursery() as nursery:
            root = await start(folder, nursery, sys.executable, "-c", code)
            connection = await trio.to_thread.run_sync(lambda: server.accept()[0])
            image = store.begin("w-1")

            async def commit() -> None:
                found = await trio.to_thread.run_sync(outside_connections, process_tree(root))
                assert len(found) == 1
                raise OperationError(errors_pb2.ERROR_REASON_UNSUPPORTED_STATE, found[0])

            with pytest.raises(OperationError, match="TCP connection to"):
                await dump(criu, root.pid, image.path, commit)
            with connection:
                connection.sendall(b"go on")
                assert await trio.to_thread.run_sync(connection.recv, 9) == b"go on"
            await wait_exit(folder, root)


async def test_a_cancellation_before_the_image_is_final_leaves_the_process_running(
    criu: CriuFacts, store: ImageStore, folder: Path
) -> None:
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", COUNT)
        await wait_counted(folder)
        image = store.begin("w-1")
        with trio.CancelScope() as scope:

            async def commit() -> None:
                scope.cancel()
                await trio.sleep_forever()

            await dump(criu, root.pid, image.path, commit)
        assert scope.cancelled_caught
        assert is_alive(root)
        await wait_counted(folder)
        assert os.listdir(store.root / "w-1") == []
        end(root)


@pytest.mark.long
async def test_a_cancellation_in_the_middle_of_writing_leaves_the_process_running(
    criu: CriuFacts, store: ImageStore, folder: Path
) -> None:
    """With so much memory that writing it takes a while: CRIU can't be asked then."""
    large = f"memory = bytes(range(1, 251)) * {(512 << 20) // 250}\n{COUNT}"
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", large)
        await wait_counted(folder)
        image = store.begin("w-1")
        told: list[int] = []
        with trio.CancelScope() as scope:

            def progress(size: int) -> None:
                told.append(size)
                if size:
                    scope.cancel()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("leasehold_worker.criu.dump.PROGRESS_INTERVAL_S", 0.005)
                await dump(criu, root.pid, image.path, partial(never, image), progress=progress)
        assert told[-1] < 512 << 20
        await wait_counted(folder)
        assert os.listdir(store.root / "w-1") == []
        end(root)


async def never(image: PartialImage) -> None:
    await trio.sleep_forever()
    raise AssertionError(f"{image} is complete, though it was cancelled")


async def test_an_altered_image_is_refused_before_criu_sees_it(
    criu: CriuFacts, store: ImageStore, folder: Path
) -> None:
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", COUNT)
        await wait_counted(folder)
        image = await park(criu, store, folder, root)
        with next(image.path.glob("pages-*.img")).open("r+b") as pages:
            pages.write(b"\0\1\2\3")
        with pytest.raises(OperationError, match="was modified"):
            await wake(criu, store, folder, image, nursery)
    assert identify(root.pid) is None
    assert os.listdir(folder) == ["output.log"]


async def test_what_criu_can_not_dump_is_an_error_with_its_reason(criu: CriuFacts, folder: Path) -> None:
    code = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        f"client = socket.create_connection(server.getsockname())\n{COUNT}"  # not accepted
    )
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", code)
        await wait_counted(folder)
        assert "TCP connection to" in " ".join(obstacles([root]))
        directory = folder / "image"
        directory.mkdir()

        async def commit() -> None:
            raise AssertionError("no image")

        with pytest.raises(OperationError, match="In-flight connection"):
            await dump(criu, root.pid, directory, commit)
        await wait_counted(folder)
        end(root)


@pytest.mark.long
async def test_a_process_on_a_simulated_gpu_comes_back_checkpointed_and_moves(
    criu: CriuFacts, store: ImageStore, folder: Path, host: SimulatedHost, driver: Driver
) -> None:
    async with trio.open_nursery() as nursery:
        arguments = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]
        root = await start(folder, nursery, *arguments)
        output = folder / "output.log"
        await wait_for(lambda: output.read_text().count("ok\n") > 3)
        await CheckpointProcess(driver, root.pid).suspend()
        image = await park(criu, store, folder, root)
        assert host.process(root.pid) is None
        assert not any(gpu.used_bytes for gpu in host.gpus)
        now = await wake(criu, store, folder, image, nursery)
        back = host.process(now.pid)
        assert back is not None
        assert back.state is ProcessState.CHECKPOINTED
        assert not any(gpu.used_bytes for gpu in host.gpus)
        chips = {gpu.uuid: gpu.name for gpu in host.gpus}
        source, destination = list(chips)[:2]
        process = CheckpointProcess(driver, now.pid)
        assert await process.is_checkpointed()
        await process.resume(complete_pairs([GpuPair(source, destination)], chips))
        await wait_for(lambda: output.read_text().count(f"gpu={destination} ok\n") > 3)
        lines = output.read_text().splitlines()
        assert [line.split()[0] for line in lines] == [f"count={n}" for n in range(len(lines))]
        assert "corrupt" not in output.read_text()
        os.kill(now.pid, signal.SIGTERM)
        record = await wait_exit(folder, now)
    assert record is not None
    assert record.returncode == 0


DUMPER = """
import sys, trio
from pathlib import Path
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.criu.dump import dump

async def commit():
    print("complete", flush=True)
    await trio.sleep_forever()

directory = Path(sys.argv[3])
trio.run(dump, CriuFacts(Path(sys.argv[1]), ""), int(sys.argv[2]), directory, commit)
"""


async def test_a_worker_that_is_killed_before_the_image_is_final_leaves_the_process_running(
    criu: CriuFacts, store: ImageStore, folder: Path
) -> None:
    async with trio.open_nursery() as nursery:
        root = await start(folder, nursery, sys.executable, "-c", COUNT)
        await wait_counted(folder)
        image = store.begin("w-1")
        arguments = [sys.executable, "-c", DUMPER, str(criu.path), str(root.pid), str(image.path)]
        worker = await trio.lowlevel.open_process(arguments, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        async with worker.stdout:
            try:
                assert (await worker.stdout.receive_some()).startswith(b"complete")
            finally:
                worker.kill()
                with trio.CancelScope(shield=True):
                    await worker.wait()
        await wait_counted(folder)
        image.close()
        assert len(store.sweep()) == 2, "the image and CRIU's log"
        end(root)
