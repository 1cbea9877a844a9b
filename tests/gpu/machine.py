"""Facts of the machine that a report depends on, as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import shutil
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pynvml

GIB: Final = 2**30


def text_of(path: str) -> str | None:
    """The content of a small file. None: it can't be read."""
    with suppress(OSError):
        return Path(path).read_text().strip()
    return None


def memory_gib(name: str) -> float | None:
    """A row of /proc/meminfo."""
    for line in (text_of("/proc/meminfo") or "").splitlines():
        if line.startswith(f"{name}:"):
            return round(int(line.split()[1]) * 1024 / GIB, 1)
    return None


def cpu_name() -> str | None:
    """The model name of the first core."""
    lines = (text_of("/proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def ask(function: Any, *arguments: Any) -> Any:
    """What an NVML function answers. None: an error."""
    with suppress(pynvml.NVMLError):
        return function(*arguments)
    return None


def gpu(index: int) -> dict[str, Any]:
    """Facts of a GPU."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    bus = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    mig = ask(pynvml.nvmlDeviceGetMigMode, handle)
    processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return {
        "uuid": ask(pynvml.nvmlDeviceGetUUID, handle),
        "name": ask(pynvml.nvmlDeviceGetName, handle),
        "memory_gib": memory and round(memory.total / GIB, 1),
        "free_gib": memory and round(memory.free / GIB, 1),
        "pci_bus_id": bus and bus.busId,
        "minor": ask(pynvml.nvmlDeviceGetMinorNumber, handle),
        "persistence_mode": ask(pynvml.nvmlDeviceGetPersistenceMode, handle),
        "mig_mode": mig and mig[0],
        "processes": processes and len(processes),
    }


def machine() -> dict[str, Any]:
    """All facts."""
    found: dict[str, Any] = {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME")
        if text_of("/etc/os-release")
        else None,
        "glibc": platform.libc_ver()[1],
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_gib": memory_gib("MemTotal"),
        "memory_available_gib": memory_gib("MemAvailable"),
        "user_id": os.getuid(),
        "capabilities": next(
            (row.split()[1] for row in (text_of("/proc/self/status") or "").splitlines() if "CapEff" in row),
            None,
        ),
        "ptrace_scope": text_of("/proc/sys/kernel/yama/ptrace_scope"),
        "seccomp": "Seccomp:\t0" not in (text_of("/proc/self/status") or ""),
        "criu": shutil.which("criu"),
        "cuda_bindings": version("cuda-bindings"),
        "leasehold": version("leasehold"),
        "revision": text_of("REVISION"),
        "simulated": "LEASEHOLD_SIMGPU_DIR" in os.environ,
    }
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {**found, "nvml": str(error)}
    cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion)
    count = ask(pynvml.nvmlDeviceGetCount) or 0
    return {
        **found,
        "driver": ask(pynvml.nvmlSystemGetDriverVersion),
        "cuda": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": [gpu(index) for index in range(count)],
    }


if __name__ == "__main__":
    print(json.dumps(machine()))
