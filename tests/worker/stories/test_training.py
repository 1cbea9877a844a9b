"""examples/training.py: on a GPU, and saved in between, it has the same losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from leasehold_simgpu import SimulatedHost
from leasehold_worker.applications.checkpointing import save

from tests.worker.kernel_host import ServingProgram, open_served

TRAINING = Path(__file__).resolve().parents[3] / "examples/training.py"
STEPS = 60
_STEP = re.compile(r"step=(\d+) loss=(\S+)")


def command(*options: str, steps: int = STEPS) -> list[str]:
    return [sys.executable, str(TRAINING), f"--steps={steps}", *options]


def losses(said: list[str]) -> dict[int, str]:
    """The losses by step, as printed; none twice."""
    found = [match.groups() for line in said if (match := _STEP.fullmatch(line))]
    assert len({step for step, _ in found}) == len(found)
    return {int(step): loss for step, loss in found}


async def ended(application: ServingProgram) -> dict[int, str]:
    with trio.fail_after(40):
        code = await trio.to_thread.run_sync(application.process.wait, abandon_on_cancel=True)
    assert code == 0, application.said()
    return losses(application.said())


def by_exec(*program: str) -> list[str]:
    return [sys.executable, "-m", "leasehold_client", "exec", "--gpus=0", "--", *program]


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """The losses of a run that nobody stops, without Leasehold."""
    done = subprocess.run(command("--interval-s=0"), capture_output=True, text=True, timeout=60, check=True)
    found = losses(done.stdout.splitlines())
    assert list(found) == list(range(1, STEPS + 1))
    return found


def test_it_learns_the_same_on_a_gpu(host: SimulatedHost, undisturbed: dict[int, str]) -> None:
    program = command("--interval-s=0", "--gpu")
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert losses(done.stdout.splitlines()) == undisturbed


@pytest.mark.long
async def test_saving_in_between_changes_nothing(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    async with open_served(tmp_path) as served:
        application = served.start_command(*by_exec(*command("--interval-s=0.02")))
        await application.wait_line("step=5 ")
        (workload,) = served.parts.workloads.all()
        kernel = await served.applications.wait_served(workload.workload_id, 10)
        for _ in range(3):
            await save(kernel, served.store, resume=True)
        assert served.store.keep_last(workload.workload_id, 2) != []
        assert len(served.store.scan(workload.workload_id)) == 2
        assert await ended(application) == undisturbed
