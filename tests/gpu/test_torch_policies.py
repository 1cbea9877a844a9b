"""The strategies with a PyTorch process, where a stand-in takes the place of PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from . import torch_policies
from .leftovers import MARK

STAND_IN = Path(__file__).with_name("stand_in")


def put_python(folder: Path) -> Path:
    """Writes a Python that has the stand-in, whatever a worker passes on of its environment."""
    folder.mkdir()
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{STAND_IN}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.long
@pytest.mark.usefixtures("on_host")
def test_a_process_is_suspended_and_woken_by_every_policy(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, f"{mark}/policies/")
    monkeypatch.setenv("PATH", str(put_python(tmp_path / "bin").parent), prepend=":")
    monkeypatch.setattr(torch_policies, "MIB", 16)
    python = torch_policies.python_with_torch()
    assert python is not None
    folder = tmp_path / "fleet"
    folder.mkdir()
    found = torch_policies.measure(python, folder)
    assert set(torch_policies.POLICIES) < found.keys()
    assert found["rounds"] > 2 * len(torch_policies.POLICIES)
