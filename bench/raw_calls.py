"""Calls of the checkpoint API on a process, made one after the other through cuda.bindings."""

import ctypes
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import trio
from cuda.bindings import driver  # noqa: TID251 - the raw calls that ours are compared with

from bench.own_operations import BenchmarkError

LOCK_TIMEOUT_MS: Final = 10_000


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
