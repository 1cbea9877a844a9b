"""The memory of other processes, by process_vm_readv(2), which asks for the right to trace and nothing else.

Files such as ``/proc/PID/environ`` also ask for the file permissions of the process's user. A worker without
root has CAP_SYS_PTRACE, and not CAP_DAC_OVERRIDE. Driver helpers take the user's file-system id instead
(driver/target_access.py). The worker has many threads and must stay dumpable.
"""

import ctypes
import os
from typing import Final


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc: Final = ctypes.CDLL(None, use_errno=True)


def read_memory(pid: int, address: int, length: int) -> bytes:
    """Bytes of a process's memory, as many as can be read.

    Raises:
        OSError: EPERM: this process may not trace the other. EFAULT: there is no memory at the address.
    """
    buffer = ctypes.create_string_buffer(length)
    local = _Vector(ctypes.addressof(buffer), length)
    remote = _Vector(address, length)
    vectors = (ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1))
    count = _libc.process_vm_readv(pid, *vectors, ctypes.c_ulong(0))
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw[:count]
