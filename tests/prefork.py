"""Starts our Python processes from one that has imported what they need, which most of a start is.

A process that is started here is one of its own, with its own pid, files, environment, signals and death. It
is only forked where others are executed, from a process that has imported gRPC, SQLAlchemy, Trio and their
like, and our modules, which read nothing of their environment when they are imported. There is one that forks
for each search path of libraries, since the loader reads that when a process is executed. What it has started
and nobody has ended dies with those who asked for it, however they die.

Within :func:`executed`, processes are started as users start them: by the ``leasehold`` program.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TextIO

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = (
    "asyncio",
    "click",
    "cryptography.hazmat.backends.openssl.backend",
    "cryptography.x509",
    "encodings.ascii",
    "google.protobuf.json_format",
    "grpc",
    "grpc._channel",
    "grpc._plugin_wrapping",
    "grpc._server",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "grpc_status.rpc_status",
    "http.client",
    "importlib.metadata",
    "leasehold_client.cli.cancel_conclusion",
    "leasehold_client.cli.conclusion",
    "leasehold_client.cli.plan_conclusion",
    "leasehold_client.main",
    "leasehold_client.cli.run",
    "leasehold_coordinator.server.daemon",
    "leasehold_simgpu.cli",
    "leasehold_worker.agent.daemon",
    "leasehold_worker.diagnostics.doctor",
    "logging",
    "msgspec",
    "pynvml",
    "sqlalchemy.dialects.sqlite",
    "ssl",
    "trio",
    "uvloop",
)
"""What our processes import. One more or less changes the time of a start, and nothing else."""

WORKER: Final = "from leasehold_worker.agent.cli import command; command()"
COORDINATOR: Final = "from leasehold_coordinator.server.cli import command; command()"
COMMAND_LINE: Final = "from leasehold_client.main import main; main()"
"""As ``python -m leasehold_client``."""

_PROGRAM: Final = str(Path(sys.executable).with_name("leasehold"))
_AS_USERS_DO: Final = {
    WORKER: [_PROGRAM, "worker"],
    COORDINATOR: [_PROGRAM, "coordinator"],
    COMMAND_LINE: [_PROGRAM],
}
_executing = False


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Starts daemons and verbs by their real program meanwhile."""
    global _executing
    _executing = True
    try:
        yield
    finally:
        _executing = False


class Forked(subprocess.Popen[str]):
    """A process that runs Python code as ``python -c`` does. A pipe from it is read as text."""

    def __init__(
        self,
        code: str,
        arguments: Sequence[str],
        *,
        stdout: IO[Any] | int,
        stderr: IO[Any],
        env: Mapping[str, str],
    ) -> None:
        self._is_forked = not _executing
        if not self._is_forked:
            command = [*_AS_USERS_DO[code.strip()], *arguments]
            super().__init__(command, stdout=stdout, stderr=stderr, env=env, text=True)
            return
        assert env.get("PYTHONPATH") == os.environ.get("PYTHONPATH"), "Python reads it when it is executed"
        self.args = [sys.executable, "-c", code, *arguments]
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = False  # for Popen: it is the child of another
        self._told = threading.Lock()
        self._ended, ended = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, ended)
            if isinstance(stdout, int):
                assert stdout == subprocess.PIPE
                mine, output = os.pipe()
                stack.callback(os.close, output)
                self.stdout = os.fdopen(mine)
            else:
                output = stdout.fileno()
            task = {
                "code": code,
                "arguments": list(arguments),
                "environment": dict(env),
                "directory": str(Path.cwd()),
                "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
            }
            server = _server(env.get("LD_LIBRARY_PATH", ""))
            self.pid, self._pidfd = server.start(json.dumps(task).encode(), [output, stderr.fileno(), ended])
        weakref.finalize(self, os.close, self._pidfd)

    def poll(self) -> int | None:
        """How it ended, if it has."""
        if not self._is_forked:
            return super().poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end."""
        if not self._is_forked:
            return super().wait(timeout)
        with self._told:
            if self.returncode is None:
                ready = select.poll()
                ready.register(self._ended, select.POLLIN)
                if not ready.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                status = os.read(self._ended, 100)
                os.close(self._ended)
                assert status, "the process that forks has ended"
                self.returncode = int(status)
            return self.returncode

    def send_signal(self, sig: int) -> None:
        """Signals it, unless it has ended. Another one reaps it, so its pid alone may be somebody else's."""
        if not self._is_forked:
            super().send_signal(sig)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, sig)


def run(
    code: str, arguments: Sequence[str], *, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs such a process to its end, as :func:`subprocess.run` does, and takes what it writes."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = Forked(code, arguments, stdout=output, stderr=errors, env=env)
        try:
            process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, process.wait(), output.read(), errors.read())


class _Server:
    """The process that forks, and our end of its socket."""

    def __init__(self, library_path: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._turn = threading.Lock()
        environment = {**os.environ, "LD_LIBRARY_PATH": library_path}
        if not library_path:
            del environment["LD_LIBRARY_PATH"]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.prefork", str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def start(self, task: bytes, descriptors: Sequence[int]) -> tuple[int, int]:
        """Has it fork, and returns the pid and a pidfd."""
        with self._turn:
            socket.send_fds(self._socket, [struct.pack("!Q", len(task))], descriptors)
            self._socket.sendall(task)
            flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
            answer, pidfds, _, _ = socket.recv_fds(self._socket, 8, 1, flags)
        assert answer, "the process that forks has ended"
        (pid,) = struct.unpack("!Q", answer)
        return pid, pidfds[0]

    def stop(self) -> None:
        """Has it end, with what it has started."""
        self._socket.close()
        self._process.wait(10)


_servers: Final[dict[str, _Server]] = {}
_making: Final = threading.Lock()


def _server(library_path: str) -> _Server:
    with _making:
        if library_path not in _servers:
            _servers[library_path] = _Server(library_path)
        return _servers[library_path]


@atexit.register
def stop() -> None:
    """Ends the processes that fork."""
    with _making:
        while _servers:
            _servers.popitem()[1].stop()


class _Task(NamedTuple):
    """What a forked process is to do."""

    content: dict[str, Any]
    output: int
    errors: int


def _serve(control: socket.socket) -> _Task | None:
    """Forks for every request, and tells of every end. Returns in each child, and when nobody asks more.

    Who asks no more has ended its processes, or has died and left them: what is left then is killed.
    """
    children: dict[int, tuple[int, int]] = {}
    ready = select.poll()
    ready.register(control, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            if descriptor != control.fileno():
                pid, told = children.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                ready.unregister(descriptor)
                os.close(descriptor)
                os.close(told)
                continue
            size, descriptors, _, _ = socket.recv_fds(control, 8, 3)
            if not size:
                _kill(children)
                return None
            (length,) = struct.unpack("!Q", size)
            content = control.recv(length, socket.MSG_WAITALL)
            output, errors, told = descriptors
            pid = os.fork()
            if pid == 0:
                return _Task(json.loads(content), output, errors)
            os.close(output)
            os.close(errors)
            end = os.pidfd_open(pid)
            children[end] = pid, told
            ready.register(end, select.POLLIN)
            socket.send_fds(control, [struct.pack("!Q", pid)], [end])


def _kill(children: Mapping[int, tuple[int, int]]) -> None:
    """Kills children by their pidfds, and waits until they are gone."""
    for end in children:
        signal.pidfd_send_signal(end, signal.SIGKILL)
    for pid, _ in children.values():
        os.waitpid(pid, 0)


def _reopened(stream: TextIO, descriptor: int) -> TextIO:
    """The stream, which knows nothing of the file that its descriptor was before: in a pipe nobody seeks."""
    return open(descriptor, "w", 1, encoding=stream.encoding, errors=stream.errors, closefd=False)


def _main() -> None:
    for package in PACKAGES:
        importlib.import_module(package)
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    task = _serve(control)
    if task is None:
        return
    control.detach()
    os.dup2(task.output, 1)
    os.dup2(task.errors, 2)
    sys.stdout, sys.stderr = _reopened(sys.stdout, 1), _reopened(sys.stderr, 2)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    content = task.content
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(content["descriptors"]))
    os.chdir(content["directory"])
    os.environ.clear()
    os.environ.update(content["environment"])
    sys.argv = ["-c", *content["arguments"]]
    sys.path[0] = ""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(content["code"], "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    _main()
