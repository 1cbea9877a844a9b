"""Small private files are replaced whole, and others can't read them."""

import os
import stat
from pathlib import Path

import pytest
from leasehold_worker.files.file_replacement import replace_file


def test_a_file_is_replaced_with_a_mode_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"former")
    path.chmod(0o644)
    former = os.umask(0o777)
    try:
        replace_file(path, b"new")
    finally:
        os.umask(former)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
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


def test_a_full_disk_keeps_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    replace_file(path, b"former")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["key"]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
