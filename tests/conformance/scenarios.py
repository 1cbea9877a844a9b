"""Scenarios of the driver's checkpoint contract. `python -m tests.conformance.scenarios NAME` runs one.

Exit status 0: it held; 77: it does not apply here, and the output says why; anything else: it did not hold.
Nothing here knows whether the GPU is real.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pynvml
from cuda.bindings import driver
from cuda.core import checkpoint

from tests.conformance.target import SIZE, WORK_S, ok, uuid_of

SKIPPED = 77
TARGET = str(Path(__file__).with_name("target.py"))
LOCK_TIMEOUT_MS = 10_000
BLOCKED_S = 0.5
"""How long a call may take before it counts as blocked."""
END_S = 10.0
CUresult = driver.CUresult
CALLS = {
    "lock": driver.cuCheckpointProcessLock,
    "checkpoint": driver.cuCheckpointProcessCheckpoint,
    "restore": driver.cuCheckpointProcessRestore,
    "unlock": driver.cuCheckpointProcessUnlock,
}


def skip(reason: str) -> NoReturn:
    print(reason)
    sys.exit(SKIPPED)


def all_uuids() -> list[str]:
    """Every GPU of the host, as the driver sees them."""
    return [uuid_of(device) for device in range(ok(driver.cuDeviceGetCount()))]


class Target:
    """A CUDA process with a buffer on GPU 0, which it checks whenever it is asked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", TARGET],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self.read() == "ready"

    def ask(self, question: str) -> str:
        self.send(question)
        return self.read()

    def send(self, question: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """Ends it in order: a kill of a process that was restored was seen to hang a host (#53).

        Raises:
            TimeoutExpired: It does not end, and is left as it is.
        """
        self._process.communicate(timeout=END_S)


@contextmanager
def target() -> Iterator[tuple[Target, checkpoint.Process]]:
    """A target, and cuda.core's handle on it. This process calls cuInit first, which a restore needs."""
    ok(driver.cuInit(0))
    process = Target()
    try:
        yield process, checkpoint.Process(process.pid)
    finally:
        process.close()


def refuses(errors: type[Exception] | tuple[type[Exception], ...], call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except errors:
        return
    raise AssertionError(f"{arguments} was not refused")


def a_bool_is_no_pid() -> None:
    refuses((TypeError, ValueError), checkpoint.Process, True)


def a_text_is_no_pid() -> None:
    refuses(TypeError, checkpoint.Process, "1")


def zero_is_no_pid() -> None:
    refuses(ValueError, checkpoint.Process, 0)


def a_negative_number_is_no_pid() -> None:
    refuses(ValueError, checkpoint.Process, -1)


def a_negative_timeout_is_refused() -> None:
    refuses((ValueError, OverflowError), checkpoint.Process(os.getpid()).lock, -1)


def a_map_that_is_no_mapping_is_refused() -> None:
    refuses((TypeError, ValueError), checkpoint.Process(os.getpid()).restore, {"not a uuid": "not a uuid"})


def the_initial_state_is_running() -> None:
    with target() as (_, process):
        assert process.state == "running"


def the_restore_thread_id_is_positive() -> None:
    with target() as (_, process):
        assert process.restore_thread_id > 0


def lock_and_unlock() -> None:
    with target() as (program, process):
        process.lock(timeout_ms=LOCK_TIMEOUT_MS)
        assert process.state == "locked"
        process.unlock()
        assert process.state == "running"
        assert program.ask("check") == "intact"


def lock_with_a_timeout() -> None:
    with target() as (_, process):
        process.lock(timeout_ms=5_000)
        assert process.state == "locked"
        process.unlock()


def suspend(process: checkpoint.Process) -> None:
    process.lock(timeout_ms=LOCK_TIMEOUT_MS)
    process.checkpoint()
    assert process.state == "checkpointed"


def full_cycle_without_migration() -> None:
    with target() as (program, process):
        before = program.ask("uuid")
        suspend(process)
        process.restore()
        assert process.state == "locked"
        process.unlock()
        assert process.state == "running"
        assert program.ask("check") == "intact"
        assert program.ask("uuid") == before


def plain(text: str) -> str:
    """cuda.core takes UUIDs without their prefix."""
    return text.removeprefix("GPU-")


def need_identical_gpus(count: int) -> list[str]:
    uuids = all_uuids()
    if len(uuids) < count:
        skip(f"needs {count} GPUs, and {len(uuids)} can be seen")
    if len({ok(driver.cuDeviceGetName(64, device)) for device in range(len(uuids))}) != 1:
        skip("needs GPUs of one chip")
    return uuids


def a_rotation_migrates_the_context() -> None:
    with target() as (program, process):
        uuids = need_identical_gpus(2)
        mapping = dict(zip(map(plain, uuids), map(plain, uuids[1:] + uuids[:1]), strict=True))
        for turn in range(1, len(uuids) + 1):
            suspend(process)
            process.restore(gpu_mapping=mapping)
            process.unlock()
            assert program.ask("check") == "intact"
            # The program asks the driver itself: cuda.core's Device.uuid is cached in Python.
            assert program.ask("uuid") == uuids[turn % len(uuids)]


def two_identical_gpus_swap() -> None:
    with target() as (program, process):
        uuids = need_identical_gpus(2)
        mapping = {plain(text): plain(text) for text in uuids}
        mapping[plain(uuids[0])], mapping[plain(uuids[1])] = plain(uuids[1]), plain(uuids[0])
        for expected in (uuids[1], uuids[0]):
            suspend(process)
            process.restore(gpu_mapping=mapping)
            process.unlock()
            assert program.ask("check") == "intact"
            assert program.ask("uuid") == expected


def result_of(answer: tuple[Any, ...]) -> Any:
    """The CUresult of an answer."""
    return answer[0]


def a_process_without_cuda_is_not_initialized() -> None:
    ok(driver.cuInit(0))
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        assert results_of_all_calls(sleeper.pid) == {CUresult.CUDA_ERROR_NOT_INITIALIZED}
    finally:
        sleeper.kill()
        sleeper.wait()


def results_of_all_calls(pid: int) -> set[Any]:
    """The CUresults of the six calls on a process."""
    queries = driver.cuCheckpointProcessGetState, driver.cuCheckpointProcessGetRestoreThreadId
    return {result_of(query(pid)) for query in queries} | {
        result_of(call(pid, None)) for call in CALLS.values()
    }


def a_missing_process_is_an_error_of_the_operating_system() -> None:
    ok(driver.cuInit(0))
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert results_of_all_calls(gone.pid) == {CUresult.CUDA_ERROR_OPERATING_SYSTEM}


def a_zombie_is_not_initialized() -> None:
    ok(driver.cuInit(0))
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert results_of_all_calls(zombie.pid) == {CUresult.CUDA_ERROR_NOT_INITIALIZED}
    zombie.wait()


def calls_in_the_wrong_state_are_illegal_and_change_nothing() -> None:
    legal = {"running": {"lock"}, "locked": {"checkpoint", "unlock"}, "checkpointed": {"restore"}}
    way_on = {"running": "lock", "locked": "checkpoint", "checkpointed": "restore"}
    with target() as (_, process):
        for state, allowed in legal.items():
            for name in CALLS.keys() - allowed:
                assert result_of(CALLS[name](process.pid, None)) == CUresult.CUDA_ERROR_ILLEGAL_STATE, (
                    state,
                    name,
                )
                assert process.state == state
            ok(CALLS[way_on[state]](process.pid, None))
        process.unlock()


def device_calls_wait_and_data_survives() -> None:
    with target() as (program, process):
        suspend(process)
        answers: list[str] = []
        program.send("check")
        reader = threading.Thread(target=lambda: answers.append(program.read()))
        reader.start()
        reader.join(BLOCKED_S)
        assert answers == [], "the copy ran although its memory was not there"
        process.restore()
        reader.join(BLOCKED_S)
        assert answers == [], "the copy ran although the process was locked"
        process.unlock()
        reader.join()
        assert answers == ["intact"]


def the_restore_thread_belongs_to_the_target() -> None:
    with target() as (_, process):
        tid = process.restore_thread_id
        assert tid != process.pid
        assert str(tid) in os.listdir(f"/proc/{process.pid}/task")


def a_thread_id_names_its_process() -> None:
    with target() as (_, process):
        ok(driver.cuCheckpointProcessLock(process.restore_thread_id, None))
        assert process.state == "locked"
        process.unlock()


def listed_on(pid: int) -> dict[str, int]:
    """The GPUs that NVML lists a process on, and the bytes it uses there."""
    pynvml.nvmlInit()
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
            if process.pid == pid:
                found[pynvml.nvmlDeviceGetUUID(gpu)] = process.usedGpuMemory or 0
    pynvml.nvmlShutdown()
    return found


def nvml_follows_the_state() -> None:
    with target() as (program, process):
        before = listed_on(process.pid)
        if not before:
            skip("NVML does not list processes by the pids that are seen here")
        assert list(before) == [program.ask("uuid")]
        assert before[program.ask("uuid")] >= SIZE
        process.lock(timeout_ms=LOCK_TIMEOUT_MS)
        assert list(listed_on(process.pid)) == list(before)
        process.checkpoint()
        assert listed_on(process.pid) == {}
        process.restore()
        process.unlock()
        assert list(listed_on(process.pid)) == list(before)


def restore_with(pid: int, pairs: dict[str, str]) -> Any:
    """A restore with the pairs given as they are, through the bindings."""
    kept = []
    made = []
    for old, new in pairs.items():
        pair = driver.CUcheckpointGpuPair()
        for name, text in (("oldUuid", old), ("newUuid", new)):
            raw = ctypes.create_string_buffer(uuid.UUID(plain(text)).bytes, 16)
            setattr(pair, name, driver.CUuuid(ctypes.addressof(raw)))
            kept.append(raw)
        made.append(pair)
    args = driver.CUcheckpointRestoreArgs()
    args.gpuPairs = made
    args.gpuPairsCount = len(made)
    return result_of(driver.cuCheckpointProcessRestore(pid, args))


def an_incomplete_map_is_refused_and_changes_nothing() -> None:
    with target() as (program, process):
        uuids = need_identical_gpus(2)
        suspend(process)
        assert restore_with(process.pid, {uuids[0]: uuids[1]}) == CUresult.CUDA_ERROR_INVALID_VALUE
        assert process.state == "checkpointed"
        process.restore()
        process.unlock()
        assert program.ask("check") == "intact"


def a_map_with_an_unknown_gpu_is_refused_and_changes_nothing() -> None:
    unknown = "GPU-00000000-0000-0000-0000-000000000001"
    with target() as (program, process):
        uuids = all_uuids()
        same = {text: text for text in uuids}
        suspend(process)
        for pairs in (
            {**same, uuids[0]: unknown},
            {unknown: uuids[0], **{text: text for text in uuids[1:]}},
            {**same, unknown: unknown},
        ):
            assert restore_with(process.pid, pairs) == CUresult.CUDA_ERROR_INVALID_VALUE, pairs
            assert process.state == "checkpointed"
        process.restore()
        process.unlock()
        assert program.ask("check") == "intact"


def init_with(visible: str) -> int:
    """The CUresult of cuInit in a process with this CUDA_VISIBLE_DEVICES."""
    code = "from cuda.bindings import driver; print(int(driver.cuInit(0)[0]))"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    return int(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))


def a_gpu_that_is_visible_twice_is_an_invalid_device() -> None:
    for visible in ("0,0", "0x0, 0"):
        assert init_with(visible) == CUresult.CUDA_ERROR_INVALID_DEVICE, visible
    assert init_with("0,,0") == CUresult.CUDA_SUCCESS
    assert init_with(",0") == CUresult.CUDA_ERROR_NO_DEVICE


def an_identity_map_is_accepted() -> None:
    with target() as (program, process):
        before = program.ask("uuid")
        suspend(process)
        assert restore_with(process.pid, {text: text for text in all_uuids()}) == CUresult.CUDA_SUCCESS
        process.unlock()
        assert program.ask("uuid") == before
        assert program.ask("check") == "intact"


def a_lock_waits_for_submitted_work_until_its_timeout() -> None:
    with target() as (program, process):
        program.send("work")
        assert program.read() == "working"
        arguments = driver.CUcheckpointLockArgs()
        arguments.timeoutMs = round(WORK_S * 100)
        assert (
            result_of(driver.cuCheckpointProcessLock(process.pid, arguments)) == CUresult.CUDA_ERROR_NOT_READY
        )
        assert process.state == "running"
        process.lock(timeout_ms=LOCK_TIMEOUT_MS)
        process.unlock()
        assert program.read() == "done"
        assert program.ask("check") == "intact"


def several_processes_are_suspended_together() -> None:
    with target() as (first, one), target() as (second, other):
        for process in (one, other):
            process.lock(timeout_ms=LOCK_TIMEOUT_MS)
        for process in (one, other):
            process.checkpoint()
        assert (one.state, other.state) == ("checkpointed", "checkpointed")
        for process in (one, other):
            process.restore()
            process.unlock()
        assert (first.ask("check"), second.ask("check")) == ("intact", "intact")


def a_process_moves_itself() -> None:
    """In a process of its own, as every scenario: it locks, checkpoints and restores itself."""
    ok(driver.cuInit(0))
    uuids = need_identical_gpus(1)
    device = ok(driver.cuDeviceGet(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
    process = checkpoint.Process(os.getpid())
    mapping = dict(zip(map(plain, uuids), map(plain, uuids[1:] + uuids[:1]), strict=True))
    for turn in range(1, len(uuids) + 1):
        suspend(process)
        process.restore(gpu_mapping=mapping)
        process.unlock()
        assert uuid_of(device) == uuids[turn % len(uuids)]


def probe() -> None:
    """Is there a driver with the checkpoint API, and a GPU?"""
    try:
        ok(driver.cuInit(0))
        if ok(driver.cuDriverGetVersion()) < 13000:
            skip("the driver is older than CUDA 13.0")
    except Exception as error:
        skip(str(error).splitlines()[0])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
