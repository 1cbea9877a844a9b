"""The files of limits.conf(5): which ones count, and what is told about the others."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.diagnostics.examination import Examination, NotOkError
from leasehold_worker.diagnostics.user_checks import user_limits
from leasehold_worker.host import limit_files
from leasehold_worker.host.accounts import numbered_account
from leasehold_worker.host.limit_files import FILE_LIMIT_BYTES, FILES_LIMIT, login_limits, read_lines

from tests.worker.unix_users import needs_root

pytestmark = needs_root  # the files count only if they are root's

LINE = "* - nproc 10\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limit_files, "FOLDER", tmp_path)
    (tmp_path / "limits.d").mkdir()
    return tmp_path


def test_files_count_in_the_order_of_pam_limits(folder: Path) -> None:
    for number, name in enumerate(("b.conf", "a.conf", ".hidden.conf", "readme", "B.conf")):
        (folder / "limits.d" / name).write_text(f"* - nproc {number}\n")
    (folder / "limits.conf").write_text("* - nproc 9\n")
    lines, problems = read_lines()
    assert [line.value for line in lines] == [9, 4, 1, 0]
    assert problems == []


def test_a_host_without_files_has_no_lines(folder: Path) -> None:
    (folder / "limits.d").rmdir()
    assert read_lines() == ([], [])


def test_a_link_of_roots_is_followed(folder: Path) -> None:
    (folder / "elsewhere").write_text(LINE)
    (folder / "limits.conf").symlink_to(folder / "elsewhere")
    assert len(read_lines()[0]) == 1


def give_away(path: Path) -> None:
    path.write_text(LINE)
    os.chown(path, 2001, 2001)


def open_to_its_group(path: Path) -> None:
    path.write_text(LINE)
    path.chmod(0o664)


def make_large(path: Path) -> None:
    path.write_text(LINE + " " * FILE_LIMIT_BYTES)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (give_away, "other users than root"),
        (open_to_its_group, "other users than root"),
        (make_large, "more than 262144 bytes"),
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
        (link_to_itself, "symbolic links"),
    ],
)
def test_a_file_that_is_not_roots_alone_is_told_and_ignored(
    folder: Path, make: Callable[[Path], None], why: str
) -> None:
    make(folder / "limits.conf")
    lines, (problem,) = read_lines()
    assert lines == []
    assert why in problem


def test_more_files_than_can_be_read_are_told(folder: Path) -> None:
    for number in range(FILES_LIMIT + 1):
        (folder / f"limits.d/{number:03}.conf").write_text(LINE)
    lines, (problem,) = read_lines()
    assert len(lines) == FILES_LIMIT
    assert "more than 100 files" in problem


async def test_the_limits_of_the_workers_own_user_are_the_workers(folder: Path) -> None:
    (folder / "limits.conf").write_text(LINE)
    assert (await login_limits(None)).encoded == ""
    assert ",6:10:10," in (await login_limits(numbered_account(2001, 2001))).encoded


def test_the_doctor_tells_the_problems_of_the_files(folder: Path) -> None:
    config = WorkerConfig(run_as="2001:2001")
    patient = Examination(config, None, None, None, False, None, "")  # type: ignore[arg-type]  # no driver
    (folder / "limits.conf").write_text(LINE)
    assert user_limits(patient) == "1 lines of limits.conf(5)"
    (folder / "limits.d/more.conf").write_text("* - nproc lots\n")
    with pytest.raises(NotOkError, match=r"more\.conf: line 1 is invalid"):
        user_limits(patient)
    assert "run_as is not set" in user_limits(replace(patient, config=WorkerConfig()))


async def test_a_hidden_pid_1_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limit_files, "_FIRST", folder / "hidden")
    assert (await login_limits(numbered_account(2001, 2001))).encoded
    assert "mount /proc without hidepid" in caplog.text
