"""The health verdict of a GPU, from one reading of NVML: whether it may get work, and why not. Pure.

:mod:`leasehold_worker.gpus.inventory` asks NVML. :mod:`leasehold_worker.gpus.health_monitor` repeats it.
This module is stateless. The pool keeps a bad verdict until an operator clears it, because a GPU that another
program has reset looks healthy again, and NVML reports an Xid only once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from leasehold.v1 import gpu_pb2


@dataclass(frozen=True, slots=True)
class HealthReading:
    """NVML's reading of a GPU's condition. An unknown value is None, never zero."""

    lost: bool = False
    """The GPU has fallen off the bus, or no longer answers."""
    reset_required: bool = False
    """NVML refuses queries until the GPU is reset."""
    ecc_uncorrected_errors: int | None = None
    """Uncorrectable memory errors since the driver was loaded. Unknown if ECC is off."""
    row_remap_pending: bool | None = None
    """A row of memory waits for a reset to be replaced. Unknown before Ampere."""
    row_remap_failed: bool | None = None
    """A bad row could not be replaced."""
    retired_pages: int | None = None
    """Pages of memory that are retired, or will be after a reset. Unknown from Ampere on."""
    retired_pages_pending: bool | None = None
    """A bad page is in use until the GPU is reset."""
    mig_enabled: bool | None = None
    throttle_reasons: int | None = None
    """Bits of NVML's nvmlClocksEventReasons: why the clocks are not higher."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a GPU is healthy, with the reason: empty only for GPU_HEALTH_OK."""

    health: gpu_pb2.GpuHealth.ValueType
    reason: str = ""


RETIRED_PAGES_LIMIT: Final = 60
"""From how many retired pages on a GPU is worn out: DCGM's diagnosis fails at as many
(DCGM_LIMIT_MAX_RETIRED_PAGES), for NVIDIA takes such a board back. A GPU can retire 64."""

RESET_XIDS: Final[Mapping[int, str]] = {
    46: "the GPU stopped processing",
    48: "a double-bit memory error",
    62: "its power management unit halted",
    64: "a bad row or page of its memory could not be disabled",
    74: "an NVLink error",  # NVIDIA wants the link examined: it is often hardware, and takes the peers along
    79: "it has fallen off the bus",
    95: "a memory error that may have hit every application",
    109: "a context switch timed out",  # the k8s-device-plugin lists it as an application error
    110: "a security fault",
    119: "its firmware (GSP) does not answer",
    120: "its firmware (GSP) failed",
    136: "NVLink could not be trained",
    140: "memory errors that the driver could not contain",
    143: "it could not be initialised",
    155: "an NVLink error that software defined",
    156: "a part of it was retired",
    158: "a fatal timeout",
}
"""Xids after which a GPU needs a reset, a repair or a restart of the host, with their meaning. In NVIDIA's
"Xid Catalog" (docs.nvidia.com/deploy/xid-errors) their immediate action is RESET_GPU, RESTART_BM or a
workflow that ends there, on any chip from Ampere on."""

HARMLESS_XIDS: Final[Mapping[int, str]] = {
    8: "the work of a program took too long",
    11: "a program's commands were invalid",
    13: "a CUDA kernel performed an illegal operation",
    25: "a program's commands were illegal",
    31: "a CUDA kernel used an invalid address",
    32: "a program's commands were damaged",
    37: "a program asked for an operation that the firmware lacks",
    43: "a program was stopped after its own error",
    44: "a program failed while it was switched out",
    45: "a program's channels were removed as it ended, or after another error",
    63: "a bad row or page was recorded",  # NVML's pending flags say whether a reset is needed
    68: "a program's video work failed",
    69: "a program's graphics commands were illegal",
    80: "the commands of a program were damaged in transit",
    92: "many memory errors, all of them corrected",
    94: "a memory error that hit one application only",  # NVML's counters show the memory errors
    154: "the driver recommends another recovery action",  # accompanies another Xid
}
"""Xids after which the GPU itself works on, with their meaning: the catalog's action is to restart the
program, or none. An Xid in neither table excludes no GPU either: the readings show its effect."""

_THROTTLING: Final[Mapping[int, str]] = {
    0x08: "hardware slowdown",
    0x20: "thermal limit, by software",
    0x40: "thermal limit, by hardware",
    0x80: "power brake",
}
"""Clock reasons that indicate a problem (nvml.h, nvmlClocksEventReasons). The others are normal: idle, clocks
set by an operator, and the power cap of a GPU under full load."""

_FALLEN_OFF_THE_BUS: Final = 79
_TRUSTED: Final = frozenset(
    {
        gpu_pb2.GPU_HEALTH_UNSPECIFIED,
        gpu_pb2.GPU_HEALTH_OK,
        gpu_pb2.GPU_HEALTH_THROTTLED,
    }
)
_RESET: Final = "end the work on it, and reset it with nvidia-smi --gpu-reset"
_RESTART: Final = "restart the host, and check the GPU's seat"
_CLEAR: Final = "`leasehold gpu reset-health WORKER/SLOT`"


def excludes(health: gpu_pb2.GpuHealth.ValueType) -> bool:
    """Whether a GPU with this verdict gets no work. A throttled one gets work: it is only slow."""
    return health not in _TRUSTED


def _excluded(health: gpu_pb2.GpuHealth.ValueType, problem: str, remedy: str) -> Verdict:
    """A verdict that excludes the GPU. It stays after the remedy, until an operator clears it."""
    return Verdict(health, f"{problem}: {remedy}; then run {_CLEAR}")


def judge(reading: HealthReading) -> Verdict:
    """The verdict on a reading, by its worst value. An unknown property counts as healthy.

    Pages that *were* retired are wear, not failure: they are out of use, and the GPU goes on without them. So
    they count from RETIRED_PAGES_LIMIT on, or while a bad page is still in use. Likewise rows that were
    remapped don't count: only a remap that waits for a reset, or that failed.
    """
    return (
        _judge_presence(reading)
        or _judge_memory(reading)
        or _judge_mode(reading)
        or Verdict(gpu_pb2.GPU_HEALTH_OK)
    )


def judge_xid(xid: int) -> Verdict | None:
    """The verdict on an Xid of a GPU. None: the readings decide."""
    meaning = RESET_XIDS.get(xid)
    if meaning is None:
        return None
    if xid == _FALLEN_OFF_THE_BUS:
        return _excluded(gpu_pb2.GPU_HEALTH_LOST, f"Xid {xid}, {meaning}", _RESTART)
    return _excluded(gpu_pb2.GPU_HEALTH_XID_ERROR, f"Xid {xid}, {meaning}", _RESET)


def _judge_presence(reading: HealthReading) -> Verdict | None:
    if reading.lost:
        return _excluded(gpu_pb2.GPU_HEALTH_LOST, "NVML reports the GPU as lost", _RESTART)
    if reading.reset_required:
        return _excluded(gpu_pb2.GPU_HEALTH_XID_ERROR, "NVML reports that the GPU needs a reset", _RESET)
    return None


def _judge_memory(reading: HealthReading) -> Verdict | None:
    if reading.ecc_uncorrected_errors:
        return _excluded(
            gpu_pb2.GPU_HEALTH_ECC_FAILED,
            f"{reading.ecc_uncorrected_errors} uncorrectable memory errors since the driver was loaded",
            _RESET,
        )
    if reading.row_remap_failed:
        return Verdict(
            gpu_pb2.GPU_HEALTH_ROW_REMAP_FAILED,
            "a bad row of its memory could not be replaced: run NVIDIA's field diagnostic, and replace the "
            f"GPU if the diagnostic fails; otherwise run {_CLEAR}",
        )
    if reading.row_remap_pending:
        return _excluded(
            gpu_pb2.GPU_HEALTH_ROW_REMAP_FAILED, "a bad row of its memory waits to be replaced", _RESET
        )
    if reading.retired_pages_pending:
        return _excluded(
            gpu_pb2.GPU_HEALTH_PAGES_RETIRED, "a bad page of its memory waits to be retired", _RESET
        )
    if reading.retired_pages is not None and reading.retired_pages >= RETIRED_PAGES_LIMIT:
        return Verdict(  # another GPU has another UUID, and no verdict to clear
            gpu_pb2.GPU_HEALTH_PAGES_RETIRED,
            f"{reading.retired_pages} pages of its memory are retired, and a GPU with "
            f"{RETIRED_PAGES_LIMIT} or more is worn out: replace the GPU",
        )
    return None


def _judge_mode(reading: HealthReading) -> Verdict | None:
    if reading.mig_enabled:
        return _excluded(
            gpu_pb2.GPU_HEALTH_MIG_ENABLED,
            "MIG is on, and its processes can't be checkpointed",
            "turn it off with nvidia-smi -mig 0",
        )
    reasons = reading.throttle_reasons or 0
    slowed = [meaning for bit, meaning in _THROTTLING.items() if reasons & bit]
    if slowed:
        return Verdict(
            gpu_pb2.GPU_HEALTH_THROTTLED,
            f"its clocks are throttled ({', '.join(slowed)}): check its cooling and power",
        )
    return None
