"""Programs that images are made of, and the CRIU to make them with."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import trio
from leasehold_worker.checkpoints.image_manifest import HostFacts, ImageProcess, ImageSubject
from leasehold_worker.criu.installation import CriuFacts, probe
from leasehold_worker.host.processes import ProcessIdentity, identify

from tests.environment import CRIU

FAKE = Path(__file__).with_name("fake_criu.py")
DEADLINE_S = 30.0

T = TypeVar("T")

COUNT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
count = 0
while True:
    print(count, flush=True)
    count += 1
    time.sleep(0.02)
"""


def fake_criu(folder: Path) -> CriuFacts:
    """A fake criu as a program of its own."""
    path = folder / "criu"
    path.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    path.chmod(0o755)
    return CriuFacts(path, "4.2.1")


MakeCriu = Callable[[str], CriuFacts]
"""What makes a fake criu that plays a scenario."""


@functools.cache
def real_criu() -> CriuFacts | str:
    """The CRIU that tests use, or why there is none. A CRIU of the machine is never used."""
    if not CRIU.exists():
        return "no CRIU of this checkout: `make criu` builds it"
    return trio.run(probe, str(CRIU))


def criu_setting() -> str:
    """A line of settings that has a worker use that CRIU, or tell that there is none."""
    return f'criu = "{CRIU}"\n'


@contextmanager
def program(folder: Path, code: str = COUNT) -> Iterator[ProcessIdentity]:
    """A Python program, as a launcher would start it."""
    with (folder / "output.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    identity = identify(process.pid)
    assert identity is not None
    try:
        yield identity
    finally:
        process.kill()
        process.wait()


def counts(folder: Path) -> list[int]:
    """What a program has counted so far."""
    return [int(line) for line in (folder / "output.log").read_text().split("\n")[:-1] if line.isdigit()]


async def wait_for(condition: Callable[[], T]) -> T:
    """Waits until something is so, and returns it, or fails."""
    with trio.fail_after(DEADLINE_S):
        while not (found := condition()):  # noqa: ASYNC110 - what is waited for tells nobody
            await trio.sleep(0.01)
        return found


async def wait_counted(folder: Path) -> None:
    """Waits until the program has counted on."""
    before = len(counts(folder))
    await wait_for(lambda: len(counts(folder)) >= before + 3)


def end(identity: ProcessIdentity | None) -> None:
    """Kills what a test has left."""
    if identity is not None and identify(identity.pid) == identity:
        os.kill(identity.pid, signal.SIGKILL)


def subject(*processes: ProcessIdentity) -> ImageSubject:
    """An image's subject, of these processes."""
    told = tuple(ImageProcess(process.pid, process.start_time_ticks) for process in processes)
    return ImageSubject(
        workload_id="w-1",
        workload_name="counter",
        root_pid=told[0].pid if told else 1,
        processes=told,
        members=(),
        gpus=(),
        host=HOST,
    )


HOST = HostFacts(
    worker_id="wk-1",
    hostname="alpha",
    boot_id="b",
    kernel_release="6.18.0",
    architecture="x86_64",
    criu_version="4.2.1",
    driver_version="580.95.05",
)
