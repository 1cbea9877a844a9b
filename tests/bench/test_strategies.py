"""bench/strategies.py at its smallest: it measures, and says what it measured."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def test_without_a_gpu_the_part_of_real_ones_says_why_it_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    strategies = importlib.import_module("bench.strategies")
    monkeypatch.setattr(sys, "argv", ["strategies", "--gpu", "real"])
    if not (why := strategies.why_no_gpu()):
        pytest.skip("there is a GPU")
    strategies.main()
    assert json.loads(capsys.readouterr().out) == {"benchmark": "strategies", "not_measured": why}
    monkeypatch.setattr(strategies, "python_with_torch", lambda: None)
    assert "no PyTorch that sees a GPU" in strategies.torch_cells()["not_measured"]


@pytest.mark.long
def test_a_policy_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT)  # as `python -m bench.strategies` has it
    strategies = importlib.import_module("bench.strategies")
    # Half a GiB tells the disk's speed well, and takes seconds.
    monkeypatch.setattr(strategies, "disk_gb_per_s", partial(strategies.disk_gb_per_s, size=16 * MIB))
    size = strategies.CONTEXT_BYTES + 16 * MIB
    options = ["--size", f"{size}B", "--only", "offload+cuda_suspend"]
    monkeypatch.setattr(sys, "argv", ["strategies", *options])
    strategies.main()
    found = json.loads(capsys.readouterr().out)
    (cell,) = found["cells"]
    assert cell["policy"] == "offload+cuda_suspend"
    assert (found["size_bytes"], cell["device_bytes_before"], cell["device_bytes_left"]) == (size, size, 0)
    assert (cell["host_bytes"], cell["disk_bytes"]) == (size, 0)
    assert set(cell["down"]["phases_s"]) == {"preflight", "hooks", "lock", "checkpoint", "verify"}
    assert found["machine"]["disk_write_gb_per_s"] > 0
