"""Each assumption of docs/driver.md has a probe, and the probes tell what is so from what is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from .assumptions import PROBES, answer
from .conftest import MEMORY_BYTES
from .stand import GIB, ContradictionError, Stand

ROOT = Path(__file__).resolve().parents[2]
NOT_TESTED = {7, 9, 11, 13, 14, 15, 17, 18}


def assumptions() -> list[int]:
    """The numbers of the list in docs/driver.md."""
    page = (ROOT / "docs/driver.md").read_text()
    section = page.partition("\n### What it assumes\n")[2].partition("\n### ")[0]
    return [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]


def probe(number: int, environment: dict[str, str]) -> dict[str, str]:
    """What a probe answers, in a process of its own as in a report."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.assumptions", str(number)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_assumption_has_a_probe() -> None:
    assert not set(assumptions()) - PROBES.keys()


def test_every_probe_names_its_assumption() -> None:
    assert [(one.__doc__ or "").partition(":")[0] for one in PROBES.values()] == list(map(str, PROBES))


def test_a_probe_needs_room_on_its_own_gpu_only(host: SimulatedHost, on_host: dict[str, str]) -> None:
    reserved_words = 10
    host.hog(1, MEMORY_BYTES)
    assert probe(reserved_words, on_host)["answer"] == "yes"
    host.hog(1, 0)
    host.hog(0, MEMORY_BYTES - GIB)
    found = probe(reserved_words, on_host)
    assert found["answer"] == "not tested"
    assert found["seen"].startswith("GPU 0 has"), found


@pytest.mark.long
@pytest.mark.parametrize("number", assumptions())
def test_the_simulated_driver_does_what_it_assumes(
    number: int, host: SimulatedHost, on_host: dict[str, str]
) -> None:
    if PROBES[number].__name__ == "calls_on_one_target":
        host.set_timing(Timing.typical())  # a checkpoint must take long enough to be asked about
    found = probe(number, on_host)
    assert found["answer"] == ("not tested" if number in NOT_TESTED else "yes"), found


def test_a_driver_that_ignores_the_map_is_a_no(host: SimulatedHost, on_host: dict[str, str]) -> None:
    host.set_fault("restore", ignore_gpu_pairs=True)
    found = probe(8, on_host)
    assert found["answer"] == "no", found


@pytest.mark.long
def test_a_driver_that_refuses_what_the_probe_needs_is_not_tested(
    host: SimulatedHost, on_host: dict[str, str]
) -> None:
    host.set_fault("checkpoint", error=801)
    assert probe(2, on_host) == {"answer": "not tested", "seen": "checkpoint answers 801"}


def test_a_contradiction_is_a_no() -> None:
    def contradicts(_: Stand) -> str:
        raise ContradictionError("seen")

    assert answer(contradicts) == {"answer": "no", "seen": "seen"}
