"""What goes into a kit, without building one."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .kit import LIMIT_BYTES, NOT_NEEDED, KitError, check_size, requirements

COMMAND = Path(__file__).with_name("gpu_report.sh")
EXTRAS = ("worker", "coordinator", "client")
TESTS = ("pytest", "pytest-trio", "pytest-timeout", "cuda-core", "numpy")


def pins(python: str) -> dict[str, str]:
    """The version of each package of a kit."""
    lines = (line.split() for line in requirements(python))
    return {name: version for name, _, version in (words[0].partition("==") for words in lines)}


def needed(package: str, extras: tuple[str, ...] = ("",)) -> set[str]:
    """What a package needs on Linux, all the way down."""
    found: set[str] = set()
    for text in requires(package) or ():
        requirement = Requirement(text)
        wanted = any(
            requirement.marker is None or requirement.marker.evaluate({"extra": each}) for each in extras
        )
        if wanted and not requirement.name.startswith("leasehold"):
            found |= {
                canonicalize_name(requirement.name),
                *needed(requirement.name, ("", *requirement.extras)),
            }
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_everything_that_the_report_needs_is_in_it(python: str) -> None:
    wanted = needed("leasehold", EXTRAS).union(TESTS, *map(needed, TESTS)) - {"cuda-python"}
    assert wanted == pins(python).keys()


def test_no_tool_of_developers_is_in_it() -> None:
    assert not [name for name in pins("3.12") if NOT_NEEDED.fullmatch(name)]


def test_each_python_gets_the_version_for_it() -> None:
    assert pins("3.11")["numpy"] < pins("3.12")["numpy"]


def test_every_wheel_is_checked_by_a_hash() -> None:
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", line) for line in requirements("3.12"))


def test_an_archive_that_is_too_large_is_refused(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "large-1-py3-none-any.whl").write_bytes(bytes(10))
    archive = tmp_path / "kit.tar.xz"
    with archive.open("wb") as file:
        file.truncate(LIMIT_BYTES)
    check_size(archive, wheels)
    with archive.open("wb") as file:
        file.truncate(LIMIT_BYTES + 1)
    with pytest.raises(KitError, match=r"60\.0 MiB, and at most 60 MiB .* large-1-py3-none-any\.whl"):
        check_size(archive, wheels)
    assert not archive.exists()


def test_the_command_names_the_python_that_it_lacks(tmp_path: Path) -> None:
    command = tmp_path / "gpu_report"
    command.write_text(COMMAND.read_text().replace("@PYTHON@", "3.9999"))
    done = subprocess.run(["sh", str(command)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no Python 3.9999 in PATH" in done.stderr
