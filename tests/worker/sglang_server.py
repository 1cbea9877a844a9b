"""An SGLang server with a memory saver: its routes, and what becomes of requests and memory.

As the real one does (``srt/managers/scheduler_update_weights_mixin.py``), it dies of a release while requests
are under way, of a second release, and of a resume of what was not released. What pauses do with requests is
said by the docstring of PauseGenerationReqInput in ``srt/managers/io_struct.py``.
"""

import json
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from .framework_servers import TOTAL_BYTES, Answer, Pending, ScriptedServer
from .vllm_engine import Request


class SglangServer(ScriptedServer):
    """An SGLang server with a memory saver.

    Attributes:
        released: Tags whose memory was released.
        weights: Whether it has its weights.
        in_flight: Looks at ``/flush_cache`` until which requests are under way.
        running: Requests that are under way until somebody ends them. ``retract`` and ``in_place`` keep them.
        waiting: Requests that wait until it continues.
        paused: Whether requests wait.
        alive: Whether its scheduler lives.
        info: What it tells of its settings.
    """

    def __init__(self, port: int = 0) -> None:
        self.released: set[str] = set()
        self.weights = True
        self.in_flight = 0
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.paused = False
        self.retracted = False
        self.alive = True
        self.info: dict[str, Any] = {
            "model_path": "acme/tiny",
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
        }
        super().__init__(port)

    @property
    def serves(self) -> bool:
        """Whether it would answer prompts with sense."""
        return self.alive and self.weights and not self.released and not self.paused

    def begin(self) -> Request:
        """Takes a request in. While it is paused, the request waits at the door."""
        request = Request()
        (self.waiting if self.paused else self.running).append(request)
        if self.running and self.released:
            self.alive = False  # it computes in memory that is not there
        return request

    def finish(self, request: Request) -> None:
        """Ends a request that runs. One that was paused or waits stays."""
        if request in self.running and not self.paused:
            self.running.remove(request)
            request.end("stop")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way. Requests that were retracted wait only."""
        return not self.in_flight and (not self.running or self.retracted)

    def serve(self, method: str, target: str, body: bytes) -> Answer | Pending:
        if not self.alive:
            return None
        match method, urlsplit(target).path:
            case "GET", "/health":
                return 200, None
            case "GET", "/get_server_info":
                return 200, self.info
            case "GET" | "POST", "/flush_cache":
                self.in_flight = max(self.in_flight - 1, 0)
                return (200 if self.is_idle else 400), "Cache flushed.\n"
            case "POST", "/pause_generation":
                self._pause(json.loads(body or b"{}").get("mode", "abort"))
                return 200, {"status": "ok"}
            case "POST", "/continue_generation":
                self.paused = self.retracted = False
                self.running += self.waiting
                self.waiting = []
                return 200, {"status": "ok"}
            case "GET" | "POST", "/release_memory_occupation":
                return self._release(set(json.loads(body)["tags"]))
            case "GET" | "POST", "/resume_memory_occupation":
                return self._resume(set(json.loads(body)["tags"]))
            case "POST", "/update_weights_from_disk":
                self.weights = json.loads(body)["model_path"] == self.info["model_path"]
                return (200 if self.weights else 400), {"success": self.weights, "message": ""}
            case _:
                return 404, {"detail": "Not Found"}

    def _pause(self, mode: str) -> None:
        self.paused, self.retracted = True, mode == "retract"
        if mode == "abort":
            self.in_flight = 0
            for request in self.running:
                request.end("abort")
            self.running = []

    def free_memory(self, level: int) -> None:
        """Called where memory is released: 1 where the weights are kept in host memory, else 2."""

    def take_memory(self, tags: Collection[str]) -> None:
        """Called where memory is resumed."""

    def _release(self, tags: set[str]) -> tuple[int, object] | None:
        if not self.is_idle or tags & self.released:  # an assertion, or "Cannot pause allocation …"
            self.alive = False
            return None
        self.released |= tags
        keeps = self.info["enable_weights_cpu_backup"]
        if "weights" in tags and not keeps:
            self.weights = False
        self.device_bytes = TOTAL_BYTES // 20
        self.free_memory(1 if keeps else 2)
        return 200, None

    def _resume(self, tags: set[str]) -> tuple[int, object] | None:
        if tags - self.released:  # a KeyError of the scheduler
            self.alive = False
            return None
        self.released -= tags
        self.device_bytes = TOTAL_BYTES
        self.take_memory(tags)
        return 200, None
