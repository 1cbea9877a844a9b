"""examples/training.py on a fleet: stopped and woken, and begun on another worker from its checkpoint."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.conftest import end_leftovers

from .fleets import Fleet

TRAINING = Path(__file__).resolve().parents[2] / "examples/training.py"
STEPS = 150
_STEP = re.compile(r"step=(\d+) loss=(\S+)")


@pytest.fixture
def sharing_fleet(empty_fleet: Fleet) -> Iterator[Fleet]:
    """Two workers that share an image directory."""
    shared = empty_fleet.folder / "images"
    shared.mkdir()
    for name in ("alpha", "beta"):
        (empty_fleet.folder / name).mkdir()
        (empty_fleet.folder / name / "images").symlink_to(shared)
        empty_fleet.start_worker(name, gpus=1)
    yield empty_fleet
    end_leftovers(empty_fleet.folder / "beta")


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """The losses of a run that nobody stops."""
    program = [sys.executable, str(TRAINING), f"--steps={STEPS}", "--interval-s=0"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    return losses(done.stdout)


def losses(output: str) -> dict[int, str]:
    """The losses by step, as printed; none twice."""
    found = _STEP.findall(output)
    assert len({step for step, _ in found}) == len(found)
    return {int(step): loss for step, loss in found}


def learned(fleet: Fleet, name: str) -> dict[int, str]:
    return losses(b"".join(fleet.client.output(name)).decode())


def wait_learned(fleet: Fleet, name: str, step: int) -> None:
    fleet.wait(lambda: max(learned(fleet, name), default=0) >= step)


def train(fleet: Fleet, name: str, worker: str, *options: str) -> None:
    program = [sys.executable, str(TRAINING), "--gpu", f"--steps={STEPS}", "--interval-s=0.02"]
    fleet.cli("run", "--name", name, "--worker", worker, "--gpus", "1", *options, "--", *program)


def test_it_is_stopped_and_woken_as_if_nothing_had_been(
    sharing_fleet: Fleet, undisturbed: dict[int, str]
) -> None:
    fleet = sharing_fleet
    train(fleet, "train", "alpha")
    for step in (20, 60):
        wait_learned(fleet, "train", step)
        fleet.cli("suspend", "train", "--process", "stop")
        assert fleet.leases() == {}
        fleet.cli("wake", "train")
        assert fleet.leases() == {"alpha/0": "train"}
    wait_learned(fleet, "train", STEPS)
    assert learned(fleet, "train") == undisturbed


def test_it_goes_on_on_another_worker(sharing_fleet: Fleet, undisturbed: dict[int, str]) -> None:
    fleet = sharing_fleet
    train(fleet, "one", "alpha")
    wait_learned(fleet, "one", 20)
    parked = fleet.json("suspend", "one", "--process", "stop")
    checkpoint_id = parked["result"]["checkpoint_id"]
    train(fleet, "two", "beta", "--from-checkpoint", checkpoint_id)
    wait_learned(fleet, "two", STEPS)
    before, after = learned(fleet, "one"), learned(fleet, "two")
    assert min(after) == max(before) + 1
    assert {**before, **after} == undisturbed
