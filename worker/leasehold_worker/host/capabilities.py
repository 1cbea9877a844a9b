"""The capabilities of the worker's process (capabilities(7))."""

import ctypes
import os
from collections.abc import Collection
from typing import Final

CHOWN: Final = 0
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
"""Each set has two words of 32 bits (linux/capability.h)."""


def capability_name(number: int) -> str:
    """The name of a needed capability."""
    return _NAMES[number]


def keep_only(numbers: Collection[int]) -> None:
    """Gives up all other capabilities of this thread, and of those that it starts. Ambient ones go too.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    sets = (ctypes.c_uint32 * (3 * _WORDS))()
    _require(libc.capget(header, sets))
    for word in range(_WORDS):
        kept = sum(1 << number % 32 for number in numbers if number // 32 == word)
        for which in range(3):  # effective, permitted, inheritable
            sets[3 * word + which] &= kept
    _require(libc.capset(header, sets))


def _require(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
