"""Trains a small network, and saves itself when its worker asks, so that being stopped loses nothing.

A network of two layers learns a function by stochastic gradient descent. Every step prints its number and its
loss. The batches come from a random generator whose state is part of the checkpoint, so the losses after a
stop and a restore, here or on another worker, are those of a run that was never stopped, to the last bit.

Needs NumPy and leasehold. With --gpu the weights are in the memory of a GPU, real or simulated, between the
steps; that needs cuda-bindings 13 or newer. Without Leasehold it trains as well, and is not saved.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from leasehold_client import kernel
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float64]]

INPUTS, HIDDEN, BATCH = 8, 32, 16
RATE = 0.05
NAMES = ("hidden", "hidden_bias", "output", "output_bias")


@dataclass(frozen=True)
class Checkpoint:
    """All that the next step depends on."""

    step: int
    weights: Weights
    random_state: Mapping[str, Any]


class NumpyCodec:
    """Checkpoints as NumPy's own files."""

    def encode(self, checkpoint: Checkpoint) -> bytes:
        """The checkpoint as an .npz file."""
        state = json.dumps(checkpoint.random_state)
        arrays: dict[str, Any] = {**checkpoint.weights, "step": checkpoint.step, "random_state": state}
        file = io.BytesIO()
        np.savez(file, **arrays)
        return file.getvalue()

    def decode(self, data: bytes) -> Checkpoint:
        """The checkpoint of an .npz file. Nothing in it is run."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            weights = {name: arrays[name] for name in NAMES}
            return Checkpoint(int(arrays["step"]), weights, json.loads(str(arrays["random_state"])))


class Training:
    """The loop, which can rest between two steps. It is its own kernel."""

    def __init__(self, seed: int) -> None:
        self.step = 0
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.weights: Weights = {
            "hidden": self.random.normal(0, 0.5, (INPUTS, HIDDEN)),
            "hidden_bias": np.zeros(HIDDEN),
            "output": self.random.normal(0, 0.5, (HIDDEN, 1)),
            "output_bias": np.zeros(1),
        }
        self._changed = threading.Condition()
        self._wanted_at_rest = False
        self._at_rest = False

    def learn(self) -> float:
        """Takes one step, and returns its loss."""
        inputs = self.random.normal(0, 1, (BATCH, INPUTS))
        wanted = np.sin(inputs.sum(axis=1, keepdims=True))
        weights = self.weights
        hidden = np.tanh(inputs @ weights["hidden"] + weights["hidden_bias"])
        error = hidden @ weights["output"] + weights["output_bias"] - wanted
        slope = 2 * error / BATCH
        hidden_slope = (slope @ weights["output"].T) * (1 - hidden**2)
        gradients = {
            "hidden": inputs.T @ hidden_slope,
            "hidden_bias": hidden_slope.sum(axis=0),
            "output": hidden.T @ slope,
            "output_bias": slope.sum(axis=0),
        }
        self.weights = {name: weights[name] - RATE * gradients[name] for name in NAMES}
        self.step += 1
        return float((error**2).mean())

    def rest_if_asked(self) -> None:
        """Between two steps: rests for as long as the worker wants that."""
        with self._changed:
            self._at_rest = self._wanted_at_rest
            self._changed.wait_for(lambda: not self._wanted_at_rest)
            self._at_rest = False

    def prepare(self) -> None:
        """The loop rests after the step that it is in."""
        with self._changed:
            self._wanted_at_rest = True

    def is_quiescent(self) -> bool:
        """Whether it rests."""
        with self._changed:
            return self._at_rest

    def cancel(self) -> None:
        """The loop goes on."""
        with self._changed:
            self._wanted_at_rest = False
            self._changed.notify_all()

    def can_checkpoint(self) -> tuple[bool, str]:
        """Whether the state can be saved, and otherwise why not."""
        return True, ""

    def checkpoint_size_estimate(self) -> int:
        """The weights, and some room for the rest."""
        return sum(array.nbytes for array in self.weights.values()) + 8192

    def checkpoint(self) -> Checkpoint:
        """All that the next step depends on."""
        return Checkpoint(self.step, self.weights, self.random.bit_generator.state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from there."""
        self.random.bit_generator.state = checkpoint.random_state
        self.step, self.weights = checkpoint.step, checkpoint.weights

    def health(self) -> kernel.Health:
        """Numbers that are none any more say that it has diverged."""
        finite = all(np.isfinite(array).all() for array in self.weights.values())
        return kernel.Health.HEALTHY if finite else kernel.Health.UNHEALTHY


class GpuMemory:
    """The weights in the memory of a GPU, between two steps."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        try:
            self._check(driver.cuInit(0))
        except RuntimeError:  # cuda-bindings found no driver library
            sys.exit("training: no CUDA driver here: try `leasehold simgpu exec --gpus 1 -- COMMAND`")
        device = self._check(driver.cuDeviceGet(0))
        self._check(driver.cuCtxSetCurrent(self._check(driver.cuDevicePrimaryCtxRetain(device))))
        self._buffers: dict[str, Any] = {}

    def put(self, weights: Weights) -> None:
        """Copies them there."""
        for name, array in weights.items():
            if name not in self._buffers:
                self._buffers[name] = self._check(self._driver.cuMemAlloc(array.nbytes))
            self._check(self._driver.cuMemcpyHtoD(self._buffers[name], array.tobytes(), array.nbytes))

    def get(self, weights: Weights) -> Weights:
        """Copies them back; what is given says only their shapes."""
        found: Weights = {}
        for name, array in weights.items():
            room = bytearray(array.nbytes)
            self._check(self._driver.cuMemcpyDtoH(room, self._buffers[name], array.nbytes))
            found[name] = np.frombuffer(room).reshape(array.shape)
        return found

    def _check(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if error != self._driver.CUresult.CUDA_SUCCESS:
            sys.exit(f"training: the driver answered {error.name}")
        return values[0] if values else None


def parse_interval(text: str) -> float:
    """Parses seconds between 0 and a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds from 0 to 86400, such as 0.1")
    return seconds


def parse_seed(text: str) -> int:
    """Parses a whole number from 0 on."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: write a whole number from 0 on")
    return int(text)


def main() -> None:
    """Trains to the last step, from the first or from where it was stopped."""
    parser = argparse.ArgumentParser(description="Train a small network that Leasehold can stop and move.")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="last step")
    parser.add_argument(
        "--interval-s", type=parse_interval, default=0.01, metavar="S", help="time between two steps"
    )
    parser.add_argument("--seed", type=parse_seed, default=1, metavar="N", help="seed of everything random")
    parser.add_argument("--gpu", action="store_true", help="keep the weights in GPU memory")
    options = parser.parse_args()

    training = Training(options.seed)
    facts = kernel.KernelFacts(
        kernel_id=f"training-{options.seed}",
        kind="numpy-mlp",
        version=1,
        codec=NumpyCodec(),
        describe=lambda checkpoint: {"step": str(checkpoint.step)},
    )
    with kernel.serve(training, facts, required=False) as served:
        if served.restored_checkpoint_id:
            print(f"goes on after step={training.step}", flush=True)
        memory = GpuMemory() if options.gpu else None
        pause = threading.Event()
        while training.step < options.steps:
            if memory is not None:
                memory.put(training.weights)
            pause.wait(options.interval_s)
            training.rest_if_asked()
            if memory is not None:
                training.weights = memory.get(training.weights)
            print(f"step={training.step + 1} loss={training.learn()!r}", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
