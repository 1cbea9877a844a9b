"""The environment of a test run: the same on every machine, and empty again at the end.

The first process of pytest sets up the environment before it starts others, which inherit it. Every
file of a test goes below one folder, and every process of a test carries the run's mark. The end of the run
reports what was left behind.
"""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from _pytest.mark.expression import Expression

T = TypeVar("T")

ROOT: Final = Path(__file__).resolve().parents[1]

CRIU: Final = ROOT / ".cache/criu/criu"
"""What ``make criu`` builds. Tests use no other."""

MARK: Final = "LEASEHOLD_TEST_RUN"
"""Variable that every process of a run inherits. Its value is the run's folder."""

SEED: Final = "LEASEHOLD_TEST_SEED"
"""Variable with the seed of samples. By default it is another one each day."""

LEFTOVER_TIMEOUT_S: Final = 20.0
"""How long processes may take to end after the last test: killed ones are reaped by init."""

_KEPT: Final = ("COLUMNS", "COVERAGE_", SEED, "PYTEST_", "PY_COLORS")
_KEPT_ON_GPUS: Final = ("CUDA_", "LD_LIBRARY_PATH", "NVIDIA_")
"""Beginnings of names. A container may find its driver by these only. CUDA_DEVICE_ORDER decides which GPU an
index of CUDA_VISIBLE_DEVICES means."""

_GPU_TESTS: Final = ({"gpu"}, {"gpu", "long"})
"""The markers that a test of real GPUs may have."""

_DESCRIPTORS: Final = 4096


def seed() -> int:
    """The seed of this run's samples."""
    return int(os.environ[SEED])


def is_sampled(case: str) -> bool:
    """Whether a case of a parametrized test belongs to the half that this run plays."""
    return random.Random(f"{seed()} {case}").random() < 0.5


def begin_with(first: Sequence[T], others: Sequence[T], workers: int) -> list[T]:
    """The order of tests in which each of pytest-xdist's workers begins with its share of some of them.

    ``--dist worksteal`` gives each worker a contiguous part of the tests, of equal length, and moves tests
    from the end of a part to workers that have none left. What takes long must not be at the end of a part.
    """
    order: list[T] = []
    rest = deque(others)
    for worker in range(workers):
        share = (len(first) + len(others) - len(order)) // (workers - worker)
        own = first[worker::workers]
        order += [*own, *(rest.popleft() for _ in range(min(len(rest), share - len(own))))]
    return [*order, *rest]


def selects_gpus(markers: str) -> bool:
    """Whether an expression of `pytest -m` names the marker `gpu`, and selects a test that has it."""
    if not re.search(r"\bgpu\b", markers):
        return False
    expression = Expression.compile(markers)
    return any(_selects(expression, held) for held in _GPU_TESTS)


def _selects(expression: Expression, held: Collection[str]) -> bool:
    return expression.evaluate(lambda name, /, **_settings: name in held)


def set_up(*, gpus: bool) -> Path:
    """Makes the run's folder, and gives this process the environment of tests.

    Args:
        gpus: Whether tests of real GPUs were asked for.

    Returns:
        The folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="lh-", dir="/tmp"))
    folder.chmod(0o755)  # some tests have other users, who need a way in
    for name in ("home", "t"):
        (folder / name).mkdir()
    worker, coordinator = folder / "worker.toml", folder / "coordinator.toml"
    worker.write_text('criu = "/nonexistent/criu"\n')  # probing one would slow each start down
    coordinator.touch()
    kept = _KEPT + _KEPT_ON_GPUS if gpus else _KEPT
    environment = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    environment.setdefault(SEED, str(int(time.time() // 86_400)))
    os.environ.clear()
    os.environ.update(
        environment,
        HOME=str(folder / "home"),
        LANG="C.UTF-8",
        LEASEHOLD_COORDINATOR_CONFIG=str(coordinator),
        LEASEHOLD_WORKER_CONFIG=str(worker),
        PATH=os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        TMPDIR=str(folder / "t"),
        TZ="UTC",
        XDG_CACHE_HOME=str(ROOT / ".cache"),
    )
    os.environ[MARK] = str(folder)
    tempfile.tempdir = None  # it was found by the old environment
    _set_up_process()
    return folder


def _set_up_process() -> None:
    """Undoes what a shell hands down: ignored signals (``nohup``, ``&``), a file mask, few descriptors."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, most))


def leftovers(folder: Path) -> list[str]:
    """What the run has left, in lines to print: processes with its mark, and files that are no test's own."""
    deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
    while (processes := list(_marked(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [*processes, *(f"file {path}" for path in sorted((folder / "t").iterdir()))]


def tear_down(folder: Path) -> None:
    """Removes the run's folder."""
    shutil.rmtree(folder, ignore_errors=True)


def _marked(folder: Path) -> Iterator[str]:
    entry = f"{MARK}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and entry in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield f"process {process.name}: {command[:200]}"
