"""The files of a worker's state directory, on a disk that is damaged or full."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold_worker.errors import StartError
from leasehold_worker.files.state_directory import StateDirectory, open_state_directory

from tests.worker.small_disks import fill, small_disk
from tests.worker.unreadable_files import unreadable

FILES: dict[str, Callable[[StateDirectory], object]] = {
    "worker_id": StateDirectory.worker_id,
    "starts": StateDirectory.count_start,
    "epoch": lambda directory: directory.save_epoch(1000),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, name: str) -> None:
    with open_state_directory(tmp_path / "state") as directory:
        path = tmp_path / "state" / name
        with unreadable(path), pytest.raises(StartError, match=f"{path} can't be read.*check its disk"):
            FILES[name](directory)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
@pytest.mark.parametrize("name", FILES)
def test_only_a_regular_file_is_read(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    with open_state_directory(tmp_path / "state") as directory:
        path = tmp_path / "state" / name
        make(path)
        with pytest.raises(StartError, match=f"{path} can't be read.*not a regular file"):
            FILES[name](directory)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_size_is_read_in_part(tmp_path: Path, name: str) -> None:
    with open_state_directory(tmp_path / "state") as directory:
        path = tmp_path / "state" / name
        path.write_text("1\n")
        os.truncate(path, 1 << 40)
        with pytest.raises(StartError, match=f"{path} is damaged"):
            FILES[name](directory)


@pytest.mark.parametrize("name", FILES)
def test_an_unreadable_file_is_not_a_missing_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object, *_: object, **__: object) -> object:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with open_state_directory(tmp_path / "state") as directory:
        path = tmp_path / "state" / name
        path.write_text("17\n")
        with monkeypatch.context() as patch:
            for call in ("lstat", "stat", "open"):
                patch.setattr(os, call, fail)
            with pytest.raises(StartError, match=f"{path} can't be read"):
                FILES[name](directory)
        assert path.read_text() == "17\n"


@pytest.mark.parametrize("name", FILES)
def test_half_a_line_and_a_dangling_link_are_no_file_of_the_worker(tmp_path: Path, name: str) -> None:
    with open_state_directory(tmp_path / "state") as directory:
        path = tmp_path / "state" / name
        path.write_text("4")  # of 41
        with pytest.raises(StartError, match=f"{path} is damaged, it holds no whole line"):
            FILES[name](directory)
        path.unlink()
        path.symlink_to(tmp_path / "nowhere")
        with pytest.raises(StartError, match=f"{path} can't be read"):
            FILES[name](directory)
        assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_the_reason_of_a_failed_start(tmp_path: Path, name: str) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    with small_disk(state):
        state.chmod(0o700)
        with open_state_directory(state) as directory:
            fill(state)
            with pytest.raises(
                StartError, match=f"{state / name} can't be .*written .No space left.*free space"
            ):
                FILES[name](directory)
