"""The environment that programs and hooks inherit from the worker: useful variables, no secrets."""

import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

INHERITED: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "XDG_*",
    "LD_LIBRARY_PATH",
    "CUDA_*",
    "NVIDIA_*",
    "NCCL_*",
    "LEASEHOLD_COORDINATOR",
    "LEASEHOLD_SIMGPU_DIR",
    "LEASEHOLD_TEST_RUN",
)
"""Names of variables; a star matches any characters."""


def inherited_environment(
    more: Collection[str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that programs and hooks inherit.

    Args:
        more: Further names, by the worker's settings.
        environment: The worker's environment.
    """
    names = (*INHERITED, *more)
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in names)
    }
