"""Files are replaced whole, with a mode that no umask changes."""

import os
import stat
from pathlib import Path

import pytest
from leasehold_client.private_files import replace_file


@pytest.mark.parametrize("umask", [0o777, 0o277, 0o000])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_is_replaced_with_a_mode_of_its_own(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"former")
    path.chmod(0o640)
    former = os.umask(umask)
    try:
        replace_file(path, b"new", mode)
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["key"]


def test_a_rest_of_a_crash_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    path, victim, rest = tmp_path / "key", tmp_path / "victim", tmp_path / ".key.new"
    victim.write_bytes(b"whole")
    for make in (lambda: rest.write_bytes(b"half"), lambda: rest.symlink_to(victim)):
        make()
        replace_file(path, b"new")
        assert path.read_bytes() == b"new"
        assert victim.read_bytes() == b"whole"
        assert not rest.exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_keeps_the_former_file_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "key"
    replace_file(path, b"former")

    def refuse(descriptor: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(type(error)):
            replace_file(path, b"new")
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["key"]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_target_that_is_a_directory_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "key", b"new")
    assert os.listdir(tmp_path) == ["key"]
