"""Checks of the driver and the GPUs for ``leasehold doctor``. They change nothing."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.diagnostics.examination import Examination, failed, not_checked, warning
from leasehold_worker.planning.driver_checks import (
    REMAP_CUDA_VERSION,
    SUSPEND_CUDA_VERSION,
    library_version,
    version_text,
    why_unsupported,
)

BINDINGS_VERSION: Final = (13, 4)
"""First version of cuda-bindings that knows all states of the driver."""

MPS_COMMAND: Final = "nvidia-cuda-mps"
"""Names of the MPS control daemon and server in the kernel, which keeps 15 characters."""

_REMEDIES: Final = {
    "CUDA_ERROR_NO_DEVICE": "load the nvidia kernel module, or give the container its GPUs",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, which GPUs on NVSwitch need",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "reboot after a driver update, or take cuda-compat off the path",
}
_PROC: Final = Path("/proc")


def libcuda(patient: Examination) -> str:
    """Whether libcuda loads in the driver helper, and cuInit works there."""
    driver = patient.driver
    reason = driver.unavailable_reason
    if reason is None:
        return f"{driver.libcuda.path if driver.libcuda else 'libcuda'}, initialised"
    if driver.libcuda is not None:
        remedy = _REMEDIES.get(reason.removeprefix("cuInit: "), "look at nvidia-smi, and for Xid in dmesg")
        raise failed(f"{driver.libcuda.path} loads, but fails ({reason}): {remedy}")
    if "did not return" in reason:
        raise failed(f"{reason}: look at nvidia-smi, and for Xid in dmesg; a reboot may be needed")
    if reason.startswith("the driver helper"):
        raise failed(f"{reason}: solve that first, since it loads libcuda")
    raise failed(
        f"libcuda can't be loaded ({reason}): install the NVIDIA driver, or give the container its GPUs"
    )


def driver(patient: Examination) -> str:
    """Whether the driver has the checkpoint API."""
    return _version(patient, SUSPEND_CUDA_VERSION, "suspend and restore")


def driver_remap(patient: Examination) -> str:
    """Whether the driver can restore on other GPUs."""
    return _version(patient, REMAP_CUDA_VERSION, "moves to other GPUs")


def _version(patient: Examination, needed: int, what: str) -> str:
    if patient.driver.unavailable_reason is not None:
        raise not_checked("libcuda can't be used")
    if reason := why_unsupported(patient.driver, needed):
        raise failed(f"no {what}: {reason}")
    return f"CUDA {version_text(patient.driver.cuda_version)}: {what}"


def bindings(patient: Examination) -> str:
    """cuda-bindings, and whether its version knows the driver's states."""
    try:
        found = version("cuda-bindings")
    except PackageNotFoundError:
        raise failed(
            "cuda-bindings is not installed: install the wheel of Leasehold with the extra worker"
        ) from None
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < BINDINGS_VERSION:
        wanted = ".".join(map(str, BINDINGS_VERSION))
        raise warning(
            f"cuda-bindings {found} is too old: update to {wanted}, which knows all states of the driver"
        )
    return f"cuda-bindings {found}"


def nvml(patient: Examination) -> str:
    """Whether NVML loads and answers."""
    inventory = patient.inventory
    if inventory is None:
        raise failed("NVML does not answer: look at nvidia-smi, and for Xid in dmesg; a reboot may be needed")
    if inventory.unavailable_reason is not None:
        raise failed(f"NVML can't be used ({inventory.unavailable_reason}): install the NVIDIA driver")
    return f"NVML {inventory.versions.nvml_version}, driver {inventory.versions.driver_version}"


def driver_match(patient: Examination) -> str:
    """Whether libcuda is of the same driver as the kernel module."""
    kernel_module = patient.nvml().versions.driver_version
    library = patient.driver.libcuda
    if library is None or kernel_module is None:
        raise not_checked("the version of libcuda or of the kernel module is unknown")
    user_mode = library_version(library.path)
    if user_mode is None:
        raise not_checked("the file name of libcuda contains no version")
    if user_mode != kernel_module:
        raise failed(
            f"libcuda is {user_mode} and the kernel module {kernel_module}: reboot after a driver update, or "
            "take cuda-compat out of the library path"
        )
    return f"libcuda and the kernel module are both {user_mode}"


def gpus(patient: Examination) -> str:
    """Whether there are GPUs, and all answer."""
    inventory = patient.nvml()
    if inventory.left_out:
        raise failed(
            f"{'; '.join(inventory.left_out)}: look at nvidia-smi, and reset or power-cycle the host"
        )
    if not inventory.gpus:
        raise failed("NVML lists no GPU: see nvidia-smi, or give the container its GPUs")
    if lost := [uuid for uuid, reading in inventory.read().items() if reading.lost]:
        raise failed(f"{', '.join(lost)} fell off the bus: reset or power-cycle the host")
    if untold := [gpu.uuid for gpu in inventory.gpus if gpu.memory_total_bytes is None]:
        raise warning(
            f"NVML reports no memory size of {', '.join(untold)}, so plans can't tell whether "
            "a workload fits: update the driver, or use such GPUs for one workload at a time"
        )
    memory: dict[str, int] = {}
    for gpu in inventory.gpus:
        kind = f"{gpu.name}, {size_text(gpu.memory_total_bytes or 0)}"
        memory[kind] = memory.get(kind, 0) + 1
    return "; ".join(f"{count} x {kind}" for kind, count in memory.items())


def mig(patient: Examination) -> str:
    """Whether MIG is off."""
    patient.gpus()
    if enabled := sorted(patient.nvml().mig_enabled()):
        raise failed(f"on for {', '.join(enabled)}, where no workload can be suspended: nvidia-smi -mig 0")
    return "off"


def mps(patient: Examination) -> str:
    """Whether no process uses MPS, nor a new one would."""
    patient.gpus()
    if clients := sorted(patient.nvml().mps_pids()):
        pids = ", ".join(map(str, clients))
        raise warning(f"processes {pids} use MPS and can't be suspended: start them without it")
    if daemons := mps_daemons(_PROC):
        pids = ", ".join(map(str, daemons))
        raise warning(
            f"the MPS daemon runs (process {pids}), and new programs may become its clients, "
            "which can't be suspended: echo quit | nvidia-cuda-mps-control"
        )
    return "not used"


def mps_daemons(proc: Path) -> list[int]:
    """Ids of the MPS processes, in a proc file system."""
    found: list[int] = []
    for path in proc.glob("[0-9]*/comm"):
        try:
            command = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if command.startswith(MPS_COMMAND):
            found.append(int(path.parent.name))
    return sorted(found)


def persistence_mode(patient: Examination) -> str:
    """Whether the driver stays loaded while no process uses a GPU."""
    off = [gpu.uuid for gpu in patient.gpus() if gpu.persistence_mode is False]
    if off:
        raise warning(
            f"off for {len(off)} of {len(patient.gpus())}, so first calls are slow: nvidia-smi -pm 1"
        )
    return "on"


def device_nodes(patient: Examination) -> str:
    """Whether each GPU has its device node."""
    patient.gpus()
    nodes = [Path(f"/dev/nvidia{minor}") for minor in patient.nvml().minors.values()]
    missing = [str(node) for node in nodes if not node.exists()]
    if len(missing) == len(nodes):
        raise not_checked("this host has none")
    if missing:
        raise failed(f"{', '.join(missing)} missing: run nvidia-modprobe, or give the container all GPUs")
    return f"all {len(nodes)} are present"
