"""A program that forks and exits all the time, each process in a session of its own."""

from typing import Final

CHAIN: Final = """
import os, sys
links = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
for _ in range(20_000):
    if os.fork():
        break
    os.write(links, b".")
    os.setsid()
"""
"""The argument is a file, to which each process adds a byte. The chain ends after 20,000 processes."""
