"""The environment that programs and hooks inherit from the worker: useful variables, no secrets."""

import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

from leasehold_worker.host.accounts import Account

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


_OF_THE_WORKER: Final = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "XDG_*")
"""Variables that describe the worker's own user. Patterns as above."""


def user_environment(inherited: Mapping[str, str], account: Account | None) -> dict[str, str]:
    """The inherited variables of a program that runs as a Unix user. None: as the worker's user."""
    if account is None:
        return dict(inherited)
    others = {
        name: value
        for name, value in inherited.items()
        if not any(fnmatchcase(name, pattern) for pattern in _OF_THE_WORKER)
    }
    user = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    return {"PATH": os.defpath, **others, **user}
