"""What can go wrong on the way down and up of every policy: each step with each of its faults. Pure."""

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

DOWN, UP = "down", "up"
WEIGHTS: Final = ("retain", "offload", "discard")
PROCESSES: Final = ("keep_running", "cuda_suspend", "checkpoint", "stop")
ALWAYS: Final = 99
ATTEMPTS: Final = 3
"""How often a hook makes a call that gets an answer of 500."""


class Kind(enum.StrEnum):
    """Who does something wrong."""

    SERVER = "server"
    DRIVER = "driver"
    GPU = "gpu"
    CRIU = "criu"
    DISK = "disk"
    PID = "pid"
    PORT = "port"
    PROGRAM = "program"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that goes wrong.

    Attributes:
        kind: Who does it.
        where: The route, call, point or mode.
        fault: What it does; how a driver's call goes wrong are fields of simgpu's Fault.
        times: How often.
        harmless: The operation succeeds all the same.
        may_succeed: It may succeed, where that is true.
        member: Which process of the workload has a driver's fault, or is on a sick GPU.
        half_awake: It leaves the server half awake. vLLM then ignores /sleep.
    """

    kind: Kind
    where: str
    fault: str = ""
    times: int = 1
    driver: dict[str, Any] = field(default_factory=dict, hash=False)
    harmless: bool = False
    may_succeed: bool = False
    member: int = 0
    half_awake: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One way of one policy, with one trouble.

    Attributes:
        weights: The weight strategy.
        process: The process strategy.
        way: Down or up.
        trouble: What goes wrong.
        before: The process strategy that it is parked by already. Empty: it runs.
        framework: Whose server it is.
        gpus: How many GPUs it has, with one process on each.
    """

    weights: str
    process: str
    way: str
    trouble: Trouble
    before: str = ""
    framework: str = "vllm"
    gpus: int = 1

    @property
    def policy(self) -> str:
        return f"{self.weights}+{self.process}"

    def __str__(self) -> str:
        trouble = self.trouble
        driver = [f"{name}={value}" for name, value in trouble.driver.items()]
        driver += ["member=1"] if trouble.member else []
        what = " ".join(filter(None, [trouble.kind, trouble.where, trouble.fault, *driver]))
        after = f" after {self.before}" if self.before else ""
        server = "" if self.framework == "vllm" else f"{self.framework} "
        server += "" if self.gpus == 1 else f"{self.gpus} GPUs "
        return f"{server}{self.policy}{after} {self.way}: {what} x{trouble.times}"


def hooks_down(weights: str) -> Iterator[Trouble]:
    """What a framework does wrong as it is put to sleep, or only drops its communicators."""
    if weights == "retain":
        yield Trouble(Kind.SERVER, "/collective_rpc suspend_nccl", "500", ATTEMPTS)
        yield Trouble(Kind.SERVER, "/collective_rpc suspend_nccl", "break", 1, harmless=True)
        yield Trouble(Kind.SERVER, "/collective_rpc suspend_nccl", "hang")
        return
    yield Trouble(Kind.SERVER, "/pause", "500", ATTEMPTS)
    yield Trouble(Kind.SERVER, "/pause", "hang")
    yield Trouble(Kind.SERVER, "/sleep", "500", ATTEMPTS)
    yield Trouble(Kind.SERVER, "/sleep", "500", 1, harmless=True)
    yield Trouble(Kind.SERVER, "/sleep", "break", ATTEMPTS)
    yield Trouble(Kind.SERVER, "/sleep", "hang")
    yield Trouble(Kind.SERVER, "/sleep", "not_freed")
    yield Trouble(Kind.SERVER, "/is_sleeping", "500", ATTEMPTS)


def hooks_up(weights: str) -> Iterator[Trouble]:
    """What a framework does wrong as it is woken, or only makes its communicators anew."""
    if weights == "retain":
        yield Trouble(Kind.SERVER, "/collective_rpc resume_nccl", "500", ATTEMPTS)
        yield Trouble(Kind.SERVER, "/collective_rpc resume_nccl", "break", ATTEMPTS)
        return
    yield Trouble(Kind.SERVER, "/wake_up", "500", ATTEMPTS)
    yield Trouble(Kind.SERVER, "/wake_up", "break", 1, harmless=True)
    yield Trouble(Kind.SERVER, "/wake_up", "hang")
    yield Trouble(Kind.SERVER, "/resume", "500", ATTEMPTS)
    yield Trouble(Kind.SERVER, "/is_sleeping", "500", ATTEMPTS)
    yield Trouble(Kind.SERVER, "/reset_prefix_cache", "500", ATTEMPTS, harmless=True)
    if weights == "discard":
        yield Trouble(Kind.SERVER, "/collective_rpc reload_weights", "500", ATTEMPTS, half_awake=True)


def sglang_down() -> Iterator[Trouble]:
    """What an SGLang server does wrong as its memory is released; nothing that could end it is repeated."""
    yield Trouble(Kind.SERVER, "/flush_cache", "500")
    yield Trouble(Kind.SERVER, "/pause_generation", "500")
    for fault in ("500", "break", "hang", "not_freed"):
        yield Trouble(Kind.SERVER, "/release_memory_occupation", fault)


def sglang_up(weights: str) -> Iterator[Trouble]:
    """What it does wrong as its memory is resumed."""
    yield Trouble(Kind.SERVER, "/resume_memory_occupation", "500")
    yield Trouble(Kind.SERVER, "/resume_memory_occupation", "break")
    yield Trouble(Kind.SERVER, "/continue_generation", "500")
    if weights == "discard":
        yield Trouble(Kind.SERVER, "/update_weights_from_disk", "500")


def sglang_grid() -> Iterator[Case]:
    """The ways of an SGLang server: its own troubles, and the worker's death while its hook is called."""
    for process in ("keep_running", "cuda_suspend"):
        for weights in ("offload", "discard"):
            for way in (DOWN, UP):
                yield from (
                    Case(weights, process, way, trouble, framework="sglang")
                    for trouble in (
                        *kills(weights, process, way),
                        *(sglang_down() if way == DOWN else sglang_up(weights)),
                    )
                )


def driver(call: str, member: int = 0) -> Iterator[Trouble]:
    """What a driver's call does wrong; some of it is mended on the way."""
    faults: list[dict[str, Any]] = [{"error": 999}, {"skip": True}, {"hang": True}]
    if call == "checkpoint":
        faults.append({"keep_memory": True})
    for fault in faults:
        yield Trouble(Kind.DRIVER, call, driver=fault, may_succeed=True, member=member)


def sick_gpu(member: int = 0) -> Trouble:
    """A GPU of the workload counts an uncorrectable memory error, of which no Xid tells."""
    return Trouble(Kind.GPU, "ecc", may_succeed=True, member=member)


def pair_grid() -> Iterator[Case]:
    """The ways of a server with a process on each of two GPUs."""
    for weights in ("retain", "offload"):
        for way, calls in ((DOWN, ("lock", "checkpoint")), (UP, ("restore", "unlock"))):
            found = [*kills(weights, "cuda_suspend", way), sick_gpu(1)]
            found += [trouble for call in calls for member in (0, 1) for trouble in driver(call, member)]
            yield from (Case(weights, "cuda_suspend", way, trouble, gpus=2) for trouble in found)


def kernel_down() -> Iterator[Trouble]:
    """What an application does wrong that is to save itself."""
    yield Trouble(Kind.SERVER, "kernel.can_checkpoint", "no")
    yield Trouble(Kind.SERVER, "kernel.checkpoint_size_estimate", "huge")
    for name in ("can_checkpoint", "checkpoint_size_estimate", "prepare", "is_quiescent", "checkpoint"):
        yield Trouble(Kind.SERVER, f"kernel.{name}", "raise")


KILLED_IN_HOOKS: Final = ("phase-hooks", "intent-hooks", "hook-noted")
"""Crash points of every way down. On the way up only what keeps running has an intent for its hooks."""

KILLED_DOWN: Final = {
    "keep_running": ("command-journaled",),
    "cuda_suspend": (
        *("intent-lock", "phase-lock", "intent-checkpoint", "phase-checkpoint", "phase-verify"),
        *("operation-ended", "outcome-journaled"),
    ),
    "checkpoint": (
        "intent-lock",
        "phase-verify",
        "phase-image",
        "intent-image",
        "image-final",
        "operation-ended",
    ),
    "stop": (
        *("phase-save", "intent-save", "intent-end", "phase-terminate", "intent-ending", "phase-kill"),
        "operation-ended",
    ),
}
KILLED_UP: Final = {
    "keep_running": ("operation-ended",),
    "cuda_suspend": ("intent-restore", "phase-restore", "phase-unlock", "phase-verify", "operation-ended"),
    "checkpoint": (
        *("phase-resume", "intent-resume", "intent-restore", "phase-restore", "phase-unlock"),
        "operation-ended",
    ),
    "stop": ("phase-start", "intent-start", "program-started", "phase-load", "operation-ended"),
}
"""Crash points that the way passes, by process strategy."""


def kills(weights: str, process: str, way: str) -> Iterator[Trouble]:
    """Where the worker is killed."""
    points = (KILLED_DOWN if way == DOWN else KILLED_UP)[process]
    if process != "stop":
        own_intent = way == DOWN or process == "keep_running"
        hooks = [point for point in KILLED_IN_HOOKS if own_intent or point != "intent-hooks"]
        points = (*hooks, *points)
    for point in points:
        yield Trouble(Kind.KILL, point, may_succeed=True)


def troubles(weights: str, process: str, way: str) -> Iterator[Trouble]:
    """Everything that can go wrong on one way of one policy."""
    yield from kills(weights, process, way)
    yield sick_gpu()
    if process != "stop":
        yield from hooks_down(weights) if way == DOWN else hooks_up(weights)
    if process in ("cuda_suspend", "checkpoint"):
        for call in ("lock", "checkpoint") if way == DOWN else ("restore", "unlock"):
            yield from driver(call)
    if process == "checkpoint":
        yield Trouble(Kind.CRIU, "fails")
        yield Trouble(Kind.CRIU, "full" if way == DOWN else "killed")
        if way == UP:
            yield Trouble(Kind.DISK, "altered")
            yield Trouble(Kind.DISK, "gone")
            yield Trouble(Kind.PID, "taken")
            yield Trouble(Kind.PORT, "taken")
    if process == "stop":
        if way == DOWN:
            yield from kernel_down()
        else:
            yield Trouble(Kind.SERVER, "start", "ends")
            yield Trouble(Kind.PROGRAM, "gone")
            yield Trouble(Kind.SERVER, "kernel.restore", "raise", ALWAYS)
            yield Trouble(Kind.DISK, "altered")


KILLED_FURTHER_DOWN: Final = {
    ("keep_running", "cuda_suspend"): ("intent-lock", "intent-checkpoint", "phase-verify", "operation-ended"),
    ("keep_running", "checkpoint"): ("intent-lock", "phase-verify", "intent-image", "image-final"),
    ("cuda_suspend", "checkpoint"): ("phase-image", "intent-image", "image-final", "operation-ended"),
    ("keep_running", "stop"): ("intent-end", "phase-terminate", "intent-ending", "phase-kill"),
    ("cuda_suspend", "stop"): ("intent-end", "phase-kill", "operation-ended"),
    ("checkpoint", "stop"): ("intent-end", "operation-ended"),
}
"""Crash points on the way from one process strategy to a stronger one."""


def troubles_further_down(before: str, process: str) -> Iterator[Trouble]:
    """What can go wrong while a parked workload is parked by a stronger strategy."""
    for point in KILLED_FURTHER_DOWN[before, process]:
        yield Trouble(Kind.KILL, point, may_succeed=True)
    if before == "keep_running" and process != "stop":
        for call in ("lock", "checkpoint"):
            yield from driver(call)
    if process == "checkpoint":
        yield Trouble(Kind.CRIU, "fails")
        yield Trouble(Kind.CRIU, "full")


def grid() -> list[Case]:
    """Every case, in a fixed order."""
    further_down = [
        Case("offload", process, DOWN, trouble, before)
        for before, process in KILLED_FURTHER_DOWN
        for trouble in troubles_further_down(before, process)
    ]
    return [*further_down, *sglang_grid(), *pair_grid()] + [
        Case(weights, process, way, trouble)
        for process in PROCESSES
        for weights in WEIGHTS
        if (weights, process) != ("retain", "keep_running")
        for way in (DOWN, UP)
        for trouble in troubles(weights, process, way)
    ]


def sample(count: int, seed: int) -> list[Case]:
    """So many cases of the grid, or all, in an order that the seed fixes."""
    cases = grid()
    random.Random(seed).shuffle(cases)
    return cases[:count]
