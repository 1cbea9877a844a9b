"""Fixtures: simulated hosts, and CUDA programs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leasehold_simgpu import SimulatedHost

from .freezers import Freezer, NoFreezerError
from .programs import Program, environment_of

MakeHost = Callable[..., SimulatedHost]
StartProgram = Callable[..., Program]


@pytest.fixture
def make_host(tmp_path: Path) -> MakeHost:
    """Makes simulated hosts, each in a directory of its own."""
    made: list[SimulatedHost] = []

    def make(**settings: Any) -> SimulatedHost:
        host = SimulatedHost.create(tmp_path / f"host-{len(made)}", **settings)
        made.append(host)
        return host

    return make


@pytest.fixture
def host(make_host: MakeHost) -> SimulatedHost:
    """A host of four H100."""
    return make_host(gpus=4, chip="H100", context_bytes=0)


@pytest.fixture
def start_program() -> Iterator[StartProgram]:
    """Starts programs on hosts, and ends them with the test."""
    started: list[Program] = []

    def start(host: SimulatedHost, **environment: str) -> Program:
        program = Program(environment_of(host.environment(), **environment))
        started.append(program)
        return program

    yield start
    for program in started:
        program.close()


@pytest.fixture
def controller(host: SimulatedHost, start_program: StartProgram) -> Program:
    """A program that has not called cuInit."""
    return start_program(host)


@pytest.fixture
def target(host: SimulatedHost, controller: Program, start_program: StartProgram) -> Program:
    """A program with a context on GPU 0."""
    program = start_program(host)
    program.set_up()
    return program


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    """A control group that freezes processes. Skips the test if this user can make none."""
    try:
        made = Freezer()
    except NoFreezerError as error:
        pytest.skip(str(error))
    yield made
    made.close()
