"""Costs of suspend, restore and remap beyond the driver's calls, and of a group beyond its slowest member.

"Ours" are commands as a worker carries them out, in this process, with driver helpers, verification by NVML,
leases and the journal on disk. "Raw" are the same calls of the checkpoint API on the same process, made one
after the other through cuda.bindings. Both are timed in turn, round by round. Prints one JSON document.

A group is compared with its slowest member alone, and with parallel raw calls on all its members: simulated
GPUs copy by the CPU, which their members share.

Without options it measures on two simulated hosts. The driver of the first takes no time, so all time is the
worker's own. That of the second has the reported times of real drivers. With --gpu it measures on this
machine's GPUs.
"""

import argparse
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import trio
from cuda.bindings import driver  # noqa: TID251 - the raw calls that ours are compared with
from leasehold.v1 import command_pb2, gpu_pb2, operation_pb2, workload_pb2
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.commands.journal_file import keep_workload
from leasehold_worker.commands.journal_records import workload_record
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import boot_id, memory_bytes, send_signal
from leasehold_worker.leasing.suspend_memory import DEFAULT_RESERVE_BYTES
from leasehold_worker.workloads.messages import workload_message
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import RUNNING
from leasehold_worker.workloads.workload import Workload

MEMBERS: Final = Path(__file__).with_name("cuda_members.py")
MIB: Final = 2**20
GIB: Final = 2**30
GROUP: Final = 8
REMAP_CUDA_VERSION: Final = 13000
WARM_UP_ROUNDS: Final = 2
SIZE_ROUNDS: Final = 3
CONTEXT_BYTES: Final = GIB
"""Memory for a context, in addition to the buffer."""
LOCK_TIMEOUT_MS: Final = 10_000
START_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 10.0

SIMULATED: Final = {"instant": Timing.instant(), "typical": Timing.typical()}
GOALS: Final = {"suspend_added_ms": 10, "remap_added_ms": 15, "group_ratio": 1.1}

Samples = dict[str, list[float]]


class BenchmarkError(Exception):
    """A measured operation failed."""


# --- Ours


@dataclass(frozen=True, slots=True)
class Worker:
    """The parts of a worker that carry out commands."""

    inventory: Inventory
    workloads: Workloads
    commands: Commands

    async def carry_out(self, workload_id: str, operation: operation_pb2.Operation) -> None:
        """Carries out one command, until its outcome is on disk."""
        outcome = await self.commands.carry_out(workload_id, operation)
        if outcome.state != command_pb2.COMMAND_STATE_SUCCEEDED:
            raise BenchmarkError(f"{operation.WhichOneof('kind')}: {outcome.error.message}")

    async def start(self, name: str, gpu_count: int, members: int, size: int) -> Workload:
        """Runs members of a benchmark, and waits until all hold their memory."""
        spec = workload_pb2.WorkloadSpec(
            arguments=[sys.executable, str(MEMBERS), "--members", str(members), "--bytes", str(size)],
            resources=workload_pb2.Resources(gpu_count=gpu_count),
        )
        run = operation_pb2.RunOperation(name=name, spec=spec)
        await self.carry_out(name, operation_pb2.Operation(run=run))
        workload = self.workloads.get(name)
        with trio.fail_after(START_TIMEOUT_S):
            while workload.output_path.read_text().count("ready") < members:
                if workload.ended.is_set():
                    raise BenchmarkError(f"the workload did not start: {workload.output_path.read_text()}")
                await trio.sleep(0.02)
        return workload

    async def suspend(self, workload: Workload) -> None:
        """Suspends a workload."""
        suspend = operation_pb2.SuspendOperation()
        await self.carry_out(workload.workload_id, operation_pb2.Operation(suspend=suspend))

    async def restore(self, workload: Workload) -> None:
        """Restores a workload on its previous GPUs."""
        restore = operation_pb2.RestoreOperation()
        await self.carry_out(workload.workload_id, operation_pb2.Operation(restore=restore))

    async def remap(self, workload: Workload, old: str, new: str) -> None:
        """Moves a workload from one GPU to another."""
        pairs = [gpu_pb2.GpuPair(old_uuid=old, new_uuid=new)]
        move = operation_pb2.Move(workload_id=workload.workload_id, pairs=pairs)
        remap = operation_pb2.RemapOperation(moves=[move])
        await self.carry_out(workload.workload_id, operation_pb2.Operation(remap=remap))

    async def stop(self, workload: Workload) -> None:
        """Ends a workload, which must still be running."""
        if workload.state != RUNNING or workload.ended.is_set():
            raise BenchmarkError(f"the workload is not running any more: {workload.output_path.read_text()}")
        send_signal(workload.root, signal.SIGTERM)
        await workload.ended.wait()


@asynccontextmanager
async def open_worker(folder: Path) -> AsyncIterator[Worker]:
    """Builds the worker's parts as its agent does, without a coordinator."""
    this_boot = boot_id()

    def keep(workload: Workload) -> None:
        statements = keep_workload(workload_record(workload, this_boot))
        journal.put(("workloads", workload.workload_id), statements)

    def told(workload_ids: Iterable[str]) -> list[workload_pb2.Workload]:
        known = (workload_id for workload_id in workload_ids if workload_id in parts.workloads)
        return [workload_message(parts.workloads.get(workload_id), "benchmark") for workload_id in known]

    async with (
        open_journal(folder / "journal.db") as journal,
        open_parts(WorkerConfig(), folder / "workloads", keep, written=journal.wait_written) as parts,
    ):
        if parts.driver.unavailable_reason is not None:
            raise BenchmarkError(f"no usable CUDA driver: {parts.driver.unavailable_reason}")
        try:
            carry_out = parts.operations.perform
            driver_version = parts.inventory.versions.driver_version
            commands = Commands(carry_out, journal, told, driver_version, parts.nursery, lambda _: None)
            yield Worker(parts.inventory, parts.workloads, commands)
        finally:
            # Not SIGKILL: a process that was restored may run, whose kill was seen to hang a host
            # (NVIDIA/cuda-checkpoint issue 53). The programs of this benchmark end of SIGTERM.
            for workload in parts.workloads.all():
                send_signal(workload.root, signal.SIGTERM)
            with trio.move_on_after(END_TIMEOUT_S, shield=True):
                for workload in parts.workloads.all():
                    await workload.ended.wait()
            for workload in parts.workloads.all():
                if workload.state != RUNNING:
                    send_signal(workload.root, signal.SIGKILL)  # only SIGKILL ends a suspended process


# --- Raw


class GpuPairs:
    """The arguments of a restore on other GPUs. Made before the timing starts."""

    def __init__(self, gpu_uuids: Sequence[str], old: str, new: str) -> None:
        swapped = {old: new, new: old}
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []  # a CUuuid made from an address aliases it
        pairs = []
        for gpu_uuid in gpu_uuids:
            pair = driver.CUcheckpointGpuPair()
            pair.oldUuid = self._uuid(gpu_uuid)
            pair.newUuid = self._uuid(swapped.get(gpu_uuid, gpu_uuid))
            pairs.append(pair)
        self.arguments = driver.CUcheckpointRestoreArgs()
        self.arguments.gpuPairs = pairs
        self.arguments.gpuPairsCount = len(pairs)

    def _uuid(self, text: str) -> Any:
        self._buffers.append(ctypes.create_string_buffer(uuid.UUID(text.removeprefix("GPU-")).bytes, 16))
        return driver.CUuuid(ctypes.addressof(self._buffers[-1]))


def raw_call(name: str, *arguments: Any) -> float:
    """Makes one driver call and returns its milliseconds."""
    began = time.perf_counter()
    try:
        error, *_ = getattr(driver, name)(*arguments)
    except RuntimeError as missing:
        raise BenchmarkError(f"{name}: {missing}") from missing
    if int(error) != 0:
        raise BenchmarkError(f"{name}: the driver answered {error.name}")
    return (time.perf_counter() - began) * 1000


def raw_suspend(pid: int) -> tuple[float, float]:
    """Milliseconds of lock and checkpoint, and of the checkpoint alone."""
    arguments = driver.CUcheckpointLockArgs()
    arguments.timeoutMs = LOCK_TIMEOUT_MS
    lock_ms = raw_call("cuCheckpointProcessLock", pid, arguments)
    checkpoint_ms = raw_call("cuCheckpointProcessCheckpoint", pid, None)
    return lock_ms + checkpoint_ms, checkpoint_ms


def raw_restore(pid: int, pairs: GpuPairs | None = None) -> tuple[float, float]:
    """Milliseconds of restore and unlock, and of the restore alone."""
    restore_ms = raw_call("cuCheckpointProcessRestore", pid, pairs.arguments if pairs else None)
    unlock_ms = raw_call("cuCheckpointProcessUnlock", pid, None)
    return restore_ms + unlock_ms, restore_ms


async def raw_at_once(call: Callable[[int], object], pids: Iterable[int]) -> None:
    """Makes the same raw calls on many processes in parallel, each in a thread of its own."""
    async with trio.open_nursery() as nursery:
        for pid in pids:
            nursery.start_soon(trio.to_thread.run_sync, call, pid)


def raw_remap(pid: int, pairs: GpuPairs) -> float:
    """Milliseconds of all four calls."""
    return raw_suspend(pid)[0] + raw_restore(pid, pairs)[0]


# --- Measuring


async def timed_ms(action: Callable[[], Awaitable[None]]) -> float:
    """Milliseconds of one of our operations."""
    began = time.perf_counter()
    await action()
    return (time.perf_counter() - began) * 1000


def figures(samples_ms: Sequence[float]) -> dict[str, float]:
    """The reported figures of samples."""
    return {"p50_ms": round(statistics.median(samples_ms), 3), "max_ms": round(max(samples_ms), 3)}


def ratio(samples_ms: Sequence[float], base_ms: Sequence[float]) -> float:
    """The ratio of the medians."""
    return round(statistics.median(samples_ms) / statistics.median(base_ms), 2)


def added(ours_ms: Sequence[float], raw_ms: Sequence[float]) -> dict[str, object]:
    """The figures of ours and of raw, with their ratio."""
    difference = statistics.median(ours_ms) - statistics.median(raw_ms)
    return {"ours": figures(ours_ms), "raw": figures(raw_ms), "added_p50_ms": round(difference, 3)}


async def measure_single(worker: Worker, rounds: int, size: int) -> dict[str, object]:
    """One process: suspend and restore on its GPU, and remap to another GPU and back."""
    workload = await worker.start("single", 1, 1, size)
    pid = workload.root.pid
    gpu_uuids = list(worker.inventory.chips)
    here = workload.lease.gpu_uuids[0] if workload.lease else ""
    there = another_gpu(worker.inventory, here)
    ours: Samples = {"suspend": [], "restore": [], "remap": []}
    raw: Samples = {"suspend": [], "restore": [], "remap": []}
    for _ in range(WARM_UP_ROUNDS + rounds):
        raw["suspend"].append(raw_suspend(pid)[0])
        raw["restore"].append(raw_restore(pid)[0])
        ours["suspend"].append(await timed_ms(partial(worker.suspend, workload)))
        ours["restore"].append(await timed_ms(partial(worker.restore, workload)))
        if there is None:
            continue
        away = GpuPairs(gpu_uuids, here, there)
        raw["remap"] += [raw_remap(pid, away), raw_remap(pid, away)]  # the same swap moves the process back
        ours["remap"].append(await timed_ms(partial(worker.remap, workload, here, there)))
        ours["remap"].append(await timed_ms(partial(worker.remap, workload, there, here)))
    await worker.stop(workload)
    found: dict[str, object] = {"rounds": rounds, "bytes": size}
    for name in ours:
        warm_up = WARM_UP_ROUNDS * (2 if name == "remap" else 1)
        if ours[name]:
            found[name] = added(ours[name][warm_up:], raw[name][warm_up:])
    return found


async def measure_group(worker: Worker, rounds: int, size: int) -> dict[str, object]:
    """Many processes as one group, compared with parallel raw calls on all, and with raw calls on each alone.

    With a driver that takes no time, the ratio is meaningless.
    """
    gpu_count = min(GROUP, len(worker.inventory.gpus))
    workload = await worker.start("group", gpu_count, GROUP, size)
    pids = [identity.pid for identity in process_tree(workload.root)]
    together: Samples = {"suspend": [], "restore": []}
    at_once: Samples = {"suspend": [], "restore": []}
    slowest: Samples = {"suspend": [], "restore": []}
    for _ in range(WARM_UP_ROUNDS + rounds):
        alone = [(raw_suspend(pid)[0], raw_restore(pid)[0]) for pid in pids]
        slowest["suspend"].append(max(suspend_ms for suspend_ms, _ in alone))
        slowest["restore"].append(max(restore_ms for _, restore_ms in alone))
        at_once["suspend"].append(await timed_ms(partial(raw_at_once, raw_suspend, pids)))
        at_once["restore"].append(await timed_ms(partial(raw_at_once, raw_restore, pids)))
        together["suspend"].append(await timed_ms(partial(worker.suspend, workload)))
        together["restore"].append(await timed_ms(partial(worker.restore, workload)))
    await worker.stop(workload)
    found: dict[str, object] = {"rounds": rounds, "bytes_each": size, "members": GROUP, "gpus": gpu_count}
    for name in together:
        group_ms, at_once_ms, slowest_ms = (
            samples[name][WARM_UP_ROUNDS:] for samples in (together, at_once, slowest)
        )
        found[name] = {
            "group": figures(group_ms),
            "raw_at_once": figures(at_once_ms),
            "slowest_member_raw": figures(slowest_ms),
            "ratio": ratio(group_ms, slowest_ms),
            "ratio_of_raw_at_once": ratio(at_once_ms, slowest_ms),
            "ratio_to_raw_at_once": ratio(group_ms, at_once_ms),
        }
    return found


async def measure_first_and_second(worker: Worker, rounds: int, size: int) -> dict[str, object]:
    """New processes each round, suspended and restored twice: the first time includes allocating host pages.

    GB/s are those of the driver's copying calls for raw, and of the whole operation for ours.
    """
    rows: dict[str, list[list[float]]] = {"ours": [], "raw": []}
    copies: list[list[float]] = []
    for number in range(rounds):
        workload = await worker.start(f"ours-{size}-{number}", 1, 1, size)
        row = []
        for _ in range(2):
            row.append(await timed_ms(partial(worker.suspend, workload)))
            row.append(await timed_ms(partial(worker.restore, workload)))
        rows["ours"].append(row)
        await worker.stop(workload)

        workload = await worker.start(f"raw-{size}-{number}", 1, 1, size)
        calls = [call for _ in range(2) for call in (raw_suspend, raw_restore)]
        answers = [call(workload.root.pid) for call in calls]
        rows["raw"].append([whole_ms for whole_ms, _ in answers])
        copies.append([copy_ms for _, copy_ms in answers])
        await worker.stop(workload)
    found: dict[str, object] = {"rounds": rounds, "bytes": size}
    names = ("suspend_first", "restore_first", "suspend_second", "restore_second")
    for column, name in enumerate(names):
        ours_ms, raw_ms = ([row[column] for row in rows[kind]] for kind in ("ours", "raw"))
        copy_ms = statistics.median(row[column] for row in copies)
        found[name] = {
            **added(ours_ms, raw_ms),
            "ours_gb_per_s": round(size / 1e6 / statistics.median(ours_ms), 2),
            "driver_copy_gb_per_s": round(size / 1e6 / copy_ms, 2),
        }
    return found


def another_gpu(inventory: Inventory, gpu_uuid: str) -> str | None:
    """A destination for a move: another GPU of the same chip. None: no such GPU, or the driver can't move."""
    if (inventory.versions.cuda_version or 0) < REMAP_CUDA_VERSION:
        return None
    chips = inventory.chips
    return next((other for other in chips if other != gpu_uuid and chips[other] == chips[gpu_uuid]), None)


def why_too_large(inventory: Inventory, size: int) -> str | None:
    """Why a process of this size can't be measured here. None: it can be measured."""
    device_bytes = max(inventory.room(()).free_bytes.values(), default=0)
    if size + CONTEXT_BYTES > device_bytes:
        return f"{device_bytes} bytes are free on the GPU with most, of which a context takes some"
    host_bytes = memory_bytes("MemAvailable")
    if host_bytes is not None and size + DEFAULT_RESERVE_BYTES > host_bytes:
        return f"{host_bytes} bytes of host memory are available, of which the worker keeps a reserve"
    return None


async def measure_size(worker: Worker, rounds: int, size: int) -> dict[str, object]:
    """The first and the second time of one size, or the reason why it can't be measured."""
    if reason := why_too_large(worker.inventory, size):
        return {"bytes": size, "not_measured": reason}
    return await measure_first_and_second(worker, rounds, size)


async def measure_here(
    single_rounds: int, group_rounds: int, sizes: Sequence[int], size_rounds: int
) -> dict[str, object]:
    """Measures on the visible GPUs of this process. 0 rounds skip a part."""
    raw_call("cuInit", 0)
    with tempfile.TemporaryDirectory() as folder:
        async with open_worker(Path(folder)) as worker:
            found: dict[str, object] = {
                "driver_version": worker.inventory.versions.driver_version,
                "cuda_version": worker.inventory.versions.cuda_version,
                "gpus": Counter(gpu.name for gpu in worker.inventory.gpus),
                "by_size": [await measure_size(worker, size_rounds, size) for size in sizes],
            }
            if single_rounds:
                found["single"] = await measure_single(worker, single_rounds, 64 * MIB)
            if group_rounds:
                found["group"] = await measure_group(worker, group_rounds, 64 * MIB)
            return found


def measure_simulated(timing: Timing, single_rounds: int, group_rounds: int) -> dict[str, object]:
    """Measures on a simulated host, in a process whose loader finds the simulated libraries."""
    with tempfile.TemporaryDirectory() as folder:
        host = SimulatedHost.create(Path(folder) / "host", gpus=GROUP, chip="H100", timing=timing)
        done = subprocess.run(
            [sys.executable, __file__, "--here", str(single_rounds), str(group_rounds)],
            env={**os.environ, **host.environment()},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def machine() -> dict[str, object]:
    """Facts of the machine that affect the figures."""
    return {
        "cpu_count": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cuda_bindings": version("cuda-bindings"),
    }


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Runs the measurements that the options select."""
    if options.here is not None:
        single_rounds, group_rounds = options.here
        return trio.run(measure_here, single_rounds, group_rounds, (), 0)
    found: dict[str, object] = {
        "benchmark": "operation_overhead",
        "goals": GOALS,
        "machine": machine(),
    }
    if options.gpu:
        sizes = [round(gib * GIB) for gib in options.gib]
        others = 0 if options.only_sizes else options.rounds
        found["gpu"] = trio.run(measure_here, others, others, sizes, min(options.rounds, SIZE_ROUNDS))
    else:
        rounds = {"instant": options.instant_rounds, "typical": options.rounds}
        found["simulated"] = {
            name: measure_simulated(timing, rounds[name], rounds[name]) for name, timing in SIMULATED.items()
        }
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="measure on the GPUs of this machine")
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 8, 32], help="with --gpu: sizes to move")
    parser.add_argument("--only-sizes", action="store_true", help="with --gpu: only the sizes")
    parser.add_argument(
        "--instant-rounds", type=int, default=50, help="rounds with the driver that takes no time"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds with realistic cost")
    parser.add_argument("--here", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        found = measure(options)
    except* BenchmarkError as errors:
        sys.exit(f"operation_overhead: {errors.exceptions[0]}")
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
