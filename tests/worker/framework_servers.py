"""Small servers that speak the routes of vLLM and SGLang, with their states and their faults.

The routes, their methods, bodies and statuses are those that the docstrings of
``leasehold_worker.hooks.vllm_hook`` and ``.sglang`` name. What a vLLM engine does with
requests is in :mod:`.vllm_engine`.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias, TypeVar
from urllib.parse import parse_qs, urlsplit

import trio

from .vllm_engine import MODES, Request, VllmEngine

Server = TypeVar("Server", bound="ScriptedServer")

TOTAL_BYTES = 10 * 2**30

Answer: TypeAlias = tuple[int, object] | None
"""A status with a body. None: the connection breaks."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An answer that is given later.

    Attributes:
        ready: Set once it can be given.
        make: Makes it.
    """

    ready: threading.Event
    make: Callable[[], Answer]


class ScriptedServer:
    """Answers 200 to everything, but what it was told otherwise.

    Attributes:
        authorizations: What each call said of who makes it.
        calls: What was asked, in order, as "METHOD TARGET", and " BODY" where there was one.
        answers: Statuses that the next calls of a path get instead, one each; 0 breaks the connection.
        held: Paths whose calls are not answered before the server stops.
        slow: Paths whose calls are carried out once the next call has arrived. The next call waits meanwhile,
            as it would for a scheduler.
        deaf_to: Paths whose calls are carried out, and whose answer is lost.
        device_bytes: What NVML would list for it.
    """

    def __init__(self, port: int = 0) -> None:
        self.calls: list[str] = []
        self.authorizations: list[str | None] = []
        self.answers: dict[str, list[int]] = {}
        self.held: set[str] = set()
        self.deaf_to: set[str] = set()
        self.slow: set[str] = set()
        self.device_bytes = TOTAL_BYTES
        self._arrived = threading.Condition()
        self._serving = threading.Lock()
        self._called = threading.Event()
        self._released = threading.Event()
        self._pending_answers: list[Pending] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops it, and lets go of calls that it held."""
        self._released.set()
        for pending in self._pending_answers:
            pending.ready.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    async def wait_call(self) -> None:
        """Waits for the first call."""
        await trio.to_thread.run_sync(self._called.wait, abandon_on_cancel=True)

    def paths(self) -> list[str]:
        """The calls without what is beside the path."""
        return [call.split()[1].partition("?")[0] for call in self.calls]

    @property
    def serves(self) -> bool:
        """Whether it would answer prompts with sense."""
        return True

    async def measure(self) -> int | None:
        """What NVML would say."""
        return self.device_bytes

    def answer(self, method: str, target: str, body: bytes) -> "Answer":
        """The status and body of an answer. None: the connection breaks."""
        path = urlsplit(target).path
        with self._arrived:
            self.calls.append(" ".join([method, target, *([body.decode()] if body else [])]))
            number = len(self.calls)
            self._arrived.notify_all()
            scripted = self.answers.get(path)
            status = scripted.pop(0) if scripted else None
        self._called.set()
        if path in self.held:
            self._released.wait(60)
            return None
        if status is not None:
            return (status, {"detail": "as scripted"}) if status else None
        with self._serving:
            if path in self.slow:
                with self._arrived:
                    self._arrived.wait_for(lambda: len(self.calls) > number, 60)
            answer = self.serve(method, target, body)
            if isinstance(answer, Pending):
                self._pending_answers.append(answer)
        if isinstance(
            answer, Pending
        ):  # others are served meanwhile, and nobody notices that the client left
            answer.ready.wait()
            answer = None if self._released.is_set() else answer.make()
        return None if path in self.deaf_to else answer

    def serve(self, method: str, target: str, body: bytes) -> "Answer | Pending":
        """What it does when nothing else was scripted."""
        return 200, {"ok": True}


class VllmServer(VllmEngine, ScriptedServer):
    """A vLLM server in development mode. ``/generate?hold=NAME`` is a request until ``/finish?hold=NAME``.

    Attributes:
        communicators: Whether it has them.
        frees: Whether sleeping frees device memory.
    """

    def __init__(self, port: int = 0) -> None:
        VllmEngine.__init__(self)
        self.communicators = True
        self.frees = True
        self._held_requests: dict[str, Request] = {}
        ScriptedServer.__init__(self, port)

    @property
    def serves(self) -> bool:
        """Whether it would answer prompts with sense."""
        return self.alive and not self.says_it_sleeps and self.weights and self.communicators

    def free_memory(self, level: int) -> None:
        if self.frees:
            self.device_bytes = TOTAL_BYTES // 20

    def take_memory(self, tags: Collection[str]) -> None:
        if not self.sleeping:
            self.device_bytes = TOTAL_BYTES

    def serve(self, method: str, target: str, body: bytes) -> Answer | Pending:
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        if not self.alive:
            return None
        match method, parts.path:
            case "POST", "/sleep":
                mode = query.get("mode", ["abort"])[0]
                if mode not in MODES:
                    return 500, {"error": f"Invalid pause mode: {mode}"}
                return Pending(self.sleep(int(query.get("level", ["1"])[0]), mode), lambda: (200, None))
            case "POST", "/pause":
                mode = query.get("mode", ["abort"])[0]
                if mode not in MODES:
                    return 400, {"error": f"Invalid pause mode: {mode}"}
                return Pending(self.pause(mode), lambda: (200, {"status": "paused"}))
            case "POST", "/resume":
                self.resume()
                return 200, {"status": "resumed"}
            case "POST", "/wake_up":
                self.wake_up(query.get("tags", []))
                return 200, None
            case "GET", "/is_sleeping":
                return 200, {"is_sleeping": self.says_it_sleeps}
            case "POST", "/generate":
                request = self.begin()
                self._held_requests[query["hold"][0]] = request
                return Pending(request.ended, lambda: (200, {"finish_reason": request.finish_reason}))
            case "POST", "/finish":
                self.finish(self._held_requests[query["hold"][0]])
                return 200, None
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
            server.authorizations.append(self.headers.get("Authorization"))
            answer = server.answer(self.command, self.path, body)
            self.close_connection = True
            if answer is None:
                return
            status, content = answer
            data = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            with suppress(BrokenPipeError, ConnectionResetError):  # the client may have left
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
            """Says nothing: the calls are kept."""

    return Handler
