"""Programs with a deadline and a bound in bytes."""

import os
import time
from pathlib import Path

import pytest
from leasehold_client.errors import LeaseholdError
from leasehold_client.support.bounded_run import run_bounded
from leasehold_worker.host.processes import identify

from tests.worker.unix_users import ALICE_UID, needs_root


def test_the_output_and_the_exit_code() -> None:
    assert run_bounded(["sh", "-c", "echo one; exit 3"], 10, 100) == (3, b"one\n")


def test_a_larger_output_is_refused_or_its_end_kept() -> None:
    with pytest.raises(LeaseholdError, match="larger than 100 bytes"):
        run_bounded(["sh", "-c", "yes"], 10, 100)
    _, output = run_bounded(["sh", "-c", "seq 200000"], 10, 14, keep_end=True)
    assert output == b"199999\n200000\n"


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(LeaseholdError, match=r"did not end within 0\.3 s"):
        run_bounded(["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"], 0.3, 100)
    assert time.monotonic() - began < 50
    deadline = time.monotonic() + 10
    while identify(int(pid.read_text())) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_program_that_is_missing_or_fails_has_its_reason() -> None:
    with pytest.raises(LeaseholdError, match="does not run: No such file"):
        run_bounded(["/nonexistent"], 10, 100)
    with pytest.raises(LeaseholdError, match="failed: second"):
        run_bounded(["sh", "-c", "echo first >&2; echo second >&2; exit 1"], 10, 100)


@needs_root
def test_root_reads_as_the_owner_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path, ALICE_UID, ALICE_UID)
    monkeypatch.setenv("A_SECRET", "of root")
    monkeypatch.setenv("LEASEHOLD_OWN", "told")
    _, variables = run_bounded(["env"], 10, 10_000, owner_of=tmp_path)
    assert b"LEASEHOLD_OWN=told" in variables
    assert b"A_SECRET" not in variables
    _, output = run_bounded(["id", "-u"], 10, 100, owner_of=tmp_path)
    assert int(output) == ALICE_UID
