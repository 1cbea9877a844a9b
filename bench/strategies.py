"""Measures suspend and restore of one model server by each policy: seconds, and the places of its bytes.

A real coordinator and a real worker suspend and restore `tests/integration/model_server.py` by every policy
of the table. The server has weights and a KV cache in device memory, and vLLM's routes for the hook `vllm`.
Prints one JSON document.

Only the GPU is simulated. Device memory is the program's own memory, filled and resident, so an image of the
processes really contains it. The simulated driver's checkpoint and restore take the reported times of real
drivers (0.4 s and 2 GB/s out, 0.5 s and 4 GB/s in), and also copy the bytes by way of files, which takes most
of the time. The CUDA context's half a GiB is only counted. Sleep level 1 copies memory to memory, where a
real server copies over PCIe. Level 2 generates the weights, where a real server reads them from disk. The
checkout's CRIU and the images use this machine's disk.

With `--gpu real` nothing is simulated: the same server uses this machine's first GPU. If a Python of the
machine has PyTorch, a PyTorch program is suspended by the policies that its hooks support. Missing parts are
reported as `not_measured`, with the reason. This part has not been run on a GPU yet.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from leasehold.v1.command_pb2 import Command, CommandState
from leasehold_simgpu import Timing
from leasehold_worker.gpus.inventory import Inventory

from bench.machine import machine
from tests.gpu.torch_policies import PYTHONS, python_with_torch
from tests.gpu.torch_policies import measure as measure_torch
from tests.integration.fleets import Fleet, make_fleet
from tests.integration.model_server import parse_size
from tests.integration.models import CONTEXT_BYTES, WORKER, Model, reason
from tests.integration.tensors import expected_checksum
from tests.worker.criu_cases import criu_setting

GIB: Final = 2**30
WEIGHTS: Final = ("retain", "offload", "discard")
PROCESSES: Final = ("keep_running", "cuda_suspend", "checkpoint", "stop")
WEIGHTS_SHARE: Final = 0.8
"""Share of the weights in the memory without the context. The rest is the KV cache."""

START_TIMEOUT_S: Final = 300.0

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class BenchmarkError(Exception):
    """A measured operation failed."""


def disk_gb_per_s(folder: Path, size: int = 512 * 2**20) -> float:
    """The rate of writing a file, with an fsync at its end."""
    piece = os.urandom(2**20) * 16
    path = folder / "probe"
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    taken_s = time.perf_counter() - began
    path.unlink()
    return size / taken_s / 1e9


def resident_bytes(pid: int) -> int:
    """Resident host memory of a process. 0: the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except FileNotFoundError:
        return 0


def done(command: Command, what: str) -> Command:
    """Returns the command. Fails unless it succeeded."""
    if command.state != CommandState.COMMAND_STATE_SUCCEEDED:
        raise BenchmarkError(f"{what}: {reason(command)}, {command.error.message}")
    return command


def timed(action: Callable[[], Command], what: str) -> dict[str, Any]:
    """How long a command took for the client, and its phases on the worker."""
    began = time.perf_counter()
    result = done(action(), what).result
    asked_s = time.perf_counter() - began
    phases: dict[str, float] = {}
    for phase in result.phases:
        phases[phase.phase] = phases.get(phase.phase, 0) + phase.duration.ToNanoseconds() / 1e9
    return {
        "seconds": round(asked_s, 3),
        "phases_s": {name: round(taken_s, 3) for name, taken_s in phases.items()},
        "warnings": list(result.warnings),
    }


def measure(model: Model, policy: str, checksum: int) -> dict[str, Any]:
    """Suspends and restores by one policy."""
    full_bytes, rss_bytes = model.device_bytes(), resident_bytes(model.workload.status.root_pid)
    down = timed(lambda: model.suspend(policy, force=True), f"suspend by {policy}")
    status = model.workload.status
    found: dict[str, Any] = {
        "policy": policy,
        "down": down,
        "device_bytes_before": full_bytes,
        "device_bytes_left": model.device_bytes(),
        "host_bytes": status.parked_bytes,
        "disk_bytes": status.disk_bytes,
        "process_rss_bytes_before": rss_bytes,
        "process_rss_bytes": resident_bytes(status.root_pid),
    }
    found["up"] = timed(model.wake, f"wake from {policy}")
    began = time.perf_counter()
    model.wait_served()
    found["up"]["until_it_answers_s"] = round(time.perf_counter() - began, 3)
    if model.state()["checksum"] != checksum:
        raise BenchmarkError(f"its weights are not what they were, after {policy}")
    return found


class RealModel(Model):
    """A model server on a GPU of this machine."""

    def device_bytes(self) -> int:
        """Its memory in NVML. A process whose memory NVML does not report can't be measured."""
        pid = self.workload.status.root_pid
        sizes = [gpu.processes[pid] for gpu in Inventory().usage().values() if pid in gpu.processes]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise BenchmarkError("NVML reports no memory of processes here")
        return sum(known)


def why_no_gpu() -> str:
    """Why nothing can be measured on a GPU of this machine. Empty: measurements are possible."""
    inventory = Inventory()
    return inventory.unavailable_reason or ("" if inventory.gpus else "NVML lists no GPU")


def start_real_worker(fleet: Fleet) -> None:
    """Starts a worker for the GPUs of this machine."""
    options = [
        "--coordinator",
        fleet.worker_address,
        "--state-dir",
        str(fleet.folder / WORKER),
        "--name",
        WORKER,
    ]
    fleet._start(WORKER, "worker", *options, "--stop-workloads", "stop", environment=dict(os.environ))
    fleet.wait(lambda: fleet.worker_state(WORKER) == "WORKER_STATE_CONNECTED")


def torch_cells() -> dict[str, Any]:
    """The policies with a PyTorch program, or the reason why they can't be measured."""
    python = python_with_torch()
    if python is None:
        return {"not_measured": f"no PyTorch that sees a GPU in any of {', '.join(PYTHONS)}"}
    with tempfile.TemporaryDirectory() as folder:
        return measure_torch(python, Path(folder))


LEAST_MODEL_BYTES: Final = 16 * 2**20


def measure_all(fleet: Fleet, size: int, only: str, *, real: bool) -> dict[str, Any]:
    """Every policy in turn on one server. Policies with `stop` use a server that saves its own state."""
    if real:
        start_real_worker(fleet)
    else:
        fleet.start_worker(WORKER, gpus=2, settings=criu_setting())
        fleet.hosts[WORKER].set_timing(Timing.typical())
    (worker,) = fleet.client.workers()
    images = next(each for each in worker.capabilities if each.name == "checkpoint_image")
    weights_bytes = round((size - CONTEXT_BYTES) * WEIGHTS_SHARE) // 2**20 * 2**20
    cache_bytes = size - CONTEXT_BYTES - weights_bytes
    checksum = expected_checksum(weights_bytes)
    cells: list[dict[str, Any]] = []
    for kernel in (False, True):
        model = (RealModel if real else Model)(
            fleet,
            "saver" if kernel else "chat",
            kernel=kernel,
            weights_bytes=weights_bytes,
            cache_bytes=cache_bytes,
        )
        model.start(timeout="300s", wait_s=START_TIMEOUT_S)
        for weights in WEIGHTS:
            for process in PROCESSES:
                policy = f"{weights}+{process}"
                if (process == "stop") != kernel or only not in policy:
                    continue
                if process == "checkpoint" and not images.available:
                    cells.append({"policy": policy, "not_measured": images.reason})
                    continue
                cells.append(measure(model, policy, checksum))
                print(f"strategies: {policy} is measured", file=sys.stderr)
        done(fleet.client.wait(fleet.client.stop(model.name, grace_s=60)), "stop")
    return {"weights_bytes": weights_bytes, "cache_bytes": cache_bytes, "cells": cells}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=8 * GIB, help="device memory in all (8GiB)")
    parser.add_argument("--only", default="", help="only policies whose name contains this text")
    parser.add_argument(
        "--gpu",
        choices=("simulated", "real"),
        default="simulated",
        help="a simulated GPU, or this machine's first GPU",
    )
    options = parser.parse_args()
    if options.size < (least := CONTEXT_BYTES + LEAST_MODEL_BYTES):
        parser.error(f"--size has a CUDA context of {CONTEXT_BYTES} B in it: give {least} B at least")
    real = options.gpu == "real"
    if real and (reason_not := why_no_gpu()):
        sys.stdout.write(json.dumps({"benchmark": "strategies", "not_measured": reason_not}, indent=2) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder, make_fleet(Path(folder)) as fleet:
        found: dict[str, Any] = {
            "benchmark": "strategies",
            "machine": {
                **machine("cuda-bindings"),
                "disk_write_gb_per_s": round(disk_gb_per_s(Path(folder)), 2),
            },
            "size_bytes": options.size,
            "context_bytes": CONTEXT_BYTES,
            "simulated": "nothing"
            if real
            else "the GPU and the time of its driver's copies (Timing.typical); see the docstring",
        }
        try:
            found |= measure_all(fleet, options.size, options.only, real=real)
        except BenchmarkError as error:
            sys.exit(f"strategies: {error}")
    if real:
        found["torch"] = torch_cells()
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
