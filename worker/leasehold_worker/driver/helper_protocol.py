"""The records that the worker and its driver helper exchange: one JSON line each way per call."""

import enum

import msgspec

from leasehold_worker.host.shared_libraries import LoadedLibrary

PROTOCOL_ENCODER = msgspec.json.Encoder()


class DriverCall(enum.StrEnum):
    """A call of the driver's checkpoint API, by its effect."""

    STATE = "state"
    RESTORE_THREAD_ID = "restore_thread_id"
    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"
    TRACE_PERMISSION = "trace_permission"
    """A check of permission, and not a driver call. The helper makes it, since it makes the driver calls."""


class Request(msgspec.Struct, frozen=True):
    """One call on one process.

    Attributes:
        call: The call.
        pid: The target.
        lock_timeout_ms: For LOCK: at least 1, since the driver takes 0 for "wait forever".
        gpu_pairs: For RESTORE: (old, new) UUIDs as NVML writes them; empty for no map.
        start_time_ticks: Start time of the target, in clock ticks since boot. 0: any process with the pid.
    """

    call: DriverCall
    pid: int
    lock_timeout_ms: int = 0
    gpu_pairs: list[tuple[str, str]] = []
    start_time_ticks: int = 0


class Reply(msgspec.Struct, frozen=True):
    """The driver's answer.

    Attributes:
        result: The CUresult; None if the bindings couldn't decode it, after the driver had acted.
        result_name: Its name, such as "CUDA_ERROR_NOT_READY"; otherwise the exception of the bindings.
        value: The state or the thread id; None for other calls.
        duration_s: Time that the call took in the driver.
        ended: The process had ended before or in the call.
        obstacle: Why the helper may not control the process, with the remedy. Empty: it may, or the call
            succeeded.
    """

    result: int | None
    result_name: str
    value: int | None = None
    duration_s: float = 0.0
    ended: bool = False
    obstacle: str = ""


class Greeting(msgspec.Struct, frozen=True):
    """The helper's first line.

    Attributes:
        init_result: The result of cuInit; None if libcuda couldn't be loaded.
        init_result_name: Its name, or the error of the loader.
        cuda_version: CUDA version of the driver: 13000 is 13.0. None without a driver.
        libcuda: The user-mode driver that the helper calls. None without one.
        bindings_version: Version of cuda-bindings.
    """

    init_result: int | None
    init_result_name: str
    cuda_version: int | None = None
    libcuda: LoadedLibrary | None = None
    bindings_version: str = ""
