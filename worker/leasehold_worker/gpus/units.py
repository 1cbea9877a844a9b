"""Throughput units of GPU models: the weight of one GPU when work is matched to GPUs."""

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

logger = logging.getLogger(__name__)

DEFAULT_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        # The values of studio-go-runner, which began this scale.
        "GTX 1050": 2,
        "GTX 1060": 2,
        "GTX 1070": 2,
        "GTX 1080": 2,
        "TITAN X": 2,
        "TITAN Xp": 2,
        "RTX 2080 Ti": 2,
        "K80": 2,
        "P40": 4,
        "P100": 8,
        "V100": 16,
        "A100": 24,
        # Ours, and rough: dense half-precision throughput beside an A100's, with an eye on memory bandwidth.
        "P4": 2,
        "T4": 4,
        "A2": 2,
        "L4": 8,
        "A10": 10,
        "A10G": 10,
        "A16": 2,
        "A30": 14,
        "A40": 12,
        "RTX 3090": 8,
        "RTX 4090": 14,
        "RTX 5090": 18,
        "RTX A6000": 12,
        "Quadro RTX 6000": 6,
        "RTX 6000 Ada": 24,
        "L40": 14,
        "L40S": 24,
        "A100 80GB": 28,
        "A100-SXM4-80GB": 28,
        "A800": 24,
        "H20": 20,
        "H100 PCIe": 52,
        "H100": 72,
        "H800": 72,
        "H200": 80,
        "GH200": 80,
        "B200": 160,
        "GB200": 160,
        "B300": 160,
        "GB300": 160,
    }
)
"""Units by a part of the product name, as whole words."""

UNKNOWN_UNITS: Final = 1
"""Units of a model that no table has."""


@final
class GpuUnits:
    """The table of models.

    Args:
        overrides: Units by a part of the product name. They override the default table, however short.
    """

    def __init__(self, overrides: Mapping[str, int] = MappingProxyType({})) -> None:
        self._tables = (overrides, DEFAULT_UNITS)
        self._warned: set[str] = set()

    def of(self, name: str) -> int:
        """The units of a product such as "NVIDIA H100 80GB HBM3"; the longest part that matches decides.

        An unknown model counts 1, which is logged once.
        """
        for table in self._tables:
            matching = [part for part in table if _has_words(name, part)]
            if matching:
                return table[max(matching, key=len)]
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "GPU model %r has no known throughput units and counts as %d: set them under gpu_units",
                name,
                UNKNOWN_UNITS,
            )
        return UNKNOWN_UNITS


def _has_words(name: str, part: str) -> bool:
    """Whether the part occurs in the name as whole words, in any case of letters: an A100 is not an A10."""
    if part.lower() not in name.lower():
        return False  # the common case, much faster than a regular expression
    return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", name, re.IGNORECASE) is not None
