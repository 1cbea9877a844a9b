"""What a probe works with: its own CUDA processes on the GPUs of this host, and their safe end."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from tests.gpu.leftovers import end_safely
from tests.simgpu.programs import SUCCESS, Program, ProgramError

GIB: Final = 2**30
BUFFER_BYTES: Final = 16 * 2**20
SEED: Final = 7
LOCK_TIMEOUT_MS: Final = 10_000
BLOCKED_SAMPLES: Final = 75
"""A call that is asleep in so many samples, for 1.5 s, blocks: others take a few milliseconds."""

ROOM_BYTES: Final = 2 * GIB
"""Free on each GPU that a probe uses. A restore that runs out of memory loses its process."""

MOVES_CUDA_VERSION: Final = 13000
LONG_COPY_BYTES: Final = 4 * GIB
LEAST_COPY_S: Final = 0.8
"""A copy must take longer than a look whether a call waits."""


class NotTestedError(Exception):
    """Why an assumption is not tested on this host."""


class ContradictionError(Exception):
    """What was seen instead of what is assumed."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML names it, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    uuid: str
    name: str
    bus_id: str
    minor: int
    free_bytes: int
    persistence: bool


def inventory() -> list[Gpu]:
    """Every GPU of the host."""
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found.append(
            Gpu(
                index=index,
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                name=pynvml.nvmlDeviceGetName(handle),
                bus_id=pynvml.nvmlDeviceGetPciInfo(handle).busId,
                minor=pynvml.nvmlDeviceGetMinorNumber(handle),
                free_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).free,
                persistence=bool(pynvml.nvmlDeviceGetPersistenceMode(handle)),
            )
        )
    return found


def cuda_version() -> int:
    """That of the driver, such as 13000."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlSystemGetCudaDriverVersion())


def need_room(gpus: list[Gpu]) -> None:
    """Refuses where other processes leave too little device memory."""
    for gpu in gpus:
        if gpu.free_bytes < ROOM_BYTES:
            raise NotTestedError(
                f"GPU {gpu.index} has {gpu.free_bytes / GIB:.1f} GiB free, and 2 GiB are needed"
            )


def need_moves(count: int) -> list[Gpu]:
    """Every GPU of the host, the emptiest first, if a process can be moved so often to the next one."""
    gpus = sorted(inventory(), key=lambda gpu: gpu.free_bytes, reverse=True)
    if len(gpus) < 2:
        raise NotTestedError("it needs 2 GPUs, and this host has 1")
    if len({gpu.name for gpu in gpus}) > 1:
        raise NotTestedError("it needs GPUs of one chip")
    if cuda_version() < MOVES_CUDA_VERSION:
        raise NotTestedError("it needs driver 580")
    need_room(gpus[: count + 1])
    return gpus


def rotation(gpus: list[Gpu]) -> list[list[str]]:
    """The map that moves everything on a GPU to the next one."""
    uuids = [gpu.uuid for gpu in gpus]
    return [list(pair) for pair in zip(uuids, uuids[1:] + uuids[:1], strict=True)]


class Stand:
    """CUDA processes of one probe. Made by :func:`stand`."""

    def __init__(self) -> None:
        self.controllers: list[Program] = []
        self.targets: list[Program] = []

    def controller(self, *, initialized: bool = True, **environment: str) -> Program:
        """A process that calls the checkpoint API."""
        program = Program({**os.environ, **environment})
        self.controllers.append(program)
        if initialized and (error := program.init()) != SUCCESS:
            raise NotTestedError(f"cuInit answers {error}")
        return program

    def hog(self, left_bytes: int) -> Program:
        """A process that takes the free memory of the GPU of the targets, except so many bytes."""
        program = Program(os.environ)
        self.controllers.append(program)
        program.set_up()
        uuid = program.device_uuids()[0]
        (gpu,) = (gpu for gpu in inventory() if gpu.uuid == uuid)
        need("allocation of the free memory", program.allocate(gpu.free_bytes - left_bytes)[0])
        return program

    def target(self, size_bytes: int = BUFFER_BYTES, **environment: str) -> Target:
        """A process with a context on its first GPU, and a buffer in at most a quarter of its free memory."""
        program = Program({**os.environ, **environment})
        self.targets.append(program)
        program.set_up()
        uuid = program.device_uuids()[0]
        (gpu,) = (gpu for gpu in inventory() if gpu.uuid == uuid)
        need_room([gpu])
        size_bytes = min(size_bytes, gpu.free_bytes // 4)
        error, address = program.allocate(size_bytes)
        if error != SUCCESS:
            raise NotTestedError(f"cuMemAlloc of {size_bytes} bytes answers {error}")
        program.fill(address, BUFFER_BYTES, SEED)
        return Target(program, address, size_bytes)


@dataclass(frozen=True, slots=True)
class Target:
    """A process that is suspended."""

    program: Program
    address: int
    size_bytes: int

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.program.pid

    def suspend(self, controller: Program) -> None:
        """Locks and checkpoints it."""
        self.lock(controller)
        need("checkpoint", controller.checkpoint(self.pid))

    def lock(self, controller: Program) -> None:
        """Locks it."""
        need("lock", controller.lock(self.pid, LOCK_TIMEOUT_MS))

    def unlock(self, controller: Program) -> None:
        """Unlocks it."""
        need("unlock", controller.unlock(self.pid))

    def resume(self, controller: Program, pairs: list[list[str]] | None = None) -> None:
        """Restores and unlocks it, and checks its memory."""
        need("restore", controller.restore(self.pid, pairs))
        self.unlock(controller)
        expect("the buffer", self.holds(), True)

    def holds(self) -> bool:
        """Whether its buffer has what was written."""
        found: bool = self.program.holds(self.address, BUFFER_BYTES, SEED)
        return found


def need(call: str, error: int) -> None:
    """Refuses where a call fails that a probe only needs: what is assumed can't be seen then."""
    if error != SUCCESS:
        raise NotTestedError(f"{call} answers {error}")


def expect(what: str, seen: Any, assumed: Any) -> None:
    """Says what was seen where it is not what is assumed."""
    if seen != assumed:
        raise ContradictionError(f"{what}: {seen} was seen, {assumed} is assumed")


def blocks(program: Program, name: str, *arguments: Any) -> bool:
    """Whether a call waits. Its answer is left for later if it does, and taken if not."""
    program.begin(name, *arguments)
    if program.is_waiting(BLOCKED_SAMPLES):
        return True
    program.answer()
    return False


@contextmanager
def stand() -> Iterator[Stand]:
    """A stand whose processes are ended safely: one that was restored is suspended first."""
    made = Stand()
    try:
        yield made
    except (ProgramError, queue.Empty) as error:
        raise NotTestedError(f"a process of the probe failed: {error or 'no answer'}") from error
    finally:
        for program in made.controllers:
            program.close()
        alive = [program.pid for program in made.targets if not program.has_ended()]
        for note in end_safely(alive).values():
            if "LEFT" in note:
                print(note)
        for program in made.targets:
            program.has_ended()
