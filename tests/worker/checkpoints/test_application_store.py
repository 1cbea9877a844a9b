"""What applications saved of themselves: the file, the folder, and what is made of damage."""

import errno
import fcntl
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.workload_pb2 import Kernel
from leasehold_worker.checkpoints import application_file, application_format
from leasehold_worker.checkpoints.application_file import StoredCheckpoint
from leasehold_worker.checkpoints.application_format import (
    CUSTOM_LIMIT_BYTES,
    PAYLOAD_OFFSET,
    ApplicationHeader,
    read_envelope,
)
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.damaged import DamagedCheckpoint
from leasehold_worker.errors import OperationError

KERNEL = Kernel(kernel_id="trainer", kind="sgd", version=3)
CORRUPT = errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT


@pytest.fixture
def store(tmp_path: Path) -> ApplicationStore:
    return ApplicationStore(tmp_path / "images")


def keep(store: ApplicationStore, data: bytes = b"weights", workload_id: str = "w-1") -> StoredCheckpoint:
    with store.begin(workload_id, "train", KERNEL) as writer:
        writer.write(data[:3])
        writer.write(data[3:])
        return writer.commit({"step": "7"})


def read(store: ApplicationStore, checkpoint: StoredCheckpoint) -> bytes:
    with store.open(checkpoint) as reader:
        reader.verify()
        return b"".join(reader.pieces(4))


def ids(store: ApplicationStore, workload_id: str = "w-1") -> list[str]:
    return [found.checkpoint_id for found in store.scan(workload_id)]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(OperationError) as refused:
        call()
    return ErrorReason.Name(refused.value.reason).removeprefix("ERROR_REASON_")


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 9000], ids=["empty", "byte", "2 MB"])
def test_what_was_kept_is_found_by_another_worker_with_the_folder(
    store: ApplicationStore, data: bytes
) -> None:
    kept = keep(store, data)
    other = ApplicationStore(store.root)
    found = other.find(kept.checkpoint_id)
    assert found == kept
    assert read(other, found) == data
    assert found.path.stat().st_size == found.file_bytes == PAYLOAD_OFFSET + len(data)
    header = found.header
    assert (header.workload_id, header.workload_name, header.kernel) == ("w-1", "train", KERNEL)
    assert (header.size_bytes, header.custom) == (len(data), {"step": "7"})
    assert other.scan_all() == [kept]


def test_nobody_else_may_read_it(store: ApplicationStore) -> None:
    kept = keep(store)
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert kept.path.parent.stat().st_mode & 0o777 == 0o700


def test_what_is_not_finished_leaves_nothing(store: ApplicationStore) -> None:
    with store.begin("w-1", "train", KERNEL) as writer:
        writer.write(b"half")
        assert store.scan("w-1") == []
    assert list(store.root.iterdir()) == []


def test_the_newest_is_first_by_number_and_not_by_letters(store: ApplicationStore) -> None:
    kept = [keep(store).checkpoint_id for _ in range(11)]
    assert ids(store) == kept[::-1]
    assert kept[-1].startswith("k-11-")


def test_the_number_goes_on_after_the_last_one(store: ApplicationStore) -> None:
    first, second = keep(store), keep(store)
    store.delete(first.checkpoint_id)
    assert keep(store).checkpoint_id.startswith("k-3-")
    assert refusal(lambda: store.find(first.checkpoint_id)) == "UNKNOWN_CHECKPOINT"
    assert store.find(second.checkpoint_id) == second


def alter(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("position", [0, 20, 60], ids=["magic", "digest", "header"])
def test_an_altered_header_is_seen_at_once(store: ApplicationStore, position: int) -> None:
    kept = keep(store)
    alter(kept.path, position)
    assert refusal(lambda: store.find(kept.checkpoint_id)) == "CHECKPOINT_CORRUPT"
    assert isinstance(store.scan("w-1")[0], DamagedCheckpoint)
    assert refusal(lambda: read(store, kept)) == "CHECKPOINT_CORRUPT"


def test_an_altered_payload_is_seen_when_it_is_verified(store: ApplicationStore) -> None:
    kept = keep(store)
    alter(kept.path, PAYLOAD_OFFSET)
    assert store.find(kept.checkpoint_id) == kept
    assert refusal(lambda: read(store, kept)) == "CHECKPOINT_CORRUPT"


@pytest.mark.parametrize("size", [0, 10, PAYLOAD_OFFSET, PAYLOAD_OFFSET + 6])
def test_a_truncated_file_is_seen(store: ApplicationStore, size: int) -> None:
    kept = keep(store)
    os.truncate(kept.path, size)
    assert refusal(lambda: store.find(kept.checkpoint_id)) == "CHECKPOINT_CORRUPT"


def test_a_file_in_the_place_of_another_is_seen(store: ApplicationStore) -> None:
    first, second = keep(store), keep(store, b"others")
    second.path.rename(first.path)
    assert refusal(lambda: store.find(first.checkpoint_id)) == "CHECKPOINT_CORRUPT"


def test_a_format_of_a_later_release_is_not_taken_for_damage(store: ApplicationStore) -> None:
    kept = keep(store)
    alter(kept.path, 9)
    assert refusal(lambda: store.find(kept.checkpoint_id)) == "CHECKPOINT_INCOMPATIBLE"


def test_the_last_ones_are_kept(store: ApplicationStore) -> None:
    kept = [keep(store).checkpoint_id for _ in range(5)]
    other = keep(store, workload_id="w-2").checkpoint_id
    assert store.keep_last("w-1", 2, in_use=[kept[0]]) == [kept[2], kept[1]]
    assert ids(store) == [kept[4], kept[3], kept[0]]
    assert store.keep_last("w-1", 0) == [kept[3], kept[0]]
    assert ids(store) == [kept[4]]
    assert ids(store, "w-2") == [other]


def test_a_damaged_one_does_not_count_as_kept(store: ApplicationStore) -> None:
    kept = [keep(store) for _ in range(3)]
    alter(kept[2].path, 60)
    store.keep_last("w-1", 1)
    assert ids(store) == [kept[2].checkpoint_id, kept[1].checkpoint_id]


def test_only_what_nobody_writes_any_more_is_swept(store: ApplicationStore) -> None:
    kept = keep(store)
    left = kept.path.with_name("k-2-0123456789abcdef.partial")
    left.write_bytes(b"half")
    with store.begin("w-1", "train", KERNEL) as writer:
        assert ApplicationStore(store.root).sweep() == 1
        writer.write(b"more")
        written = writer.commit({})
    assert not left.exists()
    assert ids(store) == [written.checkpoint_id, kept.checkpoint_id]
    assert store.sweep() == 0


def test_folders_of_images_that_others_write_are_no_business_of_ours(
    store: ApplicationStore, caplog: pytest.LogCaptureFixture
) -> None:
    keep(store)
    image = store.root / "w-1/i-20260101T000000000000Z-01234567.partial"
    image.mkdir()
    left = store.root / "w-1/k-notes.partial"
    left.write_text("none of ours")
    assert store.sweep() == 0
    assert image.exists()
    assert left.exists()
    assert not caplog.records


def test_the_header_says_who_wrote_it_and_an_older_one_that_does_not_is_read(
    store: ApplicationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep(ApplicationStore(store.root, "worker-1"))
    assert store.find(kept.checkpoint_id).header.worker_id == "worker-1"

    class Older:
        def encode(self, header: ApplicationHeader) -> bytes:
            fields = msgspec.structs.asdict(header)
            del fields["worker_id"]
            return msgspec.json.encode(fields)

    monkeypatch.setattr(application_format, "_encoder", Older())
    older = keep(store, b"older")
    found = store.find(older.checkpoint_id)
    assert found.header.worker_id == ""
    assert read(store, found) == b"older"


def test_a_time_without_a_zone_is_no_header(store: ApplicationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application_file, "now", lambda: datetime(2026, 1, 1))  # noqa: DTZ001 - that is it
    kept = keep(store)
    assert refusal(lambda: store.find(kept.checkpoint_id)) == "CHECKPOINT_CORRUPT"


@pytest.mark.parametrize("name", ["../w-1", "", "a/b", ".", "..", "w\0", "x" * 200])
def test_tricks_with_ids_are_refused(store: ApplicationStore, name: str) -> None:
    keep(store)
    assert refusal(lambda: store.begin(name, "", KERNEL)) == "INVALID_ARGUMENT"
    assert refusal(lambda: store.scan(name)) == "INVALID_ARGUMENT"
    assert refusal(lambda: store.find(name)) == "UNKNOWN_CHECKPOINT"
    assert refusal(lambda: store.delete(name)) == "UNKNOWN_CHECKPOINT"


def test_an_application_may_not_say_too_much(store: ApplicationStore) -> None:
    with store.begin("w-1", "train", KERNEL) as writer:
        assert refusal(lambda: writer.commit({"x": "y" * CUSTOM_LIMIT_BYTES})) == "KERNEL_FAILED"
        assert refusal(lambda: writer.commit({str(n): "" for n in range(65)})) == "KERNEL_FAILED"
    with store.begin("w-1", "train", KERNEL) as writer:
        worst = {"\0": "\0" * (CUSTOM_LIMIT_BYTES - 1)}
        assert read_envelope(writer.commit(worst).path).custom == worst


def test_a_full_disk_is_said_to_be_one(store: ApplicationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with store.begin("w-1", "train", KERNEL) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        assert refusal(lambda: writer.write(b"x")) == "INSUFFICIENT_DISK"
    assert list(store.root.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("")
    store = ApplicationStore(tmp_path / "images")
    assert refusal(lambda: store.begin("w-1", "", KERNEL)) == "PERMISSION_OR_OS"
    assert store.scan_all() == []
    assert store.disk_space().available_bytes > 0


def test_a_writer_holds_its_file(store: ApplicationStore) -> None:
    with store.begin("w-1", "train", KERNEL) as writer:
        descriptor = os.open(writer.path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_a_folder_that_can_not_be_read_is_not_an_empty_one(
    store: ApplicationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore would begin without the checkpoints of a volume that fails."""
    kept = keep(store)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        assert refusal(lambda: store.scan("w-1")) == "PERMISSION_OR_OS"
    assert store.scan("w-1") == [kept]
    assert store.scan("w-2") == []
