"""examples/training.py on a fleet: stopped and woken, and begun on another worker from its checkpoint."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .fleets import Fleet

TRAINING = Path(__file__).resolve().parents[2] / "examples/training.py"
STEPS = 1000
"""More than any test waits for: it runs until it is stopped, however slow the machine is."""

_STEP = re.compile(r"step=(\d+) loss=(\S+)\n")


@pytest.fixture
def sharing_fleet(empty_fleet: Fleet) -> Fleet:
    """Two workers that share an image directory."""
    for name in ("alpha", "beta"):
        empty_fleet.start_worker(name, gpus=1, settings=f'image_dir = "{empty_fleet.folder / "images"}"\n')
    return empty_fleet


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


def require_same(found: dict[int, str], undisturbed: dict[int, str]) -> None:
    """All steps so far are there, with the losses of a run that nobody stopped, to the last bit."""
    assert list(found) == list(range(1, len(found) + 1))
    assert found == {step: undisturbed[step] for step in found}


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    program = [sys.executable, str(TRAINING), "--steps=1000000"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step=1 ")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (0, "")


@pytest.mark.long
def test_it_is_stopped_and_woken_as_if_nothing_had_been(
    sharing_fleet: Fleet, undisturbed: dict[int, str]
) -> None:
    fleet = sharing_fleet
    train(fleet, "train", "alpha")
    last = 0
    for _ in range(2):
        wait_learned(fleet, "train", last + 10)
        fleet.cli("suspend", "train", "--process", "stop")
        fleet.wait(lambda: not fleet.leases())
        last = max(learned(fleet, "train"))
        fleet.cli("wake", "train")
        fleet.wait(lambda: fleet.leases() == {"alpha/0": "train"})
    wait_learned(fleet, "train", last + 10)
    require_same(learned(fleet, "train"), undisturbed)


@pytest.mark.long
def test_it_goes_on_on_another_worker(sharing_fleet: Fleet, undisturbed: dict[int, str]) -> None:
    fleet = sharing_fleet
    train(fleet, "one", "alpha")
    wait_learned(fleet, "one", 10)
    parked = fleet.json("suspend", "one", "--process", "stop")
    before = learned(fleet, "one")
    checkpoint_id = parked["result"]["checkpoint_id"]
    listed = fleet.json("get", "checkpoints")["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == [checkpoint_id] * 2, "each worker has it"
    assert listed[0]["custom"] == {"step": str(max(before))}
    train(fleet, "two", "beta", "--from-checkpoint", checkpoint_id)
    wait_learned(fleet, "two", max(before) + 10)
    after = learned(fleet, "two")
    assert min(after) == max(before) + 1
    require_same({**before, **after}, undisturbed)


@pytest.mark.long
def test_a_checkpoint_that_an_absent_worker_needs_is_kept_by_the_others(sharing_fleet: Fleet) -> None:
    fleet = sharing_fleet
    train(fleet, "one", "alpha")
    train(fleet, "two", "beta")
    wait_learned(fleet, "one", 5)
    wait_learned(fleet, "two", 5)
    needed = fleet.json("suspend", "one", "--process", "stop")["result"]["checkpoint_id"]
    spare = fleet.json("checkpoint", "two")["result"]["checkpoint_id"]

    def uses() -> set[tuple[str, bool]]:
        found = fleet.json("get", "checkpoints")["checkpoints"]
        return {(each["checkpoint_id"], each.get("in_use", False)) for each in found}

    assert uses() == {(needed, True), (spare, False)}, "each worker says the same"
    fleet.end("alpha")
    fleet.wait(lambda: fleet.worker_state("alpha") != "WORKER_STATE_CONNECTED")
    assert uses() == {(needed, True), (spare, False)}
    for dry_run in ([], ["--dry-run"]):
        refused = fleet.cli("rm", "checkpoint", needed, *dry_run, code=1)
        assert "CHECKPOINT_IN_USE" in refused.stderr
    deleted = fleet.cli("rm", "checkpoint", "--all", "--yes", "--force")
    assert f"kept, since suspended workloads need them: {needed}" in deleted.stderr
    assert deleted.stdout == f"{spare}: delete_checkpoints done\n"
    assert uses() == {(needed, True)}
    fleet.start_worker("alpha", gpus=1, settings=f'image_dir = "{fleet.folder / "images"}"\n')
    fleet.cli("wake", "one")
    wait_learned(fleet, "one", 10)
