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
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, Final

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
from leasehold_worker.driver.target_access import file_system_user_of, obstacle
from leasehold_worker.host.process_folders import PROC, has_ended, stat_fields
from leasehold_worker.host.shared_libraries import loaded_library

PR_SET_PDEATHSIG = 1
NOT_INITIALIZED = 3
OPERATING_SYSTEM = 304
FUNCTION_NOT_FOUND = 500

OVER: Final = Reply(OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM: the process has ended", ended=True)
"""The driver's answer for a missing process."""

START_TIME: Final = 19
"""Place after the name in /proc/PID/stat (field 22 of proc(5)), in clock ticks since boot."""


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


def answer(request: Request, on_change: Callable[[], None]) -> Reply:
    """Makes one driver call as the file-system user of its target.

    The driver answers OPERATING_SYSTEM for a missing process, for one that ends in the call, and without
    permission, and NOT_INITIALIZED for a zombie. The reply tells these apart.

    Args:
        request: The call.
        on_change: Called after each change of the file-system user.
    """
    with file_system_user_of(request.pid, on_change):
        if is_over(request):
            return OVER
        reply = Reply(0, "CUDA_SUCCESS")
        if request.call is not DriverCall.TRACE_PERMISSION:
            reply = make_call(request)
            if reply.result not in (OPERATING_SYSTEM, NOT_INITIALIZED):
                return reply
        why = obstacle(request.pid) if reply.result != NOT_INITIALIZED else None
        if is_over(request):  # asked last, as an end also closes the files of the process
            return msgspec.structs.replace(reply, ended=True) if reply.result else OVER
        return msgspec.structs.replace(reply, obstacle=why or "")


def make_call(request: Request) -> Reply:
    """Makes one driver call.

    The bindings raise on a result or state that is newer than they are, after the driver has acted. A state
    is then taken from the exception, since it is only decoded after success; a result is lost.
    """
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


def is_over(request: Request) -> bool:
    """Whether the process of a request has ended, even if another process has its pid by now.

    A pidfd does not prevent the reuse of a pid. So the start time is compared here, right before the call.
    """
    try:
        fields = stat_fields((PROC / str(request.pid) / "stat").read_text("utf-8", "replace"))
    except OSError:
        return True
    return has_ended(fields) or request.start_time_ticks not in (0, int(fields[START_TIME]))


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
    on_change = partial(die_with, int(sys.argv[1]))
    on_change()
    replies = claim_reply_stream()
    try:
        replies.write(PROTOCOL_ENCODER.encode(greet()) + b"\n")
        decoder = msgspec.json.Decoder(Request)
        for line in sys.stdin.buffer:
            replies.write(PROTOCOL_ENCODER.encode(answer(decoder.decode(line), on_change)) + b"\n")
    except BrokenPipeError:
        raise SystemExit("the worker ended before its driver helper had answered") from None


if __name__ == "__main__":
    main()
