"""Facts of the machine that affect the figures of every benchmark."""

import os
import platform
from importlib.metadata import version


def machine(*packages: str) -> dict[str, object]:
    """The processors, memory, kernel and Python of this machine, and the versions of these packages."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu_count": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package.replace("-", "_"): version(package) for package in packages},
    }
