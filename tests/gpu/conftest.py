"""Fixtures: simulated hosts for the report, and a mark by which what a test leaves is found."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from .bootstrap import SIMULATED_MEMORY, report_environment
from .leftovers import MARK, end_marked

MEMORY_BYTES = int(SIMULATED_MEMORY.removesuffix("GiB")) * 2**30


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark of a report. What still has it after a test is ended, and fails the test."""
    made = uuid.uuid4().hex
    monkeypatch.setenv(MARK, made)
    yield made
    assert end_marked(made + "/") == []


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    """A host as `gpu_report --simgpu 2` has it, whose driver takes no time."""
    return SimulatedHost.create(
        tmp_path / "host", gpus=2, chip="H100", memory_bytes=MEMORY_BYTES, timing=Timing.instant()
    )


@pytest.fixture
def on_host(
    host: SimulatedHost, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The environment of a report on the host, which this process has too."""
    environment = {**report_environment(tmp_path, mark), **host.environment()}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment
