"""What workloads have written is told to the ledger, so that it counts once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from leasehold.v1 import workload_pb2
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.errors import OperationError
from leasehold_worker.files import volume
from leasehold_worker.files.folder_trees import directory_bytes
from leasehold_worker.files.volume import DiskSpace, Volume, disk_space
from leasehold_worker.host.capacity import HostLimits
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.allocation import AllocRequest
from leasehold_worker.leasing.host_reservations import HostRequest, HostReservation, HostReservations
from leasehold_worker.workloads import disk_usage
from leasehold_worker.workloads.workload import Workload

MIB = 2**20


@contextmanager
def telling(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The workloads and sizes that the ledger is told, with measurements all the time."""
    told: list[tuple[str, int]] = []

    def tell(_: HostReservations, reservation: HostReservation, written_bytes: int) -> None:
        told.append((reservation.holder, written_bytes))

    monkeypatch.setattr(disk_usage, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(HostReservations, "set_written", tell)
    yield told


def add_workload(parts: Parts, name: str, disk_bytes: int) -> None:
    """Adds a workload whose output has half a MiB."""
    request = AllocRequest(host=HostRequest(disk_bytes=disk_bytes))
    workload = Workload(
        name,
        name,
        workload_pb2.WorkloadSpec(),
        ProcessIdentity(Pid(2**22 + 1), 0),
        Path("/nowhere"),
        datetime.now(UTC),
        None,
        host=parts.resources.alloc(name, request, live=True).host,
        absent=True,  # nobody watches for its end
    )
    folder = parts.workloads.folder(name)
    folder.mkdir()
    (folder / "output.log").write_bytes(bytes(MIB // 2))
    parts.exit_monitor.add(workload)


async def test_the_ledger_is_told_what_lies_in_the_folders_of_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(state_dir=tmp_path)
    with telling(monkeypatch) as told:
        async with open_parts(config, tmp_path / "workloads", lambda _: None) as parts:
            for name, disk_bytes in (("writes", MIB), ("wants-none", 0)):
                add_workload(parts, name, disk_bytes)
            with trio.fail_after(10):
                while not any(size >= MIB // 2 for _, size in told):  # noqa: ASYNC110 - nothing else tells
                    await trio.sleep(0.01)
    assert {name for name, _ in told} == {"writes"}
    assert max(size for _, size in told) < MIB


async def test_folders_that_hang_delay_no_measurement_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More folders hang than measurements go on at once."""
    released, hung = threading.Event(), [f"hangs-{number}" for number in range(disk_usage.AT_ONCE + 1)]
    begun: list[str] = []

    def hang(folder: Path) -> int:
        begun.append(folder.name)
        if folder.name in hung:
            released.wait(60)
        return directory_bytes(folder)

    monkeypatch.setattr(disk_usage, "directory_bytes", hang)
    monkeypatch.setattr(disk_usage, "LOOK_TIMEOUT_S", 0.05)
    config = WorkerConfig(state_dir=tmp_path)
    with telling(monkeypatch) as told:
        async with open_parts(config, tmp_path / "workloads", lambda _: None) as parts:
            try:
                for name in (*hung, "writes"):
                    add_workload(parts, name, MIB)
                with trio.fail_after(20):
                    while not (set(hung) <= set(begun) and len(told) >= 20):  # noqa: ASYNC110
                        await trio.sleep(0.01)
                assert {name for name, _ in told} == {"writes"}
                assert all(begun.count(name) == 1 for name in hung), "one thread for each folder"
            finally:
                released.set()
            with trio.fail_after(20):
                while not set(hung) <= {name for name, _ in told}:  # noqa: ASYNC110
                    await trio.sleep(0.01)


async def test_a_volume_that_does_not_answer_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    room = Volume(tmp_path)
    await room.look()
    before = room.space()
    assert 0 < before.available_bytes <= before.total_bytes

    def hang(directory: Path) -> DiskSpace:
        released.wait(30)
        return disk_space(directory)

    monkeypatch.setattr(volume, "disk_space", hang)
    monkeypatch.setattr(volume, "LOOK_TIMEOUT_S", 0.05)
    ledger = HostReservations(HostLimits(1000, 1000), room.space, lambda: 0, lambda: None)
    try:
        with trio.fail_after(5):
            for _ in range(2):
                await room.look()
        with pytest.raises(OperationError, match=r"since the volume can't be read .no answer in time."):
            ledger.reserve("w1", HostRequest(disk_bytes=1))
    finally:
        released.set()
    with trio.fail_after(10):
        while True:
            await room.look()
            with suppress(OSError):
                assert room.space().total_bytes == before.total_bytes
                break
            await trio.sleep(0.01)
