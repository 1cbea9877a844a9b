"""What can be read from a simulated host: values, as they were when they were read."""

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
    """From CUDA 13.4 on, and here only when a fault asks for it."""
    RESTORING = 5


class ThrottleReason(IntFlag):
    """NVML's nvmlClocksEventReasons: why a GPU's clocks are not higher."""

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
    """Its place in NVML's order, which is also CUDA's here."""
    uuid: str
    """As NVML writes it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`."""
    chip: str
    name: str
    memory_bytes: int
    used_bytes: int
    """Taken by processes whose memory is on the GPU, and hogged."""
    hogged_bytes: int
    lost: bool
    mig_enabled: bool


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
    """One living CUDA process of a simulated host."""

    pid: int
    state: ProcessState
    restore_thread_id: int
    gpu_bytes: Mapping[str, int]
    """By UUID of each GPU it has a context on now: what it takes there, or took before its checkpoint."""
    resident: bool
    """Is its memory on the GPUs?"""
    wedged: bool
    """Did a restore run out of memory? Then nothing helps any more."""
    busy: bool
    """Does it have work that never drains? See `SimulatedHost.set_busy`."""
    mps_client: bool
    """Does it compute through MPS? See `SimulatedHost.set_mps_client`."""
    multicast: bool
    """Does it have a multicast group? See `SimulatedHost.set_multicast`."""
    partial_passthrough: bool
    """Is it in a container with some of the host's GPUs? See `SimulatedHost.set_partial_passthrough`."""
    peers: tuple[int, ...]
    """The pids of its living peers. See `SimulatedHost.set_peers`."""
    controller_pid: int | None
    """The process whose checkpoint call on it is under way, if one is."""
    calls: Mapping[str, int]
    """How often each call of the checkpoint API came for it since its cuInit, whatever the answer was.

    By the short names: `get_state`, `get_restore_thread_id`, `lock`, `checkpoint`, `restore`, `unlock`. Calls
    with bad arguments do not count.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """Makes a call go wrong, in every process of the host."""

    call: str
    """A function without version suffix: `cuMemAlloc`, `nvmlDeviceGetCount`, `nvmlInit` (any form of it)."""
    pid: int | None = None
    """Only for this process: the target of a checkpoint call, the caller of any other. None is anyone."""
    error: int = 0
    """What the call returns, a CUresult or nvmlReturn_t. Unless 0, the call does nothing else."""
    delay_s: float = 0.0
    """Time that passes first."""
    hang: bool = False
    """The call returns only when the fault is cleared or its target dies."""
    signal: int = 0
    """Sent to the process that `pid` speaks of, after `delay_s`."""
    signal_delay_s: float = 0.0
    """The call returns first, and the signal comes so many seconds later, even if the caller has ended.

    Until then every call on the target answers OPERATING_SYSTEM, and device calls of the target wait. For
    checkpoint calls only.
    """
    state: int | None = None
    """The state that the target has afterwards. For checkpoint calls only, as are the next three."""
    skip: bool = False
    """Do nothing and return `error`, which may be 0: success."""
    keep_memory: bool = False
    """A checkpoint that leaves the memory on the GPU."""
    ignore_gpu_pairs: bool = False
    """A restore that leaves the process on its old GPUs."""
    after: int = 0
    """How many calls that match pass before it holds, or still pass."""
    times: int | None = None
    """How many calls it holds for, or still holds for. None: until it is cleared."""
    id: int = 0
    """Given by the host when the fault is set."""
