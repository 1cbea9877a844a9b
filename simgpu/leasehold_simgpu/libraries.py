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
LAYERS: Final = {
    "libcuda.so.1": ("host", "memory", "process", "checkpoint", "calls", "lookup"),
    "libnvidia-ml.so.1": ("host", "nvml"),
}
"""The layers of each library, lowest first: folders of SOURCES. A layer calls only itself and lower ones."""

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
        CompilerError: There is no C compiler, or the compiler failed. The compiler is `$CC`, or else `cc`. Or
            the directory can't be written.
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
    try:
        finished.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=finished.parent))
    except OSError as error:
        raise CompilerError(
            f"simgpu can't keep its libraries in {finished.parent} ({error.strerror}): name a directory that "
            "you may write with XDG_CACHE_HOME"
        ) from error
    try:
        for library in LAYERS:
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
    digest = hashlib.sha256(repr((compiler, _FLAGS, LAYERS)).encode())
    for path in sorted(SOURCES.rglob("*.[ch]")):
        digest.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, library: str, directory: Path) -> None:
    sources = [str(source) for layer in LAYERS[library] for source in sorted((SOURCES / layer).glob("*.c"))]
    output = str(directory / library)
    command = [compiler, *_FLAGS, "-I", str(SOURCES), f"-Wl,-soname,{library}", "-o", output, *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompilerError(f"{compiler} could not build {library}:\n{done.stderr.strip()}")
