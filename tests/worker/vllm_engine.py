"""What a vLLM engine does with requests and with its memory, without HTTP and without a GPU.

From vLLM's sources (``v1/engine/core.py``: EngineCore and EngineCoreProc; ``v1/executor/abstract.py``;
``entrypoints/serve/sleep/api_router.py``) and from its pull requests 32351, 34125, 34528 and 44483:

* A sleep pauses the scheduler, and frees the memory as soon as no request runs. ``abort`` ends all requests.
  ``wait`` lets those that run end. ``keep`` freezes them, and they go on once the engine is awake. New
  requests wait in each mode.
* Nothing takes a pending sleep back: neither the end of the call that asked for it nor a wake-up. A wake-up
  before it finds no memory to take back, and lets new requests run.
* A second sleep waits like the first one. The memory that is freed is freed once.
* The engine says that it sleeps while its scheduler is paused, thus also before its memory is freed.
* A pause is the same without the sleep: it ends once no request runs, and a resume takes it back at any time.
  A resume lets requests run whether or not there is memory.
* Waking a tag that is awake does nothing. The scheduler goes on once all tags are awake.
* A request that runs while the memory is freed ends the engine by an illegal memory access.
"""

import threading
from collections.abc import Collection
from typing import Final, Literal

Mode = Literal["abort", "wait", "keep"]
MODES: Final[tuple[Mode, ...]] = ("abort", "wait", "keep")
TAGS: Final = frozenset({"weights", "kv_cache"})


class Request:
    """A request of a client that waits for its end.

    Attributes:
        finish_reason: "stop" or "abort". Empty: it has not ended.
        ended: Set at its end.
    """

    def __init__(self) -> None:
        self.finish_reason = ""
        self.ended = threading.Event()

    def end(self, finish_reason: str) -> None:
        """Ends it."""
        self.finish_reason = finish_reason
        self.ended.set()


class VllmEngine:
    """The scheduler, and the memory that it computes in.

    Attributes:
        sleeping: Tags whose memory is freed.
        level: Of the last sleep that freed memory.
        weights: Whether the weights are what they should be.
        alive: Whether it has not crashed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sleeping: set[str] = set()
        self.level = 0
        self.weights = True
        self.alive = True
        self._pause: Literal["", "new", "all"] = ""
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._pending: list[tuple[int, threading.Event]] = []

    @property
    def says_it_sleeps(self) -> bool:
        """What ``/is_sleeping`` answers."""
        return bool(self.sleeping or self._pause)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._running) + len(self._waiting)

    def begin(self) -> Request:
        """Takes a request in. It runs at once, or waits until the scheduler goes on."""
        request = Request()
        with self.lock:
            self._waiting.append(request)
            self._schedule()
        return request

    def finish(self, request: Request) -> None:
        """Ends a request that runs, as if it had its last token. One that is frozen or waits stays."""
        with self.lock:
            if request in self._running and self._pause != "all":
                self._running.remove(request)
                request.end("stop")
                self._sleep_if_idle()

    def sleep(self, level: int, mode: Mode) -> threading.Event:
        """Asks for a sleep. The event is set once it has happened."""
        happened = threading.Event()
        with self.lock:
            self._pause = "all" if mode == "keep" else "new"
            if mode == "abort":
                for request in (*self._running, *self._waiting):
                    request.end("abort")
                self._running, self._waiting = [], []
            self._pending.append((level, happened))
            self._sleep_if_idle()
        return happened

    def pause(self, mode: Mode) -> threading.Event:
        """Asks for a pause. The event is set once no request runs."""
        return self.sleep(0, mode)

    def resume(self) -> None:
        """Lets requests run."""
        with self.lock:
            self._pause = ""
            self._schedule()

    def wake_up(self, tags: Collection[str]) -> None:
        """Takes memory back; without tags all of it."""
        with self.lock:
            if self.sleeping and self.sleeping.issuperset(tags):
                woken = set(tags) or set(self.sleeping)
                self.sleeping -= woken
                self.take_memory(woken)
            if not self.sleeping:
                self._pause = ""
                self._schedule()

    def free_memory(self, level: int) -> None:
        """Called where memory is freed, with the lock."""

    def take_memory(self, tags: Collection[str]) -> None:
        """Called where memory is taken back, with the lock."""

    def _schedule(self) -> None:
        if self._pause or not self._waiting:
            return
        self._running += self._waiting
        self._waiting = []
        if self.sleeping:
            self.alive = False

    def _sleep_if_idle(self) -> None:
        if self._running and self._pause != "all":
            return
        for level, happened in self._pending:
            if level and not self.sleeping:
                self.sleeping = set(TAGS)
                self.level = level
                self.weights = self.weights and level == 1
                self.free_memory(level)
            happened.set()
        self._pending = []
