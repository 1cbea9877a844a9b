"""The state of a new simulated host: driver versions and GPUs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from leasehold_simgpu import layout
from leasehold_simgpu.chips import GIB, Chip, find_chip
from leasehold_simgpu.errors import InvalidSettingError
from leasehold_simgpu.timing import Timing

DEFAULT_DRIVER_VERSION: Final = "580.95.05"
DEFAULT_CONTEXT_BYTES: Final = 512 * 1024**2
"""About the memory of an empty context on an H100."""

CUDA_OF_BRANCH: Final[Mapping[int, int]] = {
    550: 12040,
    555: 12050,
    560: 12060,
    565: 12070,
    570: 12080,
    575: 12090,
    580: 13000,
    590: 13010,
    595: 13020,
    610: 13030,
    615: 13040,
    620: 13050,
}
"""The CUDA version of each driver branch. The checkpoint API begins with 12080, its GPU pairs with 13000."""

_LARGEST_MEMORY: Final = 1024 * GIB
_LONGEST_VERSION: Final = 31
_LONGEST_S: Final = 2**31 // 1000
_LARGEST_GBPS: Final = 1_000_000


def new_host(
    *,
    gpus: int,
    chip: str | Sequence[str],
    memory_bytes: int | None,
    driver_version: str,
    cuda_version: int | None,
    persistence_mode: bool,
    exclusive_memory: bool,
    context_bytes: int,
    timing: Timing,
    seed: int | None,
) -> layout.Host:
    """The state of a new host. See `SimulatedHost.create` for the arguments.

    Raises:
        InvalidSettingError: A value is out of range.
    """
    chips = _chips(gpus, chip)
    host = layout.Host(
        gpu_count=gpus,
        cuda_version=_cuda_of_driver(driver_version) if cuda_version is None else cuda_version,
        driver_version=driver_version.encode(),
        persistence_mode=persistence_mode,
        exclusive_memory=exclusive_memory,
        context_bytes=context_bytes,
        next_fault_id=1,
    )
    store_timing(host, timing)
    source = random.Random(seed)
    for index, kind in enumerate(chips):
        host.gpus[index] = _new_gpu(
            index, kind, kind.memory_bytes if memory_bytes is None else memory_bytes, source
        )
    return host


def store_timing(host: layout.Host, timing: Timing) -> None:
    """Writes how long checkpoints and restores take.

    Raises:
        InvalidSettingError: A time or bandwidth is negative, too large or not a number.
    """
    for seconds in (timing.suspend_fixed_s, timing.restore_fixed_s):
        if not 0 <= seconds <= _LONGEST_S:
            raise InvalidSettingError(
                f"fixed time of {seconds} s is out of range: choose 0 to {_LONGEST_S} s"
            )
    for bandwidth in (timing.suspend_bytes_per_s, timing.restore_bytes_per_s):
        if not 0 <= bandwidth <= _LARGEST_GBPS * 1e9:
            raise InvalidSettingError(
                f"bandwidth of {bandwidth / 1e9:g} GB/s is out of range: choose 0 to {_LARGEST_GBPS} GB/s"
            )
    host.suspend_fixed_us = round(timing.suspend_fixed_s * 1e6)
    host.suspend_bytes_per_s = round(timing.suspend_bytes_per_s)
    host.restore_fixed_us = round(timing.restore_fixed_s * 1e6)
    host.restore_bytes_per_s = round(timing.restore_bytes_per_s)


def uuid_text(raw: Sequence[int]) -> str:
    """A GPU's UUID as NVML writes it."""
    return f"GPU-{UUID(bytes=bytes(raw))}"


def _chips(gpus: int, chip: str | Sequence[str]) -> list[Chip]:
    if not 1 <= gpus <= layout.MAX_GPUS:
        raise InvalidSettingError(f"{gpus} GPUs cannot be simulated: choose 1 to {layout.MAX_GPUS}")
    names = [chip] * gpus if isinstance(chip, str) else list(chip)
    if len(names) != gpus:
        raise InvalidSettingError(f"{len(names)} chips for {gpus} GPUs: name one chip, or one for each GPU")
    return [find_chip(name) for name in names]


def _cuda_of_driver(driver_version: str) -> int:
    branch, _, _ = driver_version.partition(".")
    version = CUDA_OF_BRANCH.get(int(branch)) if branch.isdecimal() else None
    if version is None or len(driver_version) > _LONGEST_VERSION:
        known = ", ".join(str(branch) for branch in CUDA_OF_BRANCH)
        raise InvalidSettingError(f"driver {driver_version!r} has an unknown branch: choose one of {known}")
    return version


def _new_gpu(index: int, chip: Chip, memory_bytes: int, source: random.Random) -> layout.Gpu:
    if not 0 < memory_bytes <= _LARGEST_MEMORY:
        raise InvalidSettingError(
            f"GPU memory of {memory_bytes} bytes cannot be simulated: choose up to 1 TiB"
        )
    gpu = layout.Gpu(
        name=chip.name.encode(),
        serial=f"165{source.randrange(10**10):010d}".encode(),
        memory_bytes=memory_bytes,
        pci_bus=0x0F + 0x0F * index,
        pci_device_id=chip.pci_device_id,
        compute_major=chip.compute_capability[0],
        compute_minor=chip.compute_capability[1],
        multiprocessors=chip.multiprocessors,
        temperature_c=30 + index % 4,
        power_mw=chip.power_limit_w * 100,
        power_limit_mw=chip.power_limit_w * 1000,
    )
    gpu.uuid[:] = list(UUID(int=source.getrandbits(128), version=4).bytes)
    return gpu
