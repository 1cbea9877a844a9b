"""A CUDA program that does what it is told: one JSON request a line, one JSON answer a line.

It prints an empty object when it begins a call.

Plays the controller as well as the target, each in a process of its own, on a simulated host.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import uuid
from typing import Any

import pynvml
from cuda.bindings import driver

Buffer = dict[str, int]
events: Any = None
"""NVML's set of events, between `listen` and `stop_listening`."""
listened: dict[int | None, int] = {}
"""Index of a GPU by its handle: a lost one can't be asked for it."""


_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("words", ctypes.c_ubyte * 64),)


def _ok(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{error.name} ({int(error)})")
    return values[0] if len(values) == 1 else values


# --- the controller's side


def get_state(pid: int) -> list[int | None]:
    error, state = driver.cuCheckpointProcessGetState(pid)
    return [int(error), None if state is None else int(state)]


def restore_thread_id(pid: int) -> list[int | None]:
    error, tid = driver.cuCheckpointProcessGetRestoreThreadId(pid)
    return [int(error), tid]


def lock(pid: int, timeout_ms: int | None = None) -> int:
    args = None
    if timeout_ms is not None:
        args = driver.CUcheckpointLockArgs()
        args.timeoutMs = timeout_ms
    return int(driver.cuCheckpointProcessLock(pid, args)[0])


def lock_with_reserved_word(pid: int, timeout_ms: int) -> int:
    """A lock whose arguments have a reserved byte that is not zero."""
    args = driver.CUcheckpointLockArgs()
    args.timeoutMs = timeout_ms
    ctypes.memset(int(args.getPtr()) + 8, 1, 1)
    return int(driver.cuCheckpointProcessLock(pid, args)[0])


def checkpoint(pid: int) -> int:
    return int(driver.cuCheckpointProcessCheckpoint(pid, None)[0])


def unlock(pid: int) -> int:
    return int(driver.cuCheckpointProcessUnlock(pid, None)[0])


def _uuid(text: str) -> tuple[Any, Any]:
    raw = ctypes.create_string_buffer(uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
    return driver.CUuuid(ctypes.addressof(raw)), raw


def restore(pid: int, pairs: list[list[str]] | None = None, count: int | None = None) -> int:
    if pairs is None:
        return int(driver.cuCheckpointProcessRestore(pid, None)[0])
    kept = []
    made = []
    for old, new in pairs:
        pair = driver.CUcheckpointGpuPair()
        for name, text in (("oldUuid", old), ("newUuid", new)):
            value, raw = _uuid(text)
            setattr(pair, name, value)
            kept.append(raw)
        made.append(pair)
    args = driver.CUcheckpointRestoreArgs()
    args.gpuPairs = made
    args.gpuPairsCount = len(made) if count is None else count
    return int(driver.cuCheckpointProcessRestore(pid, args)[0])


def timed(name: str, *arguments: Any) -> float:
    start = time.perf_counter()
    result = globals()[name](*arguments)
    if result != 0:
        raise RuntimeError(f"{name}: {result}")
    return time.perf_counter() - start


# --- the target's side


def init() -> int:
    return int(driver.cuInit(0)[0])


def set_up(ordinal: int = 0) -> None:
    _ok(driver.cuInit(0))
    _ok(driver.cuCtxSetCurrent(_ok(driver.cuDevicePrimaryCtxRetain(_ok(driver.cuDeviceGet(ordinal))))))


def allocate(size: int) -> list[int | None]:
    error, address = driver.cuMemAlloc(size)
    return [int(error), int(address) if error == driver.CUresult.CUDA_SUCCESS else None]


def free(address: int) -> int:
    return int(driver.cuMemFree(address)[0])


def fill(address: int, size: int, seed: int) -> None:
    _ok(driver.cuMemcpyHtoD(address, _pattern(size, seed), size))


def holds(address: int, size: int, seed: int) -> bool:
    found = bytearray(size)
    _ok(driver.cuMemcpyDtoH(found, address, size))
    return found == _pattern(size, seed)


def export_memory(address: int) -> str:
    """The CUDA IPC handle of an allocation, as hexadecimal digits."""
    handle = _IpcHandle()
    error = ctypes.CDLL("libcuda.so.1").cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
    if error:
        raise RuntimeError(f"cuIpcGetMemHandle answers {error}")
    return bytes(handle.words).hex()


def import_memory(handle: str) -> int:
    """Opens an allocation of another process, and returns its address here."""
    library, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint]
    opened = _IpcHandle.from_buffer_copy(bytes.fromhex(handle))
    error = library.cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, _LAZY_PEER_ACCESS)
    if error:
        raise RuntimeError(f"cuIpcOpenMemHandle answers {error}")
    return address.value


def first_byte(address: int) -> int:
    found = bytearray(1)
    _ok(driver.cuMemcpyDtoH(found, address, 1))
    return found[0]


def _pattern(size: int, seed: int) -> bytes:
    return bytes((seed + index) % 251 for index in range(251)) * (size // 251) + bytes(size % 251)


def device_uuids() -> list[str]:
    count = _ok(driver.cuDeviceGetCount())
    return [
        f"GPU-{uuid.UUID(bytes=bytes(_ok(driver.cuDeviceGetUuid(index)).bytes))}" for index in range(count)
    ]


def memory_info() -> list[int]:
    return [int(value) for value in _ok(driver.cuMemGetInfo())]


def begin_session() -> None:
    os.setsid()


def set_file_system_user(uid: int) -> None:
    """Changes the fsuid of the thread that makes the calls. The kernel reports no error."""
    ctypes.CDLL(None).setfsuid(uid)


CAPABILITIES = {"dac_override": 1, "dac_read_search": 2, "setuid": 7, "sys_ptrace": 19}
PR_SET_KEEPCAPS = 8
CAPABILITY_VERSION_3 = 0x20080522


def become(uid: int, *names: str) -> None:
    """Makes the thread that makes the calls one of another user, with exactly these capabilities.

    Raises:
        OSError: The process lacks one of the capabilities.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    mask = sum(1 << CAPABILITIES[name] for name in names)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(
        mask, mask, 0, 0, 0, 0
    )  # effective, permitted, inheritable: low and high words
    if libc.capset(header, sets) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")


def close_files(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def cpu_seconds() -> float:
    return time.process_time()


def call(name: str, *arguments: Any) -> list[Any]:
    """Any driver function with plain arguments; what is no plain value comes back as its text."""
    error, *values = getattr(driver, name)(*arguments)
    plain = [value if isinstance(value, int | float | str) else str(value) for value in values]
    return [int(error), *plain]


def pointer_attribute(attribute: int, address: int) -> int:
    return int(_ok(driver.cuPointerGetAttribute(driver.CUpointer_attribute(attribute), address)))


def host_bytes(address: int, size: int) -> list[int]:
    return list(ctypes.string_at(address, size))


def start_thread_allocating(size: int, seconds: float) -> None:
    """Allocates and frees in the background, as fast as it goes."""
    context = _ok(driver.cuCtxGetCurrent())

    def work() -> None:
        _ok(driver.cuCtxSetCurrent(context))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            _ok(driver.cuMemFree(_ok(driver.cuMemAlloc(size))))

    threading.Thread(target=work, daemon=True).start()


def call_in_forked_child(name: str) -> int:
    """What a CUDA call answers in a child forked after cuInit."""
    child = os.fork()
    if child == 0:
        os._exit(int(getattr(driver, name)(0)[0]) & 0x7F)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- NVML


def nvml_processes(mps: bool = False) -> dict[str, dict[str, int | None]]:
    """By UUID of each GPU, by pid (as text): used bytes, None where NVML cannot say."""
    listing = "nvmlDeviceGetMPSComputeRunningProcesses" if mps else "nvmlDeviceGetComputeRunningProcesses"
    pynvml.nvmlInit()
    listed = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = getattr(pynvml, listing)(gpu)
        listed[pynvml.nvmlDeviceGetUUID(gpu)] = {
            str(process.pid): process.usedGpuMemory for process in processes
        }
    pynvml.nvmlShutdown()
    return listed


def nvml(name: str, index: int, *arguments: Any) -> Any:
    """An NVML function of one device: its answer, or the number of its error."""
    pynvml.nvmlInit()
    try:
        answer = getattr(pynvml, name)(pynvml.nvmlDeviceGetHandleByIndex(index), *arguments)
    except pynvml.NVMLError as error:
        return error.value
    if isinstance(answer, ctypes.Structure):
        return {field: getattr(answer, field) for field, *_ in answer._fields_}
    return answer


def nvml_system(name: str, *arguments: Any) -> Any:
    """An NVML function that needs no device."""
    try:
        pynvml.nvmlInit()
        answer = getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        return error.value
    return pynvml.nvmlDeviceGetIndex(answer) if name.startswith("nvmlDeviceGetHandle") else answer


def driver_branch() -> str:
    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverBranch().branch)


def listen(indices: list[int], types: int = pynvml.nvmlEventTypeXidCriticalError) -> int:
    """Registers GPUs in a set of events that lasts: 0, or the number of NVML's error."""
    global events
    pynvml.nvmlInit()
    try:
        events = pynvml.nvmlEventSetCreate()
        for index in indices:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceRegisterEvents(gpu, types, events)
            listened[ctypes.cast(gpu, ctypes.c_void_p).value] = index
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def next_event(timeout_ms: int = 30_000) -> Any:
    """The next event: [index of the GPU, type, Xid], or the number of NVML's error."""
    try:
        event = pynvml.nvmlEventSetWait_v2(events, timeout_ms)
    except pynvml.NVMLError as error:
        return error.value
    return [listened[ctypes.cast(event.device, ctypes.c_void_p).value], event.eventType, event.eventData]


def stop_listening() -> int:
    try:
        pynvml.nvmlEventSetFree(events)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def main() -> None:
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        print("{}", flush=True)
        try:
            reply = {"value": globals()[name](*arguments, **options)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
