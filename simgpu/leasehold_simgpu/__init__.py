"""A simulated GPU host: `libcuda.so.1` and `libnvidia-ml.so.1` that behave like NVIDIA's, without a GPU.

Programs that use CUDA through cuda-python, and NVML through nvidia-ml-py, run unchanged in an environment
that puts these libraries first:

    host = SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100")
    environment = {**os.environ, **host.environment()}
    child = subprocess.Popen([sys.executable, "examples/counter.py"], env=environment)
    ...
    host.processes()                       # pid, state, bytes by GPU UUID
    host.set_fault("restore", pid, error=2, times=1)   # the next restore of that process: out of memory
    host.set_busy(pid)                     # a lock of the process does not drain
    host.set_mps_client(pid)               # a checkpoint is refused, and NVML lists an MPS client
    host.process(pid).calls["restore"]     # number of restore calls for the process
    host.hog(0, 70 * GIB)                  # GPU 0 has 70 GiB less free memory
    host.lose_gpu(1)                       # NVML_ERROR_GPU_IS_LOST
    host.set_readings(2, ecc_uncorrected=1, mig_enabled=True, temperature_c=91)
    host.set_readings(2, row_remap_pending=True, throttle_reasons=ThrottleReason.HW_THERMAL_SLOWDOWN)
    host.raise_xid(2, 48)                  # NVML's event, in every process that registered for it
    host.clear_faults()

Or from the command line: `leasehold simgpu exec --gpus 4 --chip H100 -- COMMAND`.

Simulated: the driver API for allocation, copies, fills and waits; the checkpoint API of CUDA 12.8 and 13.0;
NVML's inventory, readings, health, Xid events and process lists. Not simulated: kernels and modules, the CUDA
runtime API, IPC, peer access, managed memory, MIG instances, MPS beyond its marks, and the custom storage of
CUDA 13.4.

Never load the libraries into a process that started without that environment: the loader reads
LD_LIBRARY_PATH once. This package itself loads neither library, and only maps the host's state file.
"""

from __future__ import annotations

from leasehold_simgpu.chips import CHIPS, GIB, Chip, find_chip
from leasehold_simgpu.errors import (
    CompilerError,
    HostLockedError,
    InvalidSettingError,
    NoSuchHostError,
    SimgpuError,
)
from leasehold_simgpu.faults import CALL_OF_ACTION
from leasehold_simgpu.host import SimulatedHost
from leasehold_simgpu.libraries import build
from leasehold_simgpu.records import Fault, ProcessState, SimulatedGpu, SimulatedProcess, ThrottleReason
from leasehold_simgpu.timing import Timing

__all__ = [
    "CALL_OF_ACTION",
    "CHIPS",
    "GIB",
    "Chip",
    "CompilerError",
    "Fault",
    "HostLockedError",
    "InvalidSettingError",
    "NoSuchHostError",
    "ProcessState",
    "SimgpuError",
    "SimulatedGpu",
    "SimulatedHost",
    "SimulatedProcess",
    "ThrottleReason",
    "Timing",
    "build",
    "find_chip",
]
