"""Compiles the simulated `libcuda.so.1` and `libnvidia-ml.so.1`, once for each content of their sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from leasehold_simgpu.errors import CompilerError

SOURCES: Final = Path(__file__).parent / "native"
_SHARED: Final = ("state.c", "process_table.c", "faults.c")
_LIBRARIES: Final = {
    "libcuda.so.1": (
        *_SHARED,
        "allocations.c",
        "checkpoint.c",
        "checkpoint_channel.c",
        "contexts.c",
        "copies.c",
        "delayed_death.c",
        "device_memory.c",
        "devices.c",
        "entry_points.c",
        "errors.c",
        "export_tables.c",
        "gate.c",
        "get_proc_address.c",
        "gpu_pairs.c",
        "host_copies.c",
        "init.c",
        "memory.c",
        "memory_pools.c",
        "memory_slots.c",
        "pinned_memory.c",
        "residence.c",
        "restore_thread.c",
        "streams.c",
        "target_marks.c",
        "visible_devices.c",
    ),
    "libnvidia-ml.so.1": (
        *_SHARED,
        "nvml_devices.c",
        "nvml_events.c",
        "nvml_board.c",
        "nvml_unsupported.c",
        "nvml_health.c",
        "nvml_processes.c",
        "nvml_system.c",
    ),
}
_FLAGS: Final = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    # nodelete: the CUDA runtime closes the library at exit, while the restore thread still runs its code.
    *("-Wall", "-Wextra", "-Wl,-z,defs", "-Wl,-z,nodelete"),
)


def build() -> Path:
    """Builds the two libraries unless they exist.

    They are in `$XDG_CACHE_HOME/leasehold/simgpu/<hash>`. The hash covers the sources, the flags and the
    compiler's name. Concurrent builds are safe: each compiles in a directory of its own, then renames it.

    Returns:
        The directory of the two libraries, for LD_LIBRARY_PATH.

    Raises:
        CompilerError: There is no C compiler, or the compiler failed. The compiler is `$CC`, or else `cc`.
    """
    compiler = os.environ.get("CC") or "cc"
    finished = _cache() / _content_hash(compiler)
    if finished.is_dir():
        return finished
    if shutil.which(compiler) is None:
        raise CompilerError(
            f"C compiler {compiler!r} not found: simgpu compiles its libraries on first use. "
            "Install one (Debian: apt install gcc libc6-dev) or name one in CC"
        )
    finished.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=finished.parent))
    try:
        for library in _LIBRARIES:
            _compile(compiler, library, work)
        work.chmod(0o755)
        try:
            work.rename(finished)
        except OSError:
            if not finished.is_dir():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return finished


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "leasehold" / "simgpu"


def _content_hash(compiler: str) -> str:
    digest = hashlib.sha256(repr((compiler, _FLAGS, _LIBRARIES)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in {".c", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, library: str, directory: Path) -> None:
    sources = [str(SOURCES / name) for name in _LIBRARIES[library]]
    output = str(directory / library)
    command = [compiler, *_FLAGS, f"-Wl,-soname,{library}", "-o", output, *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompilerError(f"{compiler} could not build {library}:\n{done.stderr.strip()}")
