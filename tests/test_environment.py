"""The end of a run reports what tests left, and its environment is that of no machine."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import environment
from tests.worker.unix_users import open_to_others

ODD_PROGRAM = "leasehold-odd-program"


def test_a_process_and_a_file_that_are_left_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "LEFTOVER_TIMEOUT_S", 0.1)
    (tmp_path / "t").mkdir()
    assert environment.leftovers(tmp_path) == []
    (tmp_path / "t/forgotten").touch()
    marked = {**os.environ, environment.MARK: str(tmp_path)}
    ready = "print(flush=True); import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", ready], env=marked, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        program, file = environment.leftovers(tmp_path)
        process.kill()
    assert program.startswith(f"process {process.pid}: ")
    assert file == f"file {tmp_path / 't/forgotten'}"


def test_the_runner_of_a_grid_opens_its_folder_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.MARK)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "leasehold-chaos"
    folder.mkdir(mode=0o700)
    open_to_others(folder)
    assert folder.stat().st_mode & 0o777 == 0o711


def test_a_sample_has_about_half_of_the_cases_and_the_same_ones_for_a_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [f"tests/test_grid.py::test[{number}]" for number in range(1_000)]

    def sample(seed: str) -> list[str]:
        monkeypatch.setenv(environment.SEED, seed)
        return [case for case in cases if environment.is_sampled(case)]

    assert 400 < len(sample("20000")) < 600
    assert sample("20000") == sample("20000") != sample("20001")


def test_each_worker_of_xdist_begins_with_its_share_of_what_takes_minutes() -> None:
    order = environment.begin_with("ABCD", "123456", workers=3)
    assert ["".join(order[:3]), "".join(order[3:6]), "".join(order[6:])] == ["AD1", "B23", "C456"]
    assert environment.begin_with("AB", "1", workers=1) == ["A", "B", "1"]
    assert sorted(environment.begin_with("ABCDEFG", "1", workers=2)) == sorted("ABCDEFG1")


@pytest.mark.long
def test_what_somebody_installed_or_set_is_not_seen(tmp_path: Path) -> None:
    """Runs pytest with the settings of an odd shell, and has it look."""
    (tmp_path / ODD_PROGRAM).touch(mode=0o755)
    odd = {
        **{name: value for name, value in os.environ.items() if name != environment.MARK},
        "HOME": "/nonexistent",
        "LEASEHOLD_COORDINATOR": "203.0.113.1:1",
        "LEASEHOLD_STATE_DIR": "/nonexistent",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            f"{__file__}::test_a_test_sees_no_setting_of_its_shell",
            "-m",
            "long",
        ],
        env=odd,
        cwd=environment.ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.long
def test_a_test_sees_no_setting_of_its_shell() -> None:
    """The test before it runs this one in an odd shell."""
    assert shutil.which(ODD_PROGRAM) is None
    assert "LEASEHOLD_COORDINATOR" not in os.environ
    assert "LEASEHOLD_STATE_DIR" not in os.environ
    assert os.environ["HOME"] != "/nonexistent"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("markers", "gpus"),
    [
        ("gpu", True),
        ("long and gpu", True),
        ("gpu or long", True),
        ("not long", False),
        ("not gpu", False),
        ("long and not gpu", False),
        ("", False),
    ],
)
def test_only_an_expression_that_selects_the_marker_gpu_is_a_run_on_gpus(markers: str, gpus: bool) -> None:
    assert environment.selects_gpus(markers) is gpus
