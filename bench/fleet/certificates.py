"""Certificates of light workers."""

from pathlib import Path

from leasehold_client.config import state_directory

from bench.light_workers import name_of
from tests.certificates import enrol


def enrol_workers(folder: Path, count: int) -> Path:
    """Enrols the workers in a store that no coordinator serves now. Returns the directory of all."""
    names = [name_of(number) for number in range(count)]
    holders = enrol(folder / "store.sqlite3", state_directory(), *(f"worker/{name}" for name in names))
    for name, holder in zip(names, holders, strict=True):
        holder.write(folder / "credentials" / name, "worker")
    return folder / "credentials"
