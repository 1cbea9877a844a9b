"""A coordinator that can't start says why in one line."""

import subprocess
from pathlib import Path

import pytest

from .conftest import COMMAND, CoordinatorProcess


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--listen", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "is not HOST:PORT"),
        (["--listen", "192.0.2.1:7400"], "can't listen on 192.0.2.1:7400"),
        (["--database", "/proc/no/store.sqlite3"], "can't be used"),
        (["--load-interval", "0"], "give 0.05 to 3600 seconds"),
        (["--config", "/no/such/file.toml"], "can't be read: No such file"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], match: str) -> None:
    arguments = ["--database", str(tmp_path / "store.sqlite3"), *options, "--log-level", "error"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert match in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('lissten = "127.0.0.1:0"\n')
    done = subprocess.run([*COMMAND, "--config", str(file)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "lissten" in done.stderr


def test_a_port_in_use(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    options = ["--listen", coordinator.address, "--database", str(tmp_path / "other.sqlite3")]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "the port is in use" in done.stderr
    assert "Traceback" not in done.stderr
