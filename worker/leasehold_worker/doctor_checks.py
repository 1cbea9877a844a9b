"""The preconditions that ``leasehold doctor`` looks at, one function each. None changes anything."""

import os
import platform
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leasehold.v1 import errors_pb2

from leasehold_worker import cgroups, processes
from leasehold_worker.checkpoint.driver import Driver
from leasehold_worker.config import WorkerConfig
from leasehold_worker.errors import OperationError, StartError
from leasehold_worker.gates import (
    PROVEN_ARCHITECTURE,
    REMAP_CUDA_VERSION,
    SUSPEND_CUDA_VERSION,
    library_version,
    version_text,
    why_unsupported,
)
from leasehold_worker.inventory import Inventory
from leasehold_worker.plan import Findings
from leasehold_worker.sizes import size_text
from leasehold_worker.state_directory import open_state_directory

BINDINGS_VERSION: Final = (13, 4)
"""From here on cuda-bindings know all states of the driver."""

CONNECT_TIMEOUT_S: Final = 2.0
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Patient:
    """What was found out about the host before the checks.

    Attributes:
        config: The worker's configuration; that of a worker that nobody configured where it is not valid.
        config_error: Why it is not valid. None: it is.
        driver: The driver, opened.
        inventory: NVML, opened.
        trace_obstacle: Why the driver helper may not trace a workload. None: it may.
        child_can_be_asked: Whether it could be asked at all.
    """

    config: WorkerConfig
    config_error: str | None
    driver: Driver
    inventory: Inventory
    trace_obstacle: str | None
    child_can_be_asked: bool


def _failed(message: str) -> OperationError:
    return OperationError(errors_pb2.ERROR_REASON_INVALID_ARGUMENT, message)


def kernel(patient: Patient, findings: Findings) -> None:
    """Linux with pidfds, and a /proc that shows the processes of others."""
    with findings.check("kernel", f"{platform.system()} {platform.release()}"):
        if not hasattr(os, "pidfd_open") or platform.system() != "Linux":
            raise _failed(f"{platform.system()} {platform.release()} has no pidfd: Linux 5.3 is needed")
    with findings.check("proc", "shows the processes of all users"):
        if not Path("/proc/1/stat").exists():
            raise _failed("/proc hides the processes of others: mount it without hidepid")


def architecture(patient: Patient, findings: Findings) -> None:
    """The processor."""
    if platform.machine() == PROVEN_ARCHITECTURE:
        findings.passed("architecture", platform.machine())
    else:
        findings.warn(
            "architecture", f"{platform.machine()}: checkpoints are proven on {PROVEN_ARCHITECTURE} only"
        )


def driver(patient: Patient, findings: Findings) -> None:
    """libcuda, and what its version can do."""
    opened = patient.driver
    path = opened.libcuda.path if opened.libcuda else "libcuda"
    for name, version, needs in (
        ("driver", SUSPEND_CUDA_VERSION, "suspend and restore"),
        ("driver_remap", REMAP_CUDA_VERSION, "moves to other GPUs"),
    ):
        with findings.check(name, f"CUDA {version_text(opened.cuda_version)} ({path}): {needs}"):
            if reason := why_unsupported(opened, version):
                raise _failed(f"no {needs}: {reason}")


def bindings(patient: Patient, findings: Findings) -> None:
    """cuda-bindings, which must know the driver's states."""
    version = patient.driver.bindings_version
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not numbers:
        findings.skip("bindings", "the driver helper did not start")
    elif numbers < BINDINGS_VERSION:
        findings.warn("bindings", f"cuda-bindings {version}: update to 13.4, which knows all driver states")
    else:
        findings.passed("bindings", f"cuda-bindings {version}")


def nvml(patient: Patient, findings: Findings) -> None:
    """NVML, and whether it speaks of the same driver as libcuda."""
    found = patient.inventory
    versions = found.versions
    with findings.check("nvml", f"NVML {versions.nvml_version}, driver {versions.driver_version}"):
        if found.unavailable_reason is not None:
            raise _failed(f"NVML can't be used ({found.unavailable_reason}): install the NVIDIA driver")
    library = patient.driver.libcuda
    version = library_version(library.path) if library else None
    if version is None or versions.driver_version is None:
        findings.skip("driver_match", "the file of libcuda does not tell its version")
        return
    with findings.check("driver_match", f"libcuda and the kernel module are both {version}"):
        if version != versions.driver_version:
            raise _failed(
                f"libcuda is {version} and the kernel module {versions.driver_version}: "
                "reboot after a driver update, and take cuda-compat out of the library path"
            )


def gpus(patient: Patient, findings: Findings) -> None:
    """The GPUs: that there are any, and none is lost."""
    found = patient.inventory.gpus
    names = ", ".join(dict.fromkeys(gpu.name for gpu in found))
    with findings.check("gpus", f"{len(found)} ({names})"):
        if not found and not patient.inventory.left_out:
            raise _failed("there is no GPU: look at nvidia-smi")
        readings = patient.inventory.read()
        lost = [uuid for uuid, reading in readings.items() if reading.lost]
        lost += patient.inventory.left_out
        if lost:
            raise _failed(f"{', '.join(lost)} fell off the bus: reset or power-cycle the host")


def modes(patient: Patient, findings: Findings) -> None:
    """MIG, MPS and persistence mode."""
    found = patient.inventory
    if not found.gpus:
        findings.skip("modes", "there is no GPU")
        return
    with findings.check("mig", "off"):
        if enabled := sorted(found.mig_enabled()):
            raise _failed(f"MIG is on for {', '.join(enabled)}: turn it off with nvidia-smi -mig 0")
    if clients := sorted(found.mps_pids()):
        pids = ", ".join(map(str, clients))
        findings.warn("mps", f"processes {pids} use MPS: they can't be suspended")
    else:
        findings.passed("mps", "not used")
    off = [gpu.uuid for gpu in found.gpus if gpu.persistence_mode is False]
    if off:
        findings.warn(
            "persistence_mode", f"off for {len(off)} GPUs, so first calls are slow: nvidia-smi -pm 1"
        )
    else:
        findings.passed("persistence_mode", "on")


def permission(patient: Patient, findings: Findings) -> None:
    """Whether the driver's calls may reach into a workload."""
    scope = _YAMA.read_text(encoding="ascii").strip() if _YAMA.exists() else "none"
    if not patient.child_can_be_asked:
        findings.skip("trace_permission", "the driver helper could not be asked")
        return
    with findings.check("trace_permission", f"granted (uid {os.geteuid()}, Yama scope {scope})"):
        if patient.trace_obstacle is not None:
            raise _failed(
                f"the worker may not trace its workloads ({patient.trace_obstacle}; uid {os.geteuid()}, Yama "
                f"scope {scope}): run it as root or with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0"
            )


def host_memory(patient: Patient, findings: Findings) -> None:
    """Whether the host could hold what a GPU holds."""
    available = processes.memory_bytes("MemAvailable")
    largest = max((gpu.memory_total_bytes or 0 for gpu in patient.inventory.gpus), default=0)
    reserve = patient.config.host_memory_reserve_bytes
    if available is None:
        findings.skip("host_memory", "the kernel does not tell MemAvailable")
    elif available - reserve < largest:
        findings.warn(
            "host_memory",
            f"{size_text(max(0, available - reserve))} are free beyond the reserve, and one GPU has "
            f"{size_text(largest)}: a full one can't be parked",
        )
    else:
        findings.passed("host_memory", f"{size_text(available - reserve)} beyond the reserve")
    limits = cgroups.memory_limits(os.getpid())
    tightest = min((limit.available_bytes for limit in limits), default=None)
    if tightest is not None and tightest < largest:
        findings.warn(
            "cgroup_memory",
            f"this control group has {size_text(tightest)} left, and one GPU has {size_text(largest)}: "
            "raise memory.max of the worker's unit or container",
        )
    else:
        left = "no limit" if tightest is None else f"{size_text(tightest)} left"
        findings.passed("cgroup_memory", left)
    total, free = processes.memory_bytes("SwapTotal") or 0, processes.memory_bytes("SwapFree") or 0
    if total - free > 0:
        findings.warn("swap", f"{size_text(total - free)} in use: parked memory that is swapped wakes slowly")
    else:
        findings.passed("swap", "not in use")


def device_nodes(patient: Patient, findings: Findings) -> None:
    """The GPUs' device nodes."""
    minors = patient.inventory.minors
    missing = [f"/dev/nvidia{minor}" for minor in minors.values() if not Path(f"/dev/nvidia{minor}").exists()]
    if len(missing) == len(minors):
        findings.skip("device_nodes", "there are none here")
        return
    with findings.check("device_nodes", f"{len(minors)} there"):
        if missing:
            raise _failed(
                f"{', '.join(missing)} missing: run nvidia-modprobe, or give the container all GPUs"
            )


def configuration(patient: Patient, findings: Findings) -> None:
    """The worker's configuration and its state directory."""
    with findings.check("configuration", f"worker {patient.config.name}"):
        if patient.config_error is not None:
            raise _failed(patient.config_error)
    path = patient.config.state_dir
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if existing != path and os.access(existing, os.W_OK):
        findings.passed("state_directory", f"{path} will be made at the first start")
        return
    with findings.check("state_directory", f"{path}, free or used by a worker that runs"):
        try:
            with open_state_directory(path):
                pass
        except StartError as error:
            if "another worker" not in str(error):
                raise _failed(str(error)) from error


def coordinator(patient: Patient, findings: Findings) -> None:
    """Whether something answers at the coordinator's address."""
    address = patient.config.coordinator
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        findings.warn(
            "coordinator", f"{address} does not answer ({error}): start it, or set coordinator in worker.toml"
        )
    else:
        findings.passed("coordinator", f"{address} answers")


CHECKS: Final[Sequence[Callable[[Patient, Findings], None]]] = (
    kernel,
    architecture,
    driver,
    bindings,
    nvml,
    gpus,
    modes,
    device_nodes,
    permission,
    host_memory,
    configuration,
    coordinator,
)
