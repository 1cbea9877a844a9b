"""What a PyTorch process may hold, where a stand-in takes the place of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost

from tests.simgpu.programs import LOCKED

from . import torch_contents
from .leftovers import MARK
from .test_torch_policies import put_python
from .torch_contents import RESTORED, is_expected, results


@pytest.fixture
def python(on_host: dict[str, str], mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python with the stand-in."""
    monkeypatch.setenv(MARK, f"{mark}/contents/")
    return str(put_python(tmp_path / "bin"))


@pytest.mark.long
def test_a_process_with_a_tensor_is_restored(python: str) -> None:
    assert dict(results(python, ["tensor"])) == {"tensor": RESTORED}


@pytest.mark.long
def test_what_can_not_be_set_up_is_not_tested(python: str) -> None:
    found = dict(results(python, ["CUDA graph", "tensor"]))
    assert found == {"CUDA graph": "not tested: the program does not start", "tensor": RESTORED}
    assert is_expected("CUDA graph", found["CUDA graph"])


@pytest.mark.long
def test_a_refused_checkpoint_is_told_and_not_expected(python: str, host: SimulatedHost) -> None:
    host.set_fault("checkpoint", error=801)
    found = dict(results(python, ["tensor"]))
    assert found == {"tensor": "checkpoint answers 801, state 1, works then"}
    assert not is_expected("tensor", found["tensor"])


@pytest.mark.long
def test_a_wrong_byte_after_a_restore_is_told(python: str, host: SimulatedHost) -> None:
    host.set_fault("restore", state=LOCKED, skip=True)
    assert dict(results(python, ["tensor"])) == {"tensor": "does not work after its restore"}


def test_no_program_is_started_when_no_time_is_left(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_contents, "BUDGET_S", 0.0)
    assert dict(results(python, ["tensor"])) == {"tensor": "not tested: no time"}


def test_a_profiler_is_refused_at_the_lock() -> None:
    assert is_expected("attached profiler", "lock answers 801, state 0, works then")
    assert not is_expected("attached profiler", RESTORED)
