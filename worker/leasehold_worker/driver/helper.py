"""The child process that owns libcuda. Started by exec; it ends with the worker.

A driver call can hang forever and can't be cancelled (NVIDIA/cuda-checkpoint issues 30 and 45), so it is
made here, where it can be killed. The bindings are called directly, one call per request line.
"""

import ctypes
import os
import re
import signal
import sys
import time
import uuid
from typing import Any, BinaryIO

import msgspec
from cuda.bindings import __version__ as bindings_version
from cuda.bindings import driver

from leasehold_worker.driver.helper_protocol import (
    PROTOCOL_ENCODER,
    DriverCall,
    Greeting,
    Reply,
    Request,
)
from leasehold_worker.host.process_folders import facts_folder
from leasehold_worker.host.process_memory import may_trace
from leasehold_worker.host.shared_libraries import loaded_library

PR_SET_PDEATHSIG = 1
INVALID_VALUE = 1
FUNCTION_NOT_FOUND = 500


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit("the worker ended before its driver helper had started")


def claim_reply_stream() -> BinaryIO:
    """Reserves standard output for replies: libraries print to standard error."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return replies


def greet() -> Greeting:
    """Initialises the driver: a restore needs that in the caller unless persistence mode is on."""
    try:
        (result,) = driver.cuInit(0)
        version_result, cuda_version = driver.cuDriverGetVersion()
    except (RuntimeError, ImportError) as error:
        return Greeting(
            init_result=None,
            init_result_name=str(error).splitlines()[0],
            bindings_version=bindings_version,
        )
    return Greeting(
        init_result=int(result),
        init_result_name=result.name,
        cuda_version=cuda_version if int(version_result) == 0 else None,
        libcuda=loaded_library(os.getpid(), "libcuda.so"),
        bindings_version=bindings_version,
    )


def answer(request: Request) -> Reply:
    """Makes one driver call.

    The bindings raise on a result or state that is newer than they are, after the driver has acted. A state
    is then taken from the exception, since it is only decoded after success; a result is lost.
    """
    if request.start_time_ticks and start_time_ticks(request.pid) != request.start_time_ticks:
        return Reply(INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE: the process has ended")
    if request.call is DriverCall.TRACE_PERMISSION:
        return trace_permission(request.pid)
    started = time.monotonic()
    try:
        result, *values = call_driver(request)
    except (ValueError, KeyError) as error:
        number = re.match(r"(\d+)\b", str(error))
        if request.call is DriverCall.STATE and number and "CUresult" not in str(error):
            return Reply(0, "CUDA_SUCCESS", int(number[1]), time.monotonic() - started)
        return Reply(result=None, result_name=f"undecodable answer: {error}")
    except RuntimeError as error:
        return Reply(result=FUNCTION_NOT_FOUND, result_name=f"CUDA_ERROR_NOT_FOUND: {error}")
    value = int(values[0]) if values and values[0] is not None else None
    return Reply(int(result), result.name, value, time.monotonic() - started)


def start_time_ticks(pid: int) -> int | None:
    """Start time of the current process with the pid (field 22 of /proc/PID/stat). None: there is none.

    A pidfd does not prevent the reuse of a pid. So the start time is compared here, right before the call.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    return int(text[text.rindex(b")") + 2 :].split()[19])


def call_driver(request: Request) -> tuple[Any, ...]:
    """Makes the call. Unset fields of its argument struct are zero."""
    match request.call:
        case DriverCall.STATE:
            return tuple(driver.cuCheckpointProcessGetState(request.pid))
        case DriverCall.RESTORE_THREAD_ID:
            return tuple(driver.cuCheckpointProcessGetRestoreThreadId(request.pid))
        case DriverCall.LOCK:
            arguments = driver.CUcheckpointLockArgs()
            arguments.timeoutMs = request.lock_timeout_ms
            return tuple(driver.cuCheckpointProcessLock(request.pid, arguments))
        case DriverCall.CHECKPOINT:
            return tuple(driver.cuCheckpointProcessCheckpoint(request.pid, None))
        case DriverCall.RESTORE:
            return restore(request)
        case DriverCall.UNLOCK:
            return tuple(driver.cuCheckpointProcessUnlock(request.pid, None))
        case DriverCall.TRACE_PERMISSION:
            raise ValueError("a permission is not a driver call")


def trace_permission(pid: int) -> Reply:
    """Whether this process may trace another, which the driver's calls need.

    The kernel makes the same check when a process's memory is opened, with Yama and capabilities (ptrace(2)).
    It also asks for the permissions of the file, which a worker without root lacks for other users.
    """
    folder = facts_folder(pid)
    try:
        os.close(os.open(folder / "mem", os.O_RDONLY))
    except OSError as error:
        if may_trace(int(folder.name)):
            return Reply(0, "permitted", 1)
        return Reply(0, error.strerror or str(error), 0)
    return Reply(0, "permitted", 1)


def restore(request: Request) -> tuple[Any, ...]:
    """Restores with the pairs. The bindings don't set the count, without which the driver ignores the map."""
    if not request.gpu_pairs:
        return tuple(driver.cuCheckpointProcessRestore(request.pid, None))
    buffers = [
        ctypes.create_string_buffer(uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
        for pair in request.gpu_pairs
        for text in pair
    ]
    # A CUuuid made from an address aliases the buffer, which must outlive the call.
    uuids = [driver.CUuuid(ctypes.addressof(buffer)) for buffer in buffers]
    pairs = []
    for old, new in zip(uuids[::2], uuids[1::2], strict=True):
        pair = driver.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = old, new
        pairs.append(pair)
    arguments = driver.CUcheckpointRestoreArgs()
    arguments.gpuPairs = pairs
    arguments.gpuPairsCount = len(pairs)
    return tuple(driver.cuCheckpointProcessRestore(request.pid, arguments))


def main() -> None:
    """Answers requests until standard input ends, or until the worker, which reads the replies, has ended."""
    die_with(int(sys.argv[1]))
    replies = claim_reply_stream()
    try:
        replies.write(PROTOCOL_ENCODER.encode(greet()) + b"\n")
        decoder = msgspec.json.Decoder(Request)
        for line in sys.stdin.buffer:
            replies.write(PROTOCOL_ENCODER.encode(answer(decoder.decode(line))) + b"\n")
    except BrokenPipeError:
        raise SystemExit("the worker ended before its driver helper had answered") from None


if __name__ == "__main__":
    main()
