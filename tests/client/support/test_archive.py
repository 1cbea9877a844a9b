"""The file of a bundle."""

import os
from pathlib import Path

import pytest
from leasehold_client.support.archive import write_archive
from leasehold_client.support.members import Member


def test_an_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_archive(tmp_path / "bundle.tar.gz", [Member("a", "a member", b"content")])
    assert list(tmp_path.iterdir()) == []
