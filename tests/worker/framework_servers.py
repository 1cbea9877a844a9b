"""Small servers that speak the routes of vLLM and SGLang, with their states and their faults.

The routes, their methods, bodies and statuses are those that the docstrings of
``leasehold_worker.hooks.vllm`` and ``.sglang`` name. As the real ones do, the SGLang server dies of a release
while it works and of a resume of what was not released.

Run by itself: ``python -m tests.worker.framework_servers vllm --port 0`` prints its address and serves until
it is killed.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import trio

Server = TypeVar("Server", bound="ScriptedServer")

TOTAL_BYTES = 10 * 2**30


class ScriptedServer:
    """Answers 200 to everything, but what it was told otherwise.

    Attributes:
        calls: What was asked, in order, as "METHOD TARGET", and " BODY" where there was one.
        answers: Statuses that the next calls of a path get instead, one each; 0 breaks the connection.
        held: Paths whose calls are not answered before the server stops.
        slow: Seconds that calls of a path take. Others wait meanwhile, as they would for a scheduler.
        deaf_to: Paths whose calls are carried out, and whose answer is lost.
        device_bytes: What NVML would list for it.
    """

    def __init__(self, port: int = 0) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, list[int]] = {}
        self.held: set[str] = set()
        self.deaf_to: set[str] = set()
        self.slow: dict[str, float] = {}
        self.device_bytes = TOTAL_BYTES
        self._lock = threading.Lock()
        self._called = threading.Event()
        self._released = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops it, and lets go of calls that it held."""
        self._released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    async def wait_call(self) -> None:
        """Waits for the first call."""
        await trio.to_thread.run_sync(self._called.wait, abandon_on_cancel=True)

    def paths(self) -> list[str]:
        """The calls without what is beside the path."""
        return [call.split()[1].partition("?")[0] for call in self.calls]

    async def measure(self) -> int | None:
        """What NVML would say."""
        return self.device_bytes

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, object] | None:
        """The status and body of an answer. None: the connection breaks."""
        path = urlsplit(target).path
        with self._lock:
            self.calls.append(" ".join([method, target, *([body.decode()] if body else [])]))
            scripted = self.answers.get(path)
            status = scripted.pop(0) if scripted else None
        self._called.set()
        if path in self.held:
            self._released.wait(60)
            return None
        if status is not None:
            return (status, {"detail": "as scripted"}) if status else None
        with self._lock:
            time.sleep(self.slow.get(path, 0.0))
            answer = self.serve(method, target, body)
        return None if path in self.deaf_to else answer

    def serve(self, method: str, target: str, body: bytes) -> tuple[int, object] | None:
        """What it does when nothing else was scripted."""
        return 200, {"ok": True}


class VllmServer(ScriptedServer):
    """A vLLM server in development mode.

    Attributes:
        sleeping: Tags that sleep.
        weights: Whether it has its weights, rather than memory with something in it.
        communicators: Whether it has them.
        frees: Whether sleeping frees device memory.
    """

    def __init__(self, port: int = 0) -> None:
        self.sleeping: set[str] = set()
        self.level = 0
        self.weights = True
        self.communicators = True
        self.frees = True
        super().__init__(port)

    @property
    def serves(self) -> bool:
        """Whether it would answer prompts with sense."""
        return not self.sleeping and self.weights and self.communicators

    def serve(self, method: str, target: str, body: bytes) -> tuple[int, object] | None:
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        match method, parts.path:
            case "POST", "/sleep":
                self.level = int(query.get("level", ["1"])[0])
                self.sleeping = {"weights", "kv_cache"}
                self.weights = self.weights and self.level == 1
                if self.frees:
                    self.device_bytes = TOTAL_BYTES // 20
                return 200, None
            case "POST", "/wake_up":
                self.sleeping -= set(query.get("tags", ["weights", "kv_cache"]))
                if not self.sleeping:
                    self.device_bytes = TOTAL_BYTES
                return 200, None
            case "GET", "/is_sleeping":
                return 200, {"is_sleeping": bool(self.sleeping)}
            case "POST", "/collective_rpc":
                return self._remote_call(json.loads(body)["method"])
            case "POST", "/reset_prefix_cache":
                return 200, None
            case "GET", "/health":
                return 200, None
            case _:
                return 404, {"detail": "Not Found"}

    def _remote_call(self, name: str) -> tuple[int, object]:
        match name:
            case "reload_weights":
                self.weights = "weights" not in self.sleeping
            case "suspend_nccl":
                self.communicators = False
            case "resume_nccl":
                self.communicators = True
            case _:
                return 500, {"error": f"no method {name}"}
        return 200, {"results": [None]}


class SglangServer(ScriptedServer):
    """An SGLang server with a memory saver.

    Attributes:
        released: Tags whose memory was released.
        weights: Whether it has its weights.
        in_flight: Looks at ``/flush_cache`` until which requests are under way.
        paused: Whether requests wait.
        alive: Whether its scheduler lives.
        info: What it tells of its settings.
    """

    def __init__(self, port: int = 0) -> None:
        self.released: set[str] = set()
        self.weights = True
        self.in_flight = 0
        self.paused = False
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

    def serve(self, method: str, target: str, body: bytes) -> tuple[int, object] | None:
        if not self.alive:
            return None
        match method, urlsplit(target).path:
            case "GET", "/get_server_info":
                return 200, self.info
            case "GET" | "POST", "/flush_cache":
                self.in_flight = max(self.in_flight - 1, 0)
                return (400 if self.in_flight else 200), "Cache flushed.\n"
            case "POST", "/pause_generation":
                self.paused, self.in_flight = True, 0
                return 200, {"status": "ok"}
            case "POST", "/continue_generation":
                self.paused = False
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

    def _release(self, tags: set[str]) -> tuple[int, object] | None:
        if self.in_flight or tags & self.released:  # an assertion, or "Cannot pause allocation …"
            self.alive = False
            return None
        self.released |= tags
        if "weights" in tags and not self.info["enable_weights_cpu_backup"]:
            self.weights = False
        self.device_bytes = TOTAL_BYTES // 20
        return 200, None

    def _resume(self, tags: set[str]) -> tuple[int, object] | None:
        if tags - self.released:  # a KeyError of the scheduler
            self.alive = False
            return None
        self.released -= tags
        self.device_bytes = TOTAL_BYTES
        return 200, None


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Stops a server at the end."""
    try:
        yield server
    finally:
        server.stop()


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = server.answer(self.command, self.path, body)
            self.close_connection = True
            if answer is None:
                return
            status, content = answer
            data = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
            """Says nothing: the calls are kept."""

    return Handler


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["vllm", "sglang", "scripted"])
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    kinds = {"vllm": VllmServer, "sglang": SglangServer, "scripted": ScriptedServer}
    print(kinds[arguments.kind](arguments.port).url, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
