"""The folder of images: whole or not there, and altered in no way unnoticed."""

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold_worker.checkpoints import image_digests, publication
from leasehold_worker.checkpoints.ages import Ages
from leasehold_worker.checkpoints.damaged import DamagedCheckpoint
from leasehold_worker.checkpoints.image_manifest import (
    MANIFEST_FILE,
    HostFacts,
    ImageFile,
    ImageGpu,
    ImageProcess,
    Manifest,
    check_compatible,
    decode_manifest,
    encode_manifest,
)
from leasehold_worker.checkpoints.image_store import ImageStore, StoredImage
from leasehold_worker.checkpoints.retention import StoredItem, make_room
from leasehold_worker.criu.working_directory import working_directory
from leasehold_worker.errors import OperationError
from msgspec import structs

from tests.worker.criu_cases import HOST, subject

CORRUPT = errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT
INCOMPATIBLE = errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def write(store: ImageStore, workload_id: str = "w-1") -> StoredImage:
    partial = store.begin(workload_id)
    (partial.path / "pages-1.img").write_bytes(bytes(range(256)) * 64)
    (partial.path / "inventory.img").write_bytes(b"inventory")
    return store.publish(partial, msgspec.structs.replace(subject(), workload_id=workload_id))


def test_an_image_is_found_as_it_was_written(store: ImageStore) -> None:
    written = write(store)
    found = store.find(written.manifest.image_id)
    assert found == written
    assert [file.name for file in found.manifest.files] == ["inventory.img", "pages-1.img"]
    assert found.manifest.size_bytes == 256 * 64 + 9
    store.verify(found)
    assert store.used_bytes() >= found.manifest.size_bytes
    assert store.sweep() == []


def test_images_are_listed_in_the_order_of_their_ids_and_nothing_else_is(store: ImageStore) -> None:
    first, second, other = write(store), write(store), write(store, "w-0")
    (store.root / "w-1/k-1.checkpoint").write_bytes(b"what an application saved")
    (store.root / "notes").write_text("a file")
    partial = store.begin("w-1")
    assert store.images() == [first, second, other]
    partial.close()
    assert store.sweep() == [partial.path]
    assert (store.root / "w-1/k-1.checkpoint").exists()


def alter(image: StoredImage) -> None:
    path = image.path / "pages-1.img"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def truncate(image: StoredImage) -> None:
    os.truncate(image.path / "pages-1.img", 100)


def remove(image: StoredImage) -> None:
    (image.path / "inventory.img").unlink()


def add(image: StoredImage) -> None:
    (image.path / "core-1.img").write_bytes(b"")


def coordinator_session(image: StoredImage) -> None:
    path = image.path / "inventory.img"
    path.rename(image.path.parent / "elsewhere")
    path.symlink_to(image.path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (alter, "'pages-1.img' was modified"),
        (truncate, "has 100 bytes instead of 16384"),
        (remove, "'inventory.img' is missing"),
        (add, "'core-1.img' is not part of the image"),
        (coordinator_session, "'inventory.img' is not a file"),
    ],
)
def test_every_change_is_noticed(store: ImageStore, change: Callable[[StoredImage], None], how: str) -> None:
    image = write(store)
    change(image)
    with pytest.raises(OperationError, match=how) as caught:
        store.verify(store.find(image.manifest.image_id))
    assert caught.value.reason == CORRUPT


def forge(image: StoredImage) -> None:
    """Changes an image and its manifest, with the right digests."""
    (image.path / "inventory.img").write_bytes(b"of somebody else")
    manifest = image.manifest
    files = [file for file in manifest.files if file.name != "inventory.img"]
    forged = ImageFile("inventory.img", 16, hashlib.sha256(b"of somebody else").hexdigest())
    files.append(forged)
    ordered = tuple(sorted(files, key=lambda file: file.name))
    (image.path / MANIFEST_FILE).write_bytes(encode_manifest(structs.replace(manifest, files=ordered)))


def test_only_images_of_this_worker_pass(store: ImageStore) -> None:
    own, other = ImageStore(store.root, b"1" * 32), ImageStore(store.root, b"2" * 32)
    image = write(own)
    image_id = image.manifest.image_id
    own.verify(image)
    own.verify(own.find(image_id))
    with pytest.raises(OperationError, match="no valid MAC of this worker") as caught:
        other.verify(other.find(image_id))
    assert caught.value.reason == CORRUPT
    forge(image)
    store.verify(store.find(image_id))  # all of its digests are right
    with pytest.raises(OperationError, match="no valid MAC of this worker"):
        own.verify(own.find(image_id))
    without = write(store)
    with pytest.raises(OperationError, match="no valid MAC of this worker"):
        own.verify(own.find(without.manifest.image_id))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", CORRUPT),
        (b"{}", CORRUPT),
        (b'{"format": 2}', CORRUPT),
        (b'{"format": 2, "sha256": "", "manifest": {}}', CORRUPT),
        (b'{"format": 1, "image_id": 3}', INCOMPATIBLE),
        (None, CORRUPT),
    ],
)
def test_an_image_without_a_usable_manifest_is_damaged_and_can_be_deleted(
    store: ImageStore, content: bytes | None, reason: errors_pb2.ErrorReason.ValueType
) -> None:
    image = write(store)
    path = image.path / MANIFEST_FILE
    path.unlink() if content is None else path.write_bytes(content)
    assert store.images() == []
    (damaged,) = store.scan()
    assert isinstance(damaged, DamagedCheckpoint)
    assert (damaged.checkpoint_id, damaged.workload_id) == (image.manifest.image_id, "w-1")
    assert damaged.age()[1] > 0
    with pytest.raises(OperationError) as caught:
        store.find(image.manifest.image_id)
    assert caught.value.reason == damaged.error.reason == reason
    store.delete(image.manifest.image_id)
    assert os.listdir(store.root) == [], "nor is its workload's folder left"


@pytest.mark.parametrize("name", [b"root_pid", b"worker_id", b"sha256"])
def test_an_altered_manifest_is_corrupt(store: ImageStore, name: bytes) -> None:
    image = write(store)
    path = image.path / MANIFEST_FILE
    written = path.read_bytes()
    altered = re.sub(rb'("%s": ?"?)' % name, rb"\g<1>1", written)
    assert altered != written
    path.write_bytes(altered)
    with pytest.raises(OperationError, match="modified") as caught:
        store.find(image.manifest.image_id)
    assert caught.value.reason == CORRUPT


def test_a_time_without_a_zone_is_no_manifest() -> None:
    written = msgspec.structs.replace(manifest(), create_time=datetime(2026, 1, 1))  # noqa: DTZ001 - that is it
    with pytest.raises(ValueError, match="create_time"):
        decode_manifest(encode_manifest(written))


def test_what_the_disk_does_not_keep_is_not_final(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = store.begin("w-1")
    (partial.path / "pages-1.img").write_bytes(b"pages")
    sync = image_digests.sync

    def fail(path: Path) -> None:
        if path == store.root:
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    monkeypatch.setattr("leasehold_worker.checkpoints.image_store.sync", fail)
    with pytest.raises(OperationError):
        store.publish(partial, subject())
    assert store.images() == []
    assert partial.path.exists(), "it is as before, and its processes go on"


def test_a_folder_of_another_user_is_passed_over_with_one_warning(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    image = write(store)
    write(store, "w-2")
    listed = Path.iterdir

    def closed(path: Path) -> Iterator[Path]:
        if path.name == "w-2":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    for _ in range(2):
        assert store.images() == [image]
        assert store.used_bytes() > 0
        assert store.sweep() == []
    assert [record.getMessage() for record in caplog.records] == [
        f"ignored {store.root / 'w-2'}, which can't be read: Permission denied"
    ]


def test_a_folder_that_somebody_removes_meanwhile_is_made_again(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, removals = Path.mkdir, [1]

    def remove_before(path: Path, *arguments: object, **options: object) -> None:
        if path.suffix and removals:
            removals.pop()
            path.parent.rmdir()
        mkdir(path, *arguments, **options)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(Path, "mkdir", remove_before)
    assert store.begin("w-1").path.exists()
    assert not removals


def test_an_image_that_was_moved_to_another_name_is_corrupt(store: ImageStore) -> None:
    first, second = write(store), write(store)
    store.delete(second.manifest.image_id)
    first.path.rename(second.path)
    with pytest.raises(OperationError) as caught:
        store.find(second.manifest.image_id)
    assert caught.value.reason == CORRUPT


@pytest.mark.parametrize("name", ["", "..", "../w-1", "a/b", ".hidden", "-x", "x" * 200, "a\nb"])
def test_ids_lead_nowhere_else(store: ImageStore, name: str) -> None:
    with pytest.raises(OperationError) as caught:
        store.begin(name)
    assert caught.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    with pytest.raises(OperationError) as caught:
        store.find(name)
    assert caught.value.reason == errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT
    store.delete(name)


def test_what_a_crash_has_left_is_swept_and_what_is_being_written_is_not(store: ImageStore) -> None:
    image = write(store)
    writing, left = store.begin("w-1"), store.begin("w-1")
    for path in (
        working_directory(writing.path),
        working_directory(left.path),
        working_directory(image.path, "5f"),
    ):
        path.mkdir()
    left.close()
    # A restore reads it, and has its log beside it.
    reading = os.open(image.path, os.O_RDONLY)
    fcntl.flock(reading, fcntl.LOCK_SH)
    assert sorted(path.name for path in store.sweep()) == [left.path.name, f"{left.path.name}.work"]
    os.close(reading)
    writing.close()
    assert len(store.sweep()) == 3
    assert os.listdir(store.root / "w-1") == [image.manifest.image_id]


def test_what_another_user_writes_is_not_swept(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = store.begin("w-1")
    partial.close()
    opened = os.open

    def closed(path: Path, flags: int, mode: int = 0o777) -> int:
        if path == partial.path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", closed)
        assert store.sweep() == []
    assert partial.path.exists()
    assert store.sweep() == [partial.path]


def test_a_half_deleted_image_is_swept(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    image = write(store)

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("leasehold_worker.checkpoints.image_store.remove_tree", fail)
        with pytest.raises(OperationError):
            store.delete(image.manifest.image_id)
    assert store.images() == []
    assert len(store.sweep()) == 1
    assert os.listdir(store.root / "w-1") == []


async def test_publishing_tells_its_progress_and_is_cancelled_before_it_is_final(store: ImageStore) -> None:
    partial = store.begin("w-1")
    (partial.path / "pages-1.img").write_bytes(bytes(20 << 20))
    told: list[int] = []
    with trio.CancelScope() as scope:

        def progress(done: int) -> None:
            told.append(done)
            scope.cancel()

        await publication.publish(store, partial, subject(), progress)
    assert scope.cancelled_caught
    assert told[0] == 4 << 20
    assert store.images() == []
    image = await publication.publish(store, partial, subject(), told.append)
    assert told[-1] == 20 << 20
    told.clear()
    await publication.verify(store, image, told.append)
    assert told[-1] == 20 << 20


def manifest(**host: str) -> Manifest:
    there = msgspec.structs.replace(HOST, **host)
    member = ImageProcess(10, 1)
    told = msgspec.structs.replace(
        subject(), host=there, members=(member,), gpus=(ImageGpu("GPU-1", "NVIDIA H100", 5),)
    )
    return Manifest(image_id="i-1", create_time=datetime.now(UTC), files=(), subject=told)


def test_a_manifest_survives_its_file() -> None:
    written = manifest()
    assert decode_manifest(encode_manifest(written)) == written


def here(**facts: str) -> HostFacts:
    return msgspec.structs.replace(HOST, **facts)


@pytest.mark.parametrize(
    ("host", "models", "why"),
    [
        (
            here(architecture="aarch64"),
            {"NVIDIA H100": 1},
            "is of architecture x86_64, and this host is aarch64",
        ),
        (here(worker_id="wk-2"), {"NVIDIA H100": 1}, "was written on alpha"),
        (here(kernel_release="6.19.0"), {"NVIDIA H100": 1}, "is of kernel 6.18.0, and this host runs 6.19.0"),
        (
            here(criu_version="4.2"),
            {"NVIDIA H100": 1},
            "was written by CRIU 4.2.1, and this host has the older version 4.2",
        ),
        (here(driver_version=""), {"NVIDIA H100": 1}, "is of driver 580.95.05, and this host has none"),
        (here(), {"NVIDIA A100": 8}, "needs 1 of NVIDIA H100, and this host has 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_rule(
    host: HostFacts, models: dict[str, int], why: str
) -> None:
    with pytest.raises(OperationError, match=why) as caught:
        check_compatible(manifest(), host, models)
    assert caught.value.reason == errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE


def test_what_fits_is_not_refused() -> None:
    check_compatible(manifest(), here(criu_version="4.10", boot_id="another"), {"NVIDIA H100": 1})


NOW = datetime(2026, 1, 10, tzinfo=UTC)


def kept(number: int, size: int = 10, workload_id: str = "w-1") -> StoredItem:
    return StoredItem(f"i-{number}", workload_id, NOW - timedelta(days=10 - number), size)


@pytest.mark.parametrize(
    ("need", "budget", "free", "deleted"),
    [
        (10, 40, 1000, []),
        (11, 40, 1000, ["i-1"]),
        (25, 40, 1000, ["i-1", "i-3"]),
        (10, 0, 10, []),
        (15, 0, 10, ["i-1"]),
        (1, 0, -10, ["i-1", "i-3"]),
    ],
)
def test_room_is_made_by_the_oldest_that_nobody_needs(
    need: int, budget: int, free: int, deleted: list[str]
) -> None:
    chosen = make_room(
        [kept(3), kept(1)], need_bytes=need, used_bytes=30, budget_bytes=budget, free_disk_bytes=free
    )
    assert chosen == deleted


@pytest.mark.parametrize(
    ("budget", "free", "why"), [(40, 1000, "of the budget of 40 B are used"), (0, 5, "only 5 B are free")]
)
def test_what_can_not_be_made_room_for_is_refused(budget: int, free: int, why: str) -> None:
    with pytest.raises(OperationError, match=why) as caught:
        make_room([kept(1)], need_bytes=31, used_bytes=20, budget_bytes=budget, free_disk_bytes=free)
    assert caught.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DISK


def test_what_nobody_needs_expires_by_its_age() -> None:
    images = [kept(2), kept(1), kept(3), kept(9)]
    seconds = 0.0
    ages = Ages(lambda: seconds)

    def expired(now: datetime, days: float, *in_use: str) -> list[str]:
        return ages.expired(images, in_use, now=now, keep_for=timedelta(days=days))

    assert expired(NOW, 6.5) == [], "what was not seen for a day is not old, whatever the clock says"
    seconds += 86_400
    assert expired(NOW, 6.5, "i-1") == ["i-2", "i-3"]
    assert expired(NOW + timedelta(days=365), 10.5) == [], "the clock has jumped"
    seconds += 10 * 86_400
    assert expired(NOW, 10.5) == ["i-1", "i-2", "i-3", "i-9"]
    assert expired(NOW - timedelta(days=365), 0) == ["i-1", "i-2", "i-3", "i-9"]
