"""What is kept on disk: how much more may be put there, what is deleted, and what is told of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.worker_session_pb2 import CheckpointQuery
from leasehold.v1.workload_pb2 import EvictionPolicy, Kernel, WorkloadSpec
from leasehold_worker import checkpoint_answers
from leasehold_worker.checkpoint_answers import answer_checkpoints
from leasehold_worker.checkpoint_disk import CheckpointDisk
from leasehold_worker.errors import OperationError
from leasehold_worker.images.envelope_store import EnvelopeStore
from leasehold_worker.images.manifest import HostFacts, ImageSubject
from leasehold_worker.images.store import ImageStore
from leasehold_worker.processes import Pid, ProcessIdentity
from leasehold_worker.workload import CHECKPOINTED, RUNNING, Parked, Workload

MIB = 2**20
HERE = "worker-here"


@dataclass
class Registry:
    """Workloads, as the disk asks for them."""

    workloads: list[Workload] = field(default_factory=list)

    def all(self) -> Iterable[Workload]:
        return self.workloads

    def add(self, name: str, *, keep: int = 0, parked_as: str = "") -> Workload:
        policy = EvictionPolicy(process_strategy=workload_pb2.PROCESS_STRATEGY_CHECKPOINT)
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
        self, *, limit: int = 0, keep_images: bool = False, expiry: timedelta = timedelta(days=7)
    ) -> CheckpointDisk:
        return CheckpointDisk(
            ImageStore(self.root),
            EnvelopeStore(self.root),
            self.registry,  # type: ignore[arg-type]  # all() is all that is asked of it
            limit_bytes=limit,
            reserve_bytes=0,
            keep_images=keep_images,
            expiry=expiry,
            worker_id=HERE,
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
        )
        return store.publish(partial, subject, lambda _: None, lambda: None).manifest.image_id

    def saved(self, workload_id: str, size: int = 10) -> str:
        kernel = Kernel(kernel_id="k", kind="test", version=1)
        with EnvelopeStore(self.root).begin(workload_id, workload_id, kernel) as writer:
            writer.write(b"x" * size)
            return writer.commit({"step": "7"}).checkpoint_id


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "images")


def ids(disk: CheckpointDisk, workload_id: str = "") -> list[str]:
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
    disk.make_room(2 * MIB)
    assert ids(disk) == [image]
    assert unneeded not in ids(disk)
    with pytest.raises(OperationError) as refused:
        disk.make_room(4 * MIB)
    assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DISK
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


async def test_what_nobody_needs_expires_but_not_what_others_have_in_the_same_folder(world: World) -> None:
    image, needed, theirs = world.image("a"), world.image("b"), world.image("c", worker_id="worker-there")
    saved, of_a_living_one = world.saved("gone"), world.saved("a")
    world.registry.add("a")
    world.registry.add("b", parked_as=needed)
    disk = world.disk(expiry=timedelta(0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(disk.run)
        with trio.fail_after(10):
            while len(ids(disk)) > 3:  # noqa: ASYNC110 - nothing tells
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert set(ids(disk)) == {needed, theirs, of_a_living_one}
    assert {image, saved}.isdisjoint(ids(disk))


async def test_a_long_list_is_told_page_by_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = [world.saved("a") for _ in range(5)]
    monkeypatch.setattr(checkpoint_answers, "ANSWER_LIMIT_BYTES", 300)
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
