"""The simulated chips, with the facts that NVML and the driver report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from leasehold_simgpu.errors import InvalidSettingError

GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of GPU."""

    short_name: str
    """The name in options, such as `H100`."""
    name: str
    """The product name in NVML and the driver. Two GPUs with equal names are of one chip."""
    memory_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    pci_device_id: int
    """PCI device id and vendor id (0x10de), as NVML packs them."""
    power_limit_w: int


_TABLE: Final = (
    Chip("H100", "NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), 132, 0x233010DE, 700),
    Chip("H200", "NVIDIA H200", 141 * GIB, (9, 0), 132, 0x233510DE, 700),
    Chip("B200", "NVIDIA B200", 180 * GIB, (10, 0), 148, 0x290110DE, 1000),
    Chip("A100", "NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), 108, 0x20B210DE, 400),
    Chip("A10G", "NVIDIA A10G", 24 * GIB, (8, 6), 80, 0x223710DE, 300),
    Chip("L4", "NVIDIA L4", 24 * GIB, (8, 9), 58, 0x27B810DE, 72),
    Chip("L40S", "NVIDIA L40S", 48 * GIB, (8, 9), 142, 0x26B910DE, 350),
    Chip("T4", "Tesla T4", 16 * GIB, (7, 5), 40, 0x1EB810DE, 70),
)

CHIPS: Final[Mapping[str, Chip]] = MappingProxyType({chip.short_name: chip for chip in _TABLE})
"""Every chip by its short name."""


def find_chip(name: str) -> Chip:
    """Finds a chip by its short name, in upper or lower case.

    Raises:
        InvalidSettingError: There is no such chip.
    """
    chip = CHIPS.get(name.upper())
    if chip is None:
        raise InvalidSettingError(f"chip {name!r} is not simulated: choose one of {', '.join(CHIPS)}")
    return chip
