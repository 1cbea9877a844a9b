"""What is kept on disk: how much more may be put there, what is deleted, and what is told of it."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
from leasehold.v1 import errors_pb2, eviction_pb2
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RunOperation, StopOperation
from leasehold.v1.workload_pb2 import Kernel, WorkloadSpec
from leasehold.worker.v1.session_pb2 import CheckpointQuery
from leasehold_worker.checkpoints import ages, directory
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.image_manifest import MANIFEST_FILE, HostFacts, ImageSubject
from leasehold_worker.checkpoints.image_store import ImageStore
from leasehold_worker.errors import OperationError
from leasehold_worker.files.volume import DiskSpace
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.session import checkpoint_query
from leasehold_worker.session.checkpoint_query import answer_checkpoints
from leasehold_worker.workloads.states import CHECKPOINTED, RUNNING, SUSPENDING
from leasehold_worker.workloads.workload import Parked, Workload

from tests import prefork
from tests.worker import conftest
from tests.worker.scripted_coordinator import ScriptedCoordinator

MIB = 2**20
HERE = "worker-here"


@dataclass
class Registry:
    """Workloads, as the disk asks for them."""

    workloads: list[Workload] = field(default_factory=list)

    def all(self) -> Iterable[Workload]:
        return self.workloads

    def add(self, name: str, *, keep: int = 0, parked_as: str = "") -> Workload:
        policy = EvictionPolicy(process_strategy=eviction_pb2.PROCESS_STRATEGY_CHECKPOINT)
        parked = Parked((), {}, policy, datetime.now(UTC), checkpoint_id=parked_as) if parked_as else None
        workload = Workload(
            workload_id=name,
            name=name,
            spec=WorkloadSpec(keep_checkpoints=keep or None),
            root=ProcessIdentity(Pid(1), 1),
            output_path=Path("output"),
            start_time=datetime.now(UTC),
            lease=None,
            state=CHECKPOINTED if parked_as else RUNNING,
            parked=parked,
        )
        self.workloads.append(workload)
        return workload


@dataclass
class World:
    root: Path
    registry: Registry = field(default_factory=Registry)

    def disk(
        self,
        *,
        limit: int = 0,
        reserve: int = 0,
        keep_images: bool = False,
        expiry: timedelta = timedelta(days=7),
        worker_id: str = HERE,
    ) -> CheckpointDirectory:
        return CheckpointDirectory(
            ImageStore(self.root),
            ApplicationStore(self.root, worker_id),
            self.registry,  # type: ignore[arg-type]  # all() is all that is asked of it
            limit_bytes=limit,
            reserve_bytes=reserve,
            keep_images=keep_images,
            expiry=expiry,
            worker_id=worker_id,
        )

    def image(self, workload_id: str, size: int = MIB, worker_id: str = HERE) -> str:
        store = ImageStore(self.root)
        partial = store.begin(workload_id)
        (partial.path / "pages.img").write_bytes(b"\0" * size)
        facts = HostFacts(
            worker_id=worker_id,
            hostname="host",
            boot_id="boot",
            kernel_release="6",
            architecture="x86_64",
            criu_version="4.2",
            driver_version="",
        )
        subject = ImageSubject(
            workload_id=workload_id,
            workload_name=workload_id,
            root_pid=1,
            processes=(),
            members=(),
            gpus=(),
            host=facts,
            owner="user/ann",
        )
        return store.publish(partial, subject, lambda _: None, lambda: None).manifest.image_id

    def saved(self, workload_id: str, size: int = 10, worker_id: str = HERE) -> str:
        kernel = Kernel(kernel_id="k", kind="test", version=1)
        with ApplicationStore(self.root, worker_id).begin(
            workload_id, workload_id, kernel, "user/ann"
        ) as writer:
            writer.write(b"x" * size)
            return writer.commit({"step": "7"}).checkpoint_id

    def damage(self, checkpoint_id: str, *, days_ago: int = 0) -> None:
        """Makes one unreadable that is so many days old."""
        (path,) = self.root.glob(f"*/{checkpoint_id}*")
        (path / MANIFEST_FILE if path.is_dir() else path).write_bytes(b"junk")
        then = (datetime.now(UTC) - timedelta(days=days_ago)).timestamp()
        os.utime(path, (then, then))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "images")


async def look(disk: CheckpointDirectory, until: Callable[[], bool]) -> None:
    """Has a disk look for what nobody needs, again and again, until something is so."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(disk.run)
        with trio.fail_after(10):
            while not until():  # noqa: ASYNC110 - nothing tells
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def hold(disk: CheckpointDirectory, size_bytes: int) -> None:
    """Makes room, and gives it back."""
    with disk.room() as room:
        room.hold(size_bytes)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(OperationError) as refused:
        call()
    return errors_pb2.ErrorReason.Name(refused.value.reason).removeprefix("ERROR_REASON_")


def ids(disk: CheckpointDirectory, workload_id: str = "") -> list[str]:
    return [each.checkpoint_id for each in disk.checkpoints(workload_id)]


def test_both_kinds_are_listed_newest_first_with_who_needs_them(world: World) -> None:
    saved, image = world.saved("a"), world.image("b")
    world.registry.add("b", parked_as=image)
    disk = world.disk()
    assert ids(disk) == [image, saved]
    assert ids(disk, "a") == [saved]
    told = {each.checkpoint_id: each for each in disk.checkpoints()}
    assert (told[image].in_use, told[saved].in_use) == (True, False)
    assert told[saved].custom == {"step": "7"}
    assert told[saved].kernel.kind == "test"


def test_what_a_parked_workload_needs_is_deleted_by_force_only(world: World) -> None:
    image, saved = world.image("b"), world.saved("a")
    world.registry.add("b", parked_as=image)
    disk = world.disk()
    for named, reason in (
        ([saved, image], errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE),
        ([saved, "k-9-0000000000000000"], errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT),
        ([saved, "../../etc"], errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT),
    ):
        with pytest.raises(OperationError) as refused:
            disk.delete(named, force=False)
        assert refused.value.reason == reason
        assert set(ids(disk)) == {image, saved}, "all of them or none"
    disk.delete([saved, image], force=True)
    assert ids(disk) == []


def test_the_budget_counts_both_kinds_and_not_what_would_be_deleted(world: World) -> None:
    unneeded, image = world.image("a", 2 * MIB), world.image("b", 3 * MIB)
    world.registry.add("b", parked_as=image)
    disk = world.disk(limit=6 * MIB, keep_images=True)
    available = disk.available_bytes()
    assert 2 * MIB < available <= 3 * MIB, "one of six is free, and two could be"
    hold(disk, 2 * MIB)
    assert ids(disk) == [image]
    assert unneeded not in ids(disk)
    assert refusal(lambda: hold(disk, 4 * MIB)) == "INSUFFICIENT_DISK"
    assert ids(disk) == [image]


def test_a_workload_keeps_its_newest_checkpoints_and_no_image_that_it_was(world: World) -> None:
    saved = [world.saved("a") for _ in range(4)]
    world.image("a")
    workload = world.registry.add("a", keep=2)
    disk = world.disk()
    disk.clean_up(workload)
    assert sorted(ids(disk)) == sorted(saved[-2:])


def test_images_that_are_to_be_kept_are_kept(world: World) -> None:
    image = world.image("a")
    workload = world.registry.add("a")
    disk = world.disk(keep_images=True)
    disk.clean_up(workload)
    assert ids(disk) == [image]


async def test_an_image_of_a_workload_that_the_journal_lacks_is_kept_for_its_expiry(world: World) -> None:
    """The journal may have been moved away, and may come back."""
    left, restored = world.image("left"), world.image("restored")
    world.registry.add("restored")
    disk = world.disk()
    await look(disk, lambda: restored not in ids(disk))
    assert ids(disk) == [left]


async def test_what_nobody_needs_expires_but_not_what_others_have_in_the_same_folder(world: World) -> None:
    image, needed, theirs = world.image("a"), world.image("b"), world.image("c", worker_id="worker-there")
    saved, of_a_living_one = world.saved("gone"), world.saved("a")
    world.registry.add("a")
    world.registry.add("b", parked_as=needed)
    # What another worker saved, or one of a release that did not say who it was, is not ours to delete.
    saved_there, saved_by_whom = world.saved("c", worker_id="worker-there"), world.saved("d", worker_id="")
    stay = {needed, theirs, of_a_living_one, saved_there, saved_by_whom}
    disk = world.disk(expiry=timedelta(0))
    await look(disk, lambda: len(ids(disk)) <= len(stay))
    assert set(ids(disk)) == stay
    assert {image, saved}.isdisjoint(ids(disk))


def test_an_image_is_needed_before_its_workload_says_so(world: World) -> None:
    workload = world.registry.add("a")
    workload.state = SUSPENDING
    disk = world.disk(limit=5 * MIB)
    older = world.image("a", MIB)
    image = world.image("a", 2 * MIB)
    disk.expect(image, workload)
    assert refusal(lambda: hold(disk, 4 * MIB)) == "INSUFFICIENT_DISK"
    hold(disk, 2 * MIB + MIB // 2)
    assert ids(disk) == [image], "an older one of its own makes room"
    assert older not in ids(disk)
    assert disk.available_bytes() < 3 * MIB
    assert refusal(lambda: disk.delete([image], force=False)) == "CHECKPOINT_IN_USE"
    disk.clean_up(workload)
    assert [each.in_use for each in disk.checkpoints()] == [True]
    workload.parked = Parked((), {}, EvictionPolicy(), datetime.now(UTC), checkpoint_id=image)
    workload.state = CHECKPOINTED
    assert disk.in_use() == {image}
    # It has been undone: nobody needs it.
    workload.parked, workload.state = None, RUNNING
    hold(disk, 4 * MIB)
    assert ids(disk) == []


def test_what_an_earlier_start_was_about_to_park_as_is_needed_until_it_is_settled(world: World) -> None:
    image, saved, other = world.image("a"), world.saved("b"), world.image("c")
    for name in ("a", "b"):
        world.registry.add(name).state = SUSPENDING
    world.registry.add("c")
    disk = world.disk()
    disk.expect_interrupted()
    assert disk.in_use() == {image, saved}
    assert {image, saved, other} == set(ids(disk))
    world.registry.workloads[0].state = RUNNING
    assert disk.in_use() == {saved}


async def test_one_refused_delete_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vanished, refused, last = world.saved("a"), world.saved("b"), world.saved("c")
    disk = world.disk(expiry=timedelta(0))
    delete = ApplicationStore.delete

    def fail(store: ApplicationStore, checkpoint_id: str) -> None:
        if checkpoint_id == vanished:
            delete(store, checkpoint_id)  # another worker does
        if checkpoint_id == refused:
            raise OperationError(errors_pb2.ERROR_REASON_PERMISSION_OR_OS, "no right to")
        delete(store, checkpoint_id)

    monkeypatch.setattr(ApplicationStore, "delete", fail)
    await look(disk, lambda: ids(disk) == [refused])
    assert last not in ids(disk)
    assert [record.getMessage() for record in caplog.records] == [
        f"checkpoint {refused} could not be deleted: no right to"
    ]


async def test_a_round_that_fails_is_not_the_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.image("a")
    scan, failures = ImageStore.scan, [OSError("the disk"), ValueError("a mistake")]

    def fail(store: ImageStore) -> object:
        if failures:
            raise failures.pop()
        return scan(store)

    disk = world.disk(expiry=timedelta(0))
    monkeypatch.setattr(directory, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(ImageStore, "scan", fail)
    await look(disk, lambda: not any(world.root.iterdir()))
    assert not failures


def test_what_another_worker_made_is_listed_and_deleted_by_force_only(world: World) -> None:
    image, saved = world.image("a", worker_id="worker-there"), world.saved("b", worker_id="worker-there")
    nobodys = world.saved("c", worker_id="")
    disk = world.disk(limit=4 * MIB)
    owners = {each.checkpoint_id: each.owner_worker_id for each in disk.checkpoints()}
    assert owners == {image: "worker-there", saved: "worker-there", nobodys: ""}
    assert {each.owner for each in disk.checkpoints()} == {"user/ann"}
    assert not any(each.in_use for each in disk.checkpoints()), "by a workload of this worker"
    for one in (image, saved):
        with pytest.raises(OperationError, match="belongs to worker worker-there") as refused:
            disk.delete([nobodys, one], force=False)
        assert refused.value.reason == errors_pb2.ERROR_REASON_CHECKPOINT_IN_USE
    assert len(ids(disk)) == 3, "all of them or none"
    assert refusal(lambda: hold(disk, 4 * MIB)) == "INSUFFICIENT_DISK", "nor does it make room"
    disk.delete([nobodys], force=False)
    disk.delete([image, saved], force=True)
    assert ids(disk) == []


async def test_what_is_damaged_is_listed_deleted_and_expires(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ages, "SEEN_FOR", timedelta(0))
    image, saved = world.image("a"), world.saved("b")
    old_image, old_saved = world.image("c"), world.saved("d")
    needed = world.image("e")
    world.registry.add("e", parked_as=needed)
    for one in (image, saved):
        world.damage(one)
    for one in (old_image, old_saved, needed):
        world.damage(one, days_ago=8)
    disk = world.disk()
    told = {each.checkpoint_id: each for each in disk.checkpoints()}
    assert {each.workload_id for each in told.values()} == set("abcde")
    assert all(each.problem and each.size_bytes for each in told.values())
    assert told[image].kind != told[saved].kind
    await look(disk, lambda: len(ids(disk)) == 3)
    assert set(ids(disk)) == {image, saved, needed}
    assert len(caplog.records) == 5, "each is told once"
    assert refusal(lambda: disk.delete([needed], force=False)) == "CHECKPOINT_IN_USE"
    disk.delete([image, saved], force=False)
    assert ids(disk) == [needed]


def test_a_damaged_image_goes_with_its_workload(world: World) -> None:
    world.damage(world.image("a"))
    workload = world.registry.add("a")
    disk = world.disk()
    disk.clean_up(workload)
    assert ids(disk) == []


def test_what_is_named_twice_is_deleted_once(world: World) -> None:
    saved = world.saved("a")
    disk = world.disk()
    disk.delete([saved, saved], force=False)
    assert ids(disk) == []


def test_the_budget_counts_what_applications_saved(world: World) -> None:
    world.saved("a", 3 * MIB)
    disk = world.disk(limit=4 * MIB)
    assert disk.available_bytes() < MIB
    assert refusal(lambda: hold(disk, 2 * MIB)) == "INSUFFICIENT_DISK"
    hold(disk, disk.available_bytes())


def test_two_that_are_written_at_once_do_not_get_the_same_room(world: World) -> None:
    image = world.image("a", 2 * MIB)
    disk = world.disk(limit=6 * MIB, keep_images=True)
    with disk.room() as first, disk.room() as second:
        first.hold(3 * MIB)
        assert ids(disk) == [image]
        assert disk.available_bytes() <= 3 * MIB
        second.hold(3 * MIB)
        assert ids(disk) == [], "what nobody needs is deleted before anything is written"
        assert disk.available_bytes() == 0
        assert refusal(lambda: second.hold(4 * MIB)) == "INSUFFICIENT_DISK"
        second.hold(2 * MIB)  # it has that
    assert disk.available_bytes() == 6 * MIB


def test_the_disk_has_what_is_still_to_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApplicationStore, "disk_space", lambda _: DiskSpace(9 * MIB, 10 * MIB))
    disk = world.disk(reserve=MIB)
    with disk.room() as room:
        room.hold(5 * MIB)
        assert disk.available_bytes() == 4 * MIB
        room.written_bytes = 2 * MIB
        assert disk.available_bytes() == 6 * MIB, "the disk says itself what is written"
    monkeypatch.setattr(ApplicationStore, "disk_space", lambda _: DiskSpace(50 * MIB, 10 * MIB))
    assert disk.available_bytes() == 5 * MIB, "a tenth is always kept free"


def test_what_grows_beyond_its_estimate_takes_room_as_it_grows(world: World) -> None:
    image = world.image("a", 2 * MIB)
    disk = world.disk(limit=4 * MIB, keep_images=True)
    with disk.room() as room:
        room.extend(MIB)
        assert ids(disk) == [image]
        room.extend(3 * MIB)
        assert ids(disk) == []
        room.extend(2 * MIB)
        assert (room.held_bytes, room.written_bytes) == (3 * MIB, 2 * MIB)
        assert refusal(lambda: room.extend(5 * MIB)) == "INSUFFICIENT_DISK"
    with world.disk(limit=200 * MIB).room() as room:
        room.extend(1)
        assert room.held_bytes > MIB, "so that not every piece has to ask"


def test_an_image_that_can_not_be_deleted_makes_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = world.image("a", 2 * MIB), world.image("b", 2 * MIB)
    delete = ImageStore.delete

    def fail(store: ImageStore, image_id: str) -> None:
        if image_id == stuck:
            raise OperationError(errors_pb2.ERROR_REASON_PERMISSION_OR_OS, "no right to")
        delete(store, image_id)

    monkeypatch.setattr(ImageStore, "delete", fail)
    disk = world.disk(limit=5 * MIB)
    hold(disk, 2 * MIB)
    assert ids(disk) == [stuck]
    assert other not in ids(disk)
    assert refusal(lambda: hold(disk, 4 * MIB)) == "INSUFFICIENT_DISK"


async def test_a_long_list_is_told_page_by_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = [world.saved("a") for _ in range(5)]
    monkeypatch.setattr(checkpoint_query, "ANSWER_LIMIT_BYTES", 300)
    disk, found, last, pages = world.disk(), [], "", 0
    while True:
        query = CheckpointQuery(query_id="q", workload_id="a", after_checkpoint_id=last)
        answer = await answer_checkpoints(disk, query, HERE)
        assert {each.worker_id for each in answer.checkpoints} == {HERE}
        found += [each.checkpoint_id for each in answer.checkpoints]
        last, pages = found[-1], pages + 1
        if not answer.more:
            break
    assert found == saved[::-1]
    assert pages > 1


HANGING = """
import time
from leasehold_worker.checkpoints import directory
directory.CLEAN_UP_TIMEOUT_S = 0.1
directory.CLEAN_UPS_AT_ONCE = 1
directory.CheckpointDirectory.clean_up = lambda *_: time.sleep(1000)
"""


@pytest.mark.long
def test_an_image_volume_that_does_not_answer_keeps_no_workload_from_being_stopped(
    start_worker: Callable[..., object], coordinator: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "WORKER", HANGING + prefork.WORKER)
    start_worker(None)
    session = coordinator.next_session()
    spec = WorkloadSpec(arguments=["sleep", "1000"])
    for workload_id in ("w1", "w2"):
        begun = session.run(f"run-{workload_id}", workload_id, run=RunOperation(name=workload_id, spec=spec))
        assert begun.state == COMMAND_STATE_SUCCEEDED
        ended = session.run(f"stop-{workload_id}", workload_id, stop=StopOperation(force=True))
        assert ended.state == COMMAND_STATE_SUCCEEDED
