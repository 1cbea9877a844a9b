"""The command blocks of README.md, docs/tour.md and docs/cli.md run as they are written."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from leasehold_client import main, plugins
from leasehold_simgpu import SimulatedHost, Timing

from .sessions import Block, blocks, missing, play, refused, section

ROOT = Path(__file__).resolve().parents[2]
README, TOUR, CLI = ROOT / "README.md", ROOT / "docs/tour.md", ROOT / "docs/cli.md"
COMMANDS = "make demo\nmake test\n"
"""Not played: it runs the tests. tests/integration/test_demo.py plays the demonstration."""
LIMIT_S = 240
"""For a session of the README. On two cores with a load of 20, one took 16 to 65 s."""
NVIDIA_SMI = """\
#!/bin/sh
exec leasehold simgpu show --dir {folder}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the commands need of a checkout, so that they leave nothing in ours."""
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def gpu_host(tmp_path: Path) -> dict[str, str]:
    """The environment of a host with two GPUs, and a stand-in for nvidia-smi."""
    host = SimulatedHost.create(tmp_path / "host", gpus=2, chip="H100", timing=Timing.instant())
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NVIDIA_SMI.format(folder=tmp_path / "host"))
    (programs / "nvidia-smi").chmod(0o755)
    return {**host.environment(), "PATH": f"{programs}:{os.environ['PATH']}"}


def check(session: Sequence[Block], folder: Path, limit_s: float, environment: dict[str, str]) -> None:
    played = play(session, folder, limit_s=limit_s, environment=environment)
    assert played.finished, played.output
    assert played.failed == refused(session), played.output
    assert not missing(session, played.output), played.output


def test_every_block_of_the_readme_is_played() -> None:
    played = [*gpu_blocks(), *simulated_blocks(), Block("bash", COMMANDS)]
    assert {*blocks(README.read_text())} == {*played}


def gpu_blocks() -> list[Block]:
    return blocks(section(README, "Five minutes on a GPU host"))


def simulated_blocks() -> list[Block]:
    return blocks(section(README, "Three minutes on simulated GPUs"))


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_session_on_simulated_gpus(checkout: Path) -> None:
    check(simulated_blocks(), checkout, LIMIT_S, {})


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_session_on_a_gpu_host(checkout: Path, gpu_host: dict[str, str]) -> None:
    install, *session = gpu_blocks()
    assert "pip install" in install.text
    check(session, checkout, LIMIT_S, gpu_host)


@pytest.mark.long
@pytest.mark.minutes
def test_the_installation_on_a_gpu_host(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path], check=True)
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    session = [*gpu_blocks()[:1], Block("bash", "leasehold --help\n")]
    played = play(session, folder, limit_s=600, environment={"PATH": "/usr/bin:/bin"})
    if "No matching distribution found" in played.output:
        pytest.skip("no package index has the packages")
    assert played.finished, played.output
    assert not played.failed, played.output


@pytest.mark.long
@pytest.mark.minutes
def test_the_tour(checkout: Path) -> None:
    check(blocks(TOUR.read_text()), checkout, 600, {})


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_page_of_the_command_line(checkout: Path) -> None:
    start, *_ = simulated_blocks()
    check([start, *blocks(CLI.read_text())], checkout, LIMIT_S, {})


def test_the_page_of_the_command_line_names_every_verb() -> None:
    usage = CLI.read_text().split("```")[1]
    for name in [*main.VERBS, *plugins.PLUGINS]:
        assert f"leasehold {name} " in usage or f"leasehold {name}\n" in usage, name
