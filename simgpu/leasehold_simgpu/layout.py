"""The state file of a simulated host, as `native/host/state.h` lays it out.

Both sides follow the C ABI's rules of alignment; `tests/simgpu/test_abi.py` compares every offset.
"""

from __future__ import annotations

import ctypes
from typing import Final

MAGIC: Final = 0x55504753
MAX_GPUS: Final = 16
MAX_PROCESSES: Final = 256
MAX_FAULTS: Final = 64
XIDS_KEPT: Final = 32
NO_STATE: Final = -1
UNLIMITED: Final = -1

STATE_MASK: Final = 0x07
RESIDENT: Final = 0x08
WEDGED: Final = 0x10
GATE_CLOSED: Final = 0x20
PLACEMENT: Final = 0x40

CHECKPOINT_CALLS: Final = ("get_state", "get_restore_thread_id", "lock", "checkpoint", "restore", "unlock")
"""`enum simgpu_checkpoint_call`, in its order."""


class Gpu(ctypes.Structure):
    """`struct simgpu_gpu`."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 64),
        ("serial", ctypes.c_char * 32),
        ("memory_bytes", ctypes.c_uint64),
        ("hogged_bytes", ctypes.c_uint64),
        ("ecc_corrected", ctypes.c_uint64),
        ("ecc_uncorrected", ctypes.c_uint64),
        ("throttle_reasons", ctypes.c_uint64),
        ("pci_domain", ctypes.c_uint32),
        ("pci_bus", ctypes.c_uint32),
        ("pci_device", ctypes.c_uint32),
        ("pci_device_id", ctypes.c_uint32),
        ("compute_major", ctypes.c_uint32),
        ("compute_minor", ctypes.c_uint32),
        ("multiprocessors", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("mig_enabled", ctypes.c_uint32),
        ("temperature_c", ctypes.c_uint32),
        ("utilization_percent", ctypes.c_uint32),
        ("memory_utilization_percent", ctypes.c_uint32),
        ("encoder_percent", ctypes.c_uint32),
        ("decoder_percent", ctypes.c_uint32),
        ("power_mw", ctypes.c_uint32),
        ("power_limit_mw", ctypes.c_uint32),
        ("hides_process_memory", ctypes.c_uint32),
        ("remapped_rows_corrected", ctypes.c_uint32),
        ("remapped_rows_uncorrected", ctypes.c_uint32),
        ("row_remap_pending", ctypes.c_uint32),
        ("row_remap_failed", ctypes.c_uint32),
        ("retired_pages_single_bit", ctypes.c_uint32),
        ("retired_pages_double_bit", ctypes.c_uint32),
        ("retired_pages_pending", ctypes.c_uint32),
        ("xids", ctypes.c_uint32 * XIDS_KEPT),
        ("xids_raised", ctypes.c_uint32),
    )


class Fault(ctypes.Structure):
    """`struct simgpu_fault`."""

    _fields_ = (
        ("id", ctypes.c_uint64),
        ("call", ctypes.c_char * 56),
        ("pid", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("delay_ms", ctypes.c_uint32),
        ("hang", ctypes.c_uint32),
        ("signal", ctypes.c_int32),
        ("signal_delay_ms", ctypes.c_uint32),
        ("state", ctypes.c_int32),
        ("skip", ctypes.c_uint32),
        ("keep_memory", ctypes.c_uint32),
        ("ignore_gpu_pairs", ctypes.c_uint32),
        ("remaining", ctypes.c_int32),
        ("after", ctypes.c_uint32),
    )


class Process(ctypes.Structure):
    """`struct simgpu_process`."""

    _fields_ = (
        ("pid", ctypes.c_int32),
        ("restore_tid", ctypes.c_int32),
        ("request_pipe", ctypes.c_int32),
        ("start_time", ctypes.c_uint64),
        ("id", ctypes.c_uint64),
        ("status", ctypes.c_uint32),
        ("in_flight", ctypes.c_uint32),
        ("busy", ctypes.c_uint32),
        ("channel_pid", ctypes.c_int32),
        ("channel_start_time", ctypes.c_uint64),
        ("visible_count", ctypes.c_uint32),
        ("mps_client", ctypes.c_uint32),
        ("multicast", ctypes.c_uint32),
        ("partial_passthrough", ctypes.c_uint32),
        ("profiler", ctypes.c_uint32),
        ("ipc_importer", ctypes.c_uint32),
        ("peer_group", ctypes.c_uint32),
        ("death_delay_ms", ctypes.c_uint32),
        ("death_signal", ctypes.c_uint32),
        ("placement", (ctypes.c_uint8 * MAX_GPUS) * 2),
        ("allocated_bytes", ctypes.c_uint64 * MAX_GPUS),
        ("contexts", ctypes.c_uint32 * MAX_GPUS),
        ("calls", ctypes.c_uint32 * len(CHECKPOINT_CALLS)),
        ("request", ctypes.c_uint32),
        ("request_result", ctypes.c_uint32),
        ("request_us", ctypes.c_uint64),
        ("destination", ctypes.c_uint8 * MAX_GPUS),
        ("memory_slots", ctypes.c_uint16 * MAX_GPUS),
        ("workload", ctypes.c_uint64),
    )


class Host(ctypes.Structure):
    """`struct simgpu_host`: the whole file."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("layout_bytes", ctypes.c_uint32),
        ("gpu_count", ctypes.c_uint32),
        ("cuda_version", ctypes.c_uint32),
        ("driver_version", ctypes.c_char * 32),
        ("persistence_mode", ctypes.c_uint32),
        ("exclusive_memory", ctypes.c_uint32),
        ("context_bytes", ctypes.c_uint64),
        ("suspend_fixed_us", ctypes.c_uint64),
        ("suspend_bytes_per_s", ctypes.c_uint64),
        ("restore_fixed_us", ctypes.c_uint64),
        ("restore_bytes_per_s", ctypes.c_uint64),
        ("next_fault_id", ctypes.c_uint64),
        ("next_record_id", ctypes.c_uint64),
        ("fault_count", ctypes.c_uint32),
        ("lock_holder", ctypes.c_uint32),
        ("gpus", Gpu * MAX_GPUS),
        ("faults", Fault * MAX_FAULTS),
        ("processes", Process * MAX_PROCESSES),
    )
