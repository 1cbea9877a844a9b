"""Each assumption of docs/driver.md has a probe, and the probes tell what is so from what is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from tests.simgpu.control_groups import ControlGroup, Controller, NoControlGroupError

from .assumptions import PROBES, answer
from .bootstrap import report_environment
from .conftest import MEMORY_BYTES
from .stand import GIB, ContradictionError, Stand
from .test_torch_policies import put_python

ROOT = Path(__file__).resolve().parents[2]
NOT_TESTED = {9, 11, 13, 14, 15, 17, 24}
NEED_ROOT = {20}
NEED_CONTROL_GROUPS: dict[int, Controller] = {18: "memory", 21: "freezer"}
LONG_COPIES = {6, 7}
"""A copy must take so long that it can be asked about or killed."""


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


@pytest.mark.long
def test_a_probe_needs_room_on_its_own_gpu_only(host: SimulatedHost, on_host: dict[str, str]) -> None:
    arguments_and_masks = 10
    host.hog(1, MEMORY_BYTES)
    assert probe(arguments_and_masks, on_host)["answer"] == "yes"
    host.hog(1, 0)
    host.hog(0, MEMORY_BYTES - GIB)
    found = probe(arguments_and_masks, on_host)
    assert found["answer"] == "not tested"
    assert found["seen"].startswith("GPU 0 has"), found


def can_be_tested(number: int) -> bool:
    """Whether a probe can be carried out here, on a simulated host."""
    if number in NEED_CONTROL_GROUPS:
        try:
            ControlGroup(NEED_CONTROL_GROUPS[number]).close()
        except NoControlGroupError:
            return False
    return number not in NOT_TESTED and (number not in NEED_ROOT or os.geteuid() == 0)


@pytest.mark.long
@pytest.mark.parametrize("number", PROBES)
def test_the_simulated_driver_does_what_it_assumes(
    number: int, host: SimulatedHost, on_host: dict[str, str], tmp_path: Path
) -> None:
    if number in LONG_COPIES:
        host.set_timing(Timing.typical())
    path = f"{put_python(tmp_path / 'bin').parent}:{on_host['PATH']}"  # with the stand-in for PyTorch
    found = probe(number, {**on_host, "PATH": path})
    assert found["answer"] == ("yes" if can_be_tested(number) else "not tested"), found


@pytest.mark.long
def test_on_one_gpu_maps_are_tested_without_a_move(tmp_path: Path, mark: str) -> None:
    host = SimulatedHost.create(tmp_path / "one", gpus=1, memory_bytes=MEMORY_BYTES)
    found = probe(2, {**report_environment(tmp_path, mark), **host.environment()})
    assert found["answer"] == "yes"
    assert found["seen"].endswith("not moved: it needs 2 GPUs, and this host has 1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "call", "fault", "seen"),
    [
        (7, "checkpoint", {"skip": True, "delay_s": 1.0, "after": 1}, "whose caller was killed"),
        (20, "get_state", {"error": 304}, "a query of the caller about itself answers 304"),
        (22, "lock", {"skip": True}, "a lock with a profiler: 0 was seen"),
        (23, "restore", {"error": 1}, "a restore without memory: 1 was seen"),
    ],
)
def test_another_answer_of_the_driver_is_no_yes(
    number: int,
    call: str,
    fault: dict[str, Any],
    seen: str,
    host: SimulatedHost,
    on_host: dict[str, str],
    tmp_path: Path,
) -> None:
    if number in LONG_COPIES:
        host.set_timing(Timing.typical())
    host.set_fault(call, **fault)
    path = f"{put_python(tmp_path / 'bin').parent}:{on_host['PATH']}"
    found = probe(number, {**on_host, "PATH": path})
    assert found["answer"] != "yes", found
    assert seen in found["seen"], found


@pytest.mark.long
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
