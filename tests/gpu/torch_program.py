"""A PyTorch program that keeps tensors on a GPU, and puts them into host memory when it is told.

It runs on the host's Python, with PyTorch and nothing of Leasehold. Each round it computes with its weights
on the GPU, compares the result with what it must be, and prints a count, as examples/counter.py does.

    torch_program.py serve FOLDER MIB           until SIGTERM
    torch_program.py tell FOLDER offload|load   has the program that serves there do so
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROUND_S = 0.05
TELL_S = 30.0
GPU = "GPU-of-PyTorch"
"""In the place of the UUID that counter.py prints: PyTorch does not tell it in all versions."""


def serve(folder: Path, mib: int) -> None:
    """Computes until SIGTERM."""
    import torch

    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    signal.signal(signal.SIGTERM, stop)
    size = mib * 2**20 // 4
    weights: Any = torch.arange(size, dtype=torch.float32, device="cuda") % 251
    expected = float(weights.sum(dtype=torch.float64).item())
    count = 0
    while not stopping:
        if (wanted := read(folder / "wanted")) != read(folder / "done"):
            if wanted == "offload":
                weights = weights.cpu()
                torch.cuda.empty_cache()
            else:
                weights = weights.to("cuda")
            write(folder / "done", wanted)
        if read(folder / "done") == "offload":
            time.sleep(ROUND_S)
            continue
        weights = (weights + 1) - 1
        found = float(weights.sum(dtype=torch.float64).item())
        if found != expected:
            print(f"count={count} gpu={GPU} corrupt: the sum is {found}, not {expected}", flush=True)
            sys.exit(1)
        print(f"count={count} gpu={GPU} ok", flush=True)
        count += 1
        time.sleep(ROUND_S)


def tell(folder: Path, word: str) -> None:
    """Has the program do something, and waits until it has."""
    write(folder / "wanted", word)
    deadline = time.monotonic() + TELL_S
    while read(folder / "done") != word:
        if time.monotonic() > deadline:
            sys.exit(f"the program did not {word} within {TELL_S:g} s")
        time.sleep(0.02)


def read(path: Path) -> str:
    """What is in a file. At first the weights are loaded."""
    return path.read_text() if path.exists() else "load"


def write(path: Path, text: str) -> None:
    """Replaces a file."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        tell(Path(sys.argv[2]), sys.argv[3])
