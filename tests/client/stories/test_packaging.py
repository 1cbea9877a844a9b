"""What is packed into the wheel and the sdist, built for real."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.git_checkout import ROOT, needs_git, tracked_files

LEFT_BY_README = ("leasehold-venv/lib/big.so", "five.log", ".cache/criu/criu", ".venv/bin/python")


def build(kind: str, checkout: Path, folder: Path) -> Path:
    """Builds a wheel or an sdist of a checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as pip does it."""
    wheel = build("wheel", ROOT, tmp_path_factory.mktemp("dist"))
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def metadata(installed: Path) -> Message:
    (path,) = installed.glob("*.dist-info/METADATA")
    return Parser().parsestr(path.read_text())


@pytest.mark.long
def test_the_wheel_has_the_wire_contract(installed: Path) -> None:
    def protos(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.proto")}

    assert protos(installed / "leasehold") == protos(ROOT / "protos/leasehold")
    assert {"v1/workload.proto", "worker/v1/session.proto", "local/v1/kernel.proto"} <= set(
        protos(installed / "leasehold")
    )


@pytest.mark.long
def test_the_wheel_says_who_made_it_and_what_it_is_about(installed: Path) -> None:
    facts = metadata(installed)
    assert facts["Author"] == "The Leasehold authors"
    assert "GPU" in facts["Keywords"].split(",")


def from_wheel(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the wheel's packages before those of the checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_demonstration_of_the_wheel_has_its_counter(installed: Path) -> None:
    script = "from leasehold_client.demo import runner; print(runner._find_counter(None))"
    done = from_wheel(installed, "-c", script)
    counter = Path(done.stdout.strip())
    assert counter.is_relative_to(installed), done.stderr
    assert counter.read_bytes() == (ROOT / "examples/counter.py").read_bytes()


@pytest.mark.long
def test_the_demonstration_runs_from_the_wheel(installed: Path) -> None:
    done = from_wheel(installed, "-m", "leasehold_client", "demo")
    assert done.returncode == 0, done.stderr
    assert '"lost": 0' in done.stdout


def copy_checkout(checkout: Path) -> set[str]:
    """Copies what git tracks, and returns the names."""
    tracked = tracked_files()
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    return tracked


@pytest.mark.long
@needs_git
def test_the_sdist_has_what_git_tracks_and_nothing_else(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    tracked = copy_checkout(checkout)
    for name in LEFT_BY_README:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("left behind")
    with tarfile.open(build("sdist", checkout, tmp_path / "dist")) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed - {"PKG-INFO"} == tracked


@pytest.mark.long
@needs_git
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_two_builds_of_a_commit_have_the_same_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    built: list[bytes] = []
    for place, mode in (("one", 0o600), ("elsewhere", 0o664)):
        checkout = tmp_path / place / "checkout"
        for name in copy_checkout(checkout):
            os.utime(checkout / name, (mode, mode))
            if not (ROOT / name).stat().st_mode & 0o100:
                (checkout / name).chmod(mode)
        built.append(build(kind, checkout, tmp_path / place / "dist").read_bytes())
    assert built[0] == built[1]
