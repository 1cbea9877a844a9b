"""The program that the fault suite suspends and moves: it counts, tells, and ends as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost

from .member import PROGRAM, Members

Start = Callable[..., tuple[subprocess.Popen[bytes], Members]]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100")


@pytest.fixture
def start(host: SimulatedHost, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start_members(*arguments: str, **environment: str) -> tuple[subprocess.Popen[bytes], Members]:
        path = tmp_path / f"members{len(started)}"
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--file", str(path), *arguments],
            env={**os.environ, **host.environment(), **environment},
        )
        started.append(process)
        return process, Members(path)

    yield start_members
    for process in started:
        process.kill()
        process.wait(timeout=30)


def test_every_member_is_a_cuda_process_on_the_next_gpu(host: SimulatedHost, start: Start) -> None:
    process, members = start("--members", "3", CUDA_VISIBLE_DEVICES="2,3")
    members.wait_ready()
    assert members.pids[0] == process.pid
    assert len(members) == len({*members.pids}) == 3
    members.all_progress()
    places = [host.process(pid) for pid in members.pids]
    assert [list(place.gpu_bytes) for place in places if place] == [
        [host.gpus[2].uuid],
        [host.gpus[3].uuid],
        [host.gpus[2].uuid],
    ]
    assert [members.error(member) for member in range(3)] == [0, 0, 0]


def test_a_member_may_have_several_gpus(host: SimulatedHost, start: Start) -> None:
    _, members = start("--members", "2", "--gpus-per-member", "2", "--bytes", "1000")
    members.wait_ready()
    places = [host.process(pid) for pid in members.pids]
    assert [{*place.gpu_bytes} for place in places if place] == [
        {host.gpus[0].uuid, host.gpus[1].uuid},
        {host.gpus[2].uuid, host.gpus[3].uuid},
    ]


def test_an_error_is_told_and_the_round_tried_again(host: SimulatedHost, start: Start) -> None:
    _, members = start()
    members.wait_ready()
    fault = host.set_fault("cuMemcpyDtoH", members.pids[0], error=999)
    with pytest.raises(AssertionError, match=r"stood still .* error 999"):
        members.all_progress(timeout=0.2)
    host.clear_faults(fault_id=fault.id)
    members.all_progress()
    assert not members.corrupt(0)


def test_damaged_memory_is_seen(host: SimulatedHost, start: Start) -> None:
    _, members = start()
    members.wait_ready()
    with (host.directory / "memory" / "0-1").open("r+b") as memory:  # the only process on GPU 0
        memory.seek(20)  # behind the header, which every round writes anew
        memory.write(b"\xff")
    with pytest.raises(AssertionError, match="corrupt"):
        members.all_progress()
    assert members.corrupt(0)


def test_the_others_end_with_the_first(host: SimulatedHost, start: Start) -> None:
    process, members = start("--members", "4")
    members.wait_ready()
    process.terminate()
    assert process.wait(timeout=30) == 0
    end = time.monotonic() + 30
    while host.processes():
        assert time.monotonic() < end, host.processes()
        time.sleep(0.01)
