"""The input of children of the worker: a file in memory, independent of a file system that may be full.

Variables of a workload travel in it too. As a variable of the child itself, an LD_PRELOAD would act before
the child has changed its user.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def child_input(content: bytes) -> Iterator[int]:
    """A descriptor for reading the bytes."""
    descriptor = os.memfd_create("request")
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def environment_entries(environment: Mapping[str, str]) -> bytes:
    """An environment as in /proc/PID/environ.

    Raises:
        ValueError: A variable can't be in an environment.
    """
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"invalid environment variable {name!r}: remove '=' and NUL")
    return b"\0".join(os.fsencode(f"{name}={value}") for name, value in environment.items())
