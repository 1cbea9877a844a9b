"""Values read from a simulated host. They do not follow later changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag


class ProcessState(IntEnum):
    """The driver's CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    """From CUDA 13.4 on. Here only a fault sets this state."""
    RESTORING = 5


class ThrottleReason(IntFlag):
    """NVML's nvmlClocksEventReasons: the reasons that limit a GPU's clocks."""

    GPU_IDLE = 0x01
    APPLICATIONS_CLOCKS_SETTING = 0x02
    SW_POWER_CAP = 0x04
    HW_SLOWDOWN = 0x08
    SYNC_BOOST = 0x10
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE_SLOWDOWN = 0x80
    DISPLAY_CLOCK_SETTING = 0x100


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """One GPU of a simulated host."""

    index: int
    """Its index in NVML, which equals the index in CUDA here."""
    uuid: str
    """As NVML writes it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""
    chip: str
    name: str
    memory_bytes: int
    used_bytes: int
    """Memory of resident processes, and hogged memory."""
    hogged_bytes: int
    lost: bool
    mig_enabled: bool


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
    """One live CUDA process of a simulated host."""

    pid: int
    state: ProcessState
    restore_thread_id: int
    gpu_bytes: Mapping[str, int]
    """Memory by UUID of each GPU with a context: the present memory, or that before the checkpoint."""
    resident: bool
    """Whether its memory is on the GPUs."""
    wedged: bool
    """Whether a restore ran out of memory or found imported memory. Nothing restores the process any more."""
    busy: bool
    """Whether it has work that never drains. See `SimulatedHost.set_busy`."""
    mps_client: bool
    """Whether it is a client of MPS. See `SimulatedHost.set_mps_client`."""
    multicast: bool
    """Whether it has a multicast group. See `SimulatedHost.set_multicast`."""
    partial_passthrough: bool
    """Whether its container has only some of the host's GPUs. See `SimulatedHost.set_partial_passthrough`."""
    profiler: bool
    """Whether a profiler is attached. See `SimulatedHost.set_profiler`."""
    ipc_importer: bool
    """Whether it has imported memory of another process. See `SimulatedHost.set_ipc_importer`."""
    peers: tuple[int, ...]
    """The pids of its live peers. See `SimulatedHost.set_peers`."""
    controller_pid: int | None
    """The pid of the process with a checkpoint call on this process under way. None: no call."""
    calls: Mapping[str, int]
    """Number of calls of the checkpoint API on the process since its cuInit, including failed calls.

    By the short names: `get_state`, `get_restore_thread_id`, `lock`, `checkpoint`, `restore`, `unlock`. Calls
    with invalid arguments do not count.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a call, in every process of the host."""

    call: str
    """A function without version suffix: `cuMemAlloc`, `nvmlDeviceGetCount`, `nvmlInit` (any form of it)."""
    pid: int | None = None
    """Applies only to this process: the target of a checkpoint call, or the caller of another. None: all."""
    error: int = 0
    """The result of the call, a CUresult or nvmlReturn_t. Unless 0, the call has no effect."""
    delay_s: float = 0.0
    """Seconds to wait first."""
    hang: bool = False
    """The call returns only when the fault is cleared or its target dies."""
    signal: int = 0
    """Sent after `delay_s` to the target of a checkpoint call, or to the caller of another call."""
    signal_delay_s: float = 0.0
    """Seconds from the return of the call to the signal, which comes even if the caller has ended.

    Until then every call on the target returns OPERATING_SYSTEM, and device calls of the target wait. For
    checkpoint calls only.
    """
    state: int | None = None
    """The state of the target afterwards. For checkpoint calls only, like the next three fields."""
    skip: bool = False
    """The call has no effect and returns `error`, which may be 0 (success)."""
    keep_memory: bool = False
    """A checkpoint leaves the memory on the GPU."""
    ignore_gpu_pairs: bool = False
    """A restore leaves the process on its old GPUs."""
    after: int = 0
    """Number of (remaining) matching calls without the fault."""
    times: int | None = None
    """Number of (remaining) calls with the fault. None: until it is cleared."""
    id: int = 0
    """Assigned when the fault is set."""
