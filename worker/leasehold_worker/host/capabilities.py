"""The capabilities of the worker's process and of its driver helpers (capabilities(7)). No trio here."""

import ctypes
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

CHOWN: Final = 0
DAC_OVERRIDE: Final = 1
KILL: Final = 5
SETGID: Final = 6
SETUID: Final = 7
SYS_PTRACE: Final = 19

_NAMES: Final = {
    CHOWN: "CAP_CHOWN",
    KILL: "CAP_KILL",
    SETGID: "CAP_SETGID",
    SETUID: "CAP_SETUID",
    SYS_PTRACE: "CAP_SYS_PTRACE",
}

NEEDED: Final = frozenset(_NAMES)
"""All that a worker without root needs for programs of other users: docs/security.md has the reasons."""

FOR_MAPPED_USERS: Final = frozenset({CHOWN, SETGID})
"""The capabilities for programs and folders of other users. The group of the socket needs CAP_CHOWN too."""

NOT_NEEDED_BY_ROOT: Final = {
    9: "CAP_LINUX_IMMUTABLE",
    11: "CAP_NET_BROADCAST",
    17: "CAP_SYS_RAWIO",
    20: "CAP_SYS_PACCT",
    22: "CAP_SYS_BOOT",
    25: "CAP_SYS_TIME",
    26: "CAP_SYS_TTY_CONFIG",
    29: "CAP_AUDIT_WRITE",
    32: "CAP_MAC_OVERRIDE",
    33: "CAP_MAC_ADMIN",
    34: "CAP_SYSLOG",
    35: "CAP_WAKE_ALARM",
    36: "CAP_BLOCK_SUSPEND",
    37: "CAP_AUDIT_READ",
}
"""The capabilities that neither a worker of root, nor its CRIU, nor the driver uses.

CAP_SYS_MODULE is kept: the first call of libcuda or NVML has nvidia-modprobe load the driver's modules.
"""

_VERSION_3: Final = 0x20080522
_WORDS: Final = 2
"""Each set has two words of 32 bits: effective, permitted, inheritable, and so again (linux/capability.h)."""

_EFFECTIVE: Final = 0
_CAPBSET_DROP: Final = 24
_EVERY: Final = range(32 * _WORDS)

_libc: Final = ctypes.CDLL(None, use_errno=True)


def capability_name(number: int) -> str:
    """The name of a needed capability."""
    return _NAMES[number]


def is_effective(number: int) -> bool:
    """Whether this thread has a capability in its effective set.

    Raises:
        OSError: The kernel refuses.
    """
    return bool(_sets()[3 * (number // 32) + _EFFECTIVE] >> number % 32 & 1)


def give_up_unneeded(users_path: Path, *, has_run_as: bool, has_socket_group: bool = False) -> None:
    """Gives up what a worker never needs. Call it before any other thread starts.

    A worker of root without ``run_as`` keeps all: its programs are root's, as its callers could start them.
    The arguments are those of :func:`needed_without_root`.

    Raises:
        OSError: The kernel refuses.
    """
    if os.geteuid() != 0:
        keep_only(needed_without_root(users_path, has_run_as=has_run_as, has_socket_group=has_socket_group))
    elif has_run_as:
        for number in NOT_NEEDED_BY_ROOT:
            # EINVAL: the kernel is older than the capability. EPERM: a container has fixed the bounding set.
            _libc.prctl(_CAPBSET_DROP, number, 0, 0, 0)
        keep_only(frozenset(_EVERY) - NOT_NEEDED_BY_ROOT.keys())


def needed_without_root(
    users_path: Path, *, has_run_as: bool, has_socket_group: bool = False
) -> frozenset[int]:
    """The capabilities that a worker without root needs with these settings. The call may block.

    Args:
        users_path: The parent of the folders of other Unix users. An earlier ``run_as`` may have left folders
            there, and the worker changes to their users to remove them.
        has_run_as: Whether programs run as other Unix users.
        has_socket_group: Whether the settings name a group for the socket, which may lack the worker's user.
    """
    maps_users = has_run_as
    with suppress(OSError):  # the start names a directory that can't be read
        maps_users |= users_path.is_dir()
    if maps_users:
        return NEEDED
    return NEEDED - FOR_MAPPED_USERS | ({CHOWN} if has_socket_group else set())


def keep_only(numbers: Collection[int]) -> None:
    """Gives up all other capabilities of this thread, and of those that it starts. Ambient ones go too.

    Raises:
        OSError: The kernel refuses.
    """
    sets = _sets()
    for word in range(_WORDS):
        kept = sum(1 << number % 32 for number in numbers if number // 32 == word)
        for which in range(3):
            sets[3 * word + which] &= kept
    _require(_libc.capset(_header(), sets))


def _sets() -> "ctypes.Array[ctypes.c_uint32]":
    sets = (ctypes.c_uint32 * (3 * _WORDS))()
    _require(_libc.capget(_header(), sets))
    return sets


def _header() -> "ctypes.Array[ctypes.c_uint32]":
    return (ctypes.c_uint32 * 2)(_VERSION_3, 0)


def _require(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
