"""The capabilities of the worker's process and of its driver helpers (capabilities(7)). No trio here."""

import ctypes
import os
from collections.abc import Collection
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

_VERSION_3: Final = 0x20080522
_WORDS: Final = 2
"""Each set has two words of 32 bits: effective, permitted, inheritable, and so again (linux/capability.h)."""

_EFFECTIVE: Final = 0

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
