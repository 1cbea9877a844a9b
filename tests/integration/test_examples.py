"""The examples and the programs of docs/python.md, on a real fleet."""

import ast
import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection, create_server
from socketserver import StreamRequestHandler, ThreadingTCPServer

import grpc
import pytest
from leasehold.v1.command_pb2 import (
    COMMAND_STATE_FAILED,
    COMMAND_STATE_PENDING,
    COMMAND_STATE_SUCCEEDED,
    Command,
    CommandState,
)
from leasehold.v1.command_service_pb2 import WatchCommandRequest, WatchCommandResponse
from leasehold.v1.errors_pb2 import Error
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_SUSPENDED
from leasehold.v1.workload_service_pb2 import (
    RestoreWorkloadRequest,
    RestoreWorkloadResponse,
    SuspendWorkerResponse,
    WorkloadRefusal,
)
from leasehold_client import AsyncClient

from tests.client.scripted_coordinator import refuse, serving
from tests.ports import free_port

from .fleets import TIMEOUT_S, Fleet
from .local_hosts import LocalHost
from .mutual_tls import variables_set

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/python.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
TORCH = '''
"""What the example uses of PyTorch, with a tensor in simulated memory and no arithmetic."""
from types import SimpleNamespace

from cuda.bindings import driver

CHECK = 0x5EED


class Tensor:
    def __init__(self, *size, device):
        assert device == "cuda"
        driver.cuInit(0)
        _, gpu = driver.cuDeviceGet(0)
        _, context = driver.cuDevicePrimaryCtxRetain(gpu)
        driver.cuCtxSetCurrent(context)
        _, self.memory = driver.cuMemAlloc(4)
        driver.cuMemcpyHtoD(self.memory, CHECK.to_bytes(4, "little"), 4)

    def item(self):
        content = bytearray(4)
        (result,) = driver.cuMemcpyDtoH(content, self.memory, 4)
        assert result == driver.CUresult.CUDA_SUCCESS
        return float(int.from_bytes(content, "little") == CHECK)

    def sum(self, dim, keepdim):
        return self

    def __sub__(self, other):
        return self

    def mean(self):
        return self

    square = mean
    backward = mean


WEIGHTS = []


class Linear:
    def __init__(self, features, outputs):
        pass

    def to(self, device):
        WEIGHTS.append(Tensor(device=device))
        return self

    def parameters(self):
        return WEIGHTS

    def __call__(self, inputs):
        return WEIGHTS[0]


class SGD:
    def __init__(self, parameters, lr):
        self.zero_grad = self.step = lambda: None


nn = SimpleNamespace(Linear=Linear)
optim = SimpleNamespace(SGD=SGD)


def randn(*size, device):
    return WEIGHTS[0]
'''


def run(fleet: Fleet, *arguments: str, answers: str = "") -> str:
    """Runs a Python program to its end, as a user with the fleet's credentials."""
    with variables_set(fleet.variables):
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, input=answers, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.long
def test_the_programs_of_the_page(fleet: Fleet) -> None:
    printed = []
    for program in PROGRAMS:
        try:
            ast.parse(program)
            compile(program, "page", "exec")
        except SyntaxError:
            continue  # a cell of a notebook, which the next test runs
        printed.append(run(fleet, "-c", program))
    assert "sleeper WORKLOAD_STATE_EXITED" in printed[1] or "sleeper WORKLOAD_STATE_FAILED" in printed[1]
    assert "UNKNOWN_WORKLOAD" in printed[2]
    assert printed[4] == "1 workers, 4 GPUs\n"
    assert printed[5] == "['alpha']\n"


@pytest.mark.long
def test_the_cell_of_a_notebook(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    (cell,) = (program for program in PROGRAMS if re.search("^async with", program, re.MULTILINE))
    code = compile(cell, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def notebook() -> None:
        running = eval(code, {})
        assert inspect.iscoroutine(running)
        await running

    with variables_set(fleet.variables):
        asyncio.run(notebook())
    assert capsys.readouterr().out.splitlines() == [f"alpha {slot} free" for slot in range(4)]


@pytest.mark.long
def test_a_host_is_suspended_and_restored(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.run_counter("two")
    printed = run(fleet, str(ROOT / "examples/suspend_host.py"), "alpha", answers="\n")
    assert printed.splitlines() == [
        "Suspended workloads: 2. Press Enter to restore them.",
        "Restored workloads: 2.",
    ]
    for name in ("one", "two"):
        fleet.wait_counting(name)
        fleet.cli("stop", name)
    assert len((ROOT / "examples/suspend_host.py").read_text().splitlines()) <= 37


def suspend_alpha(address: str, config: Path) -> subprocess.CompletedProcess[str]:
    """Runs the example for the worker alpha, with Enter at once."""
    return subprocess.run(
        [sys.executable, str(ROOT / "examples/suspend_host.py"), "alpha"],
        input="\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "LEASEHOLD_COORDINATOR": address, "XDG_CONFIG_HOME": str(config)},
    )


def test_a_suspend_or_restore_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    def made(name: str, state: CommandState.ValueType) -> Command:
        return Command(command_id=f"c-{name}", workload_id=f"id-of-{name}", state=state, revision=1)

    def restore(request: RestoreWorkloadRequest, context: grpc.ServicerContext) -> RestoreWorkloadResponse:
        if request.workload == "id-of-two":
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_FREE_GPU", "no GPU is free")
        return RestoreWorkloadResponse(command=made("four", COMMAND_STATE_PENDING))

    def watch(request: WatchCommandRequest, context: object) -> Iterator[WatchCommandResponse]:
        name = request.command_id.removeprefix("c-")
        state = COMMAND_STATE_FAILED if name in ("one", "three") else COMMAND_STATE_SUCCEEDED
        yield WatchCommandResponse(command=made(name, state))

    with serving() as scripted:
        scripted.answers |= {
            "SuspendWorker": lambda request, context: SuspendWorkerResponse(
                commands=[made(name, COMMAND_STATE_PENDING) for name in ("one", "two", "three", "four")]
            ),
            "RestoreWorkload": restore,
            "WatchCommand": watch,
        }
        done = suspend_alpha(scripted.address, tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    one, three, suspended, two, restored = done.stdout.splitlines()
    assert suspended == "Suspended workloads: 2. Press Enter to restore them."
    assert restored == "Restored workloads: 1."
    for line, workload in ((one, "id-of-one"), (three, "id-of-three"), (two, "id-of-two")):
        assert line.startswith(f"workload {workload}: ")


def test_a_refused_suspend_of_one_workload_fails_the_example(tmp_path: Path) -> None:
    refusal = WorkloadRefusal(workload_id="id-of-one", error=Error(message="it never yields"))
    with serving() as scripted:
        scripted.answers["SuspendWorker"] = lambda request, context: SuspendWorkerResponse(refusals=[refusal])
        done = suspend_alpha(scripted.address, tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[0] == "workload id-of-one: it never yields"


@pytest.mark.parametrize("at", ["prompt", "wait"])
def test_ctrl_c_while_a_host_is_suspended(at: str, tmp_path: Path) -> None:
    """At the prompt, the workloads are restored. Before the outcome is known, a line says where to look."""
    command = Command(command_id="c", workload_id="one", state=COMMAND_STATE_PENDING, revision=1)
    is_watched, may_end = threading.Event(), threading.Event()

    def watch(request: WatchCommandRequest, context: grpc.ServicerContext) -> Iterator[WatchCommandResponse]:
        is_watched.set()
        if at == "wait":
            context.add_callback(may_end.set)
            assert may_end.wait(TIMEOUT_S)
        yield WatchCommandResponse(command=Command(command_id="c", state=COMMAND_STATE_SUCCEEDED, revision=2))

    with serving() as scripted:
        scripted.answers |= {
            "SuspendWorker": lambda request, context: SuspendWorkerResponse(commands=[command]),
            "RestoreWorkload": lambda request, context: RestoreWorkloadResponse(command=command),
            "WatchCommand": watch,
        }
        variables = {"LEASEHOLD_COORDINATOR": scripted.address, "XDG_CONFIG_HOME": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "-u", str(ROOT / "examples/suspend_host.py"), "alpha"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        ) as process:
            assert is_watched.wait(TIMEOUT_S)
            if at == "prompt":
                assert process.stdout is not None
                assert "Press Enter" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == (0 if at == "prompt" else 1)
            printed, told = process.communicate()
    if at == "prompt":
        assert (printed, told) == ("Restored workloads: 1.\n", "")
    else:
        shown = "`leasehold get workloads` shows what to `leasehold restore`"
        assert told == f"suspend_host: interrupted: {shown}\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 2, "usage: suspend_host.py .*the following arguments are required: worker"),
        (["nobody"], 1, "^suspend_host: .*nobody.*$"),
    ],
    ids=["none", "unknown"],
)
def test_a_wrong_host_is_told_without_a_traceback(
    fleet: Fleet, arguments: list[str], code: int, told: str
) -> None:
    with variables_set(fleet.variables):
        command = [sys.executable, str(ROOT / "examples/suspend_host.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert re.search(told, done.stderr.strip(), re.DOTALL)


class Echo(StreamRequestHandler):
    """Answers each line with itself."""

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


@contextmanager
def echoing() -> Iterator[str]:
    """A server at the address that the gateway connects to."""
    with ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(TIMEOUT_S)


@pytest.mark.long
def test_a_gateway_restores_a_server_on_demand(fleet: Fleet) -> None:
    fleet.run_counter("server")
    listen = free_port()
    with echoing() as address, variables_set(fleet.variables):
        options = ["--listen", f"127.0.0.1:{listen}", "--workload", "server", "--server", address]
        gateway = subprocess.Popen(
            [sys.executable, str(ROOT / "examples/gateway.py"), *options, "--idle-s", "0.2"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert gateway.stderr is not None
        with gateway, gateway.stderr:
            try:
                assert "listening" in gateway.stderr.readline()
                for _ in range(2):
                    assert gateway.stderr.readline() == "suspending server\n"
                    fleet.wait(
                        lambda: fleet.client.workload("server").status.state == WORKLOAD_STATE_SUSPENDED
                    )
                    with create_connection(("127.0.0.1", listen), TIMEOUT_S) as connection:
                        connection.sendall(b"hello\n")
                        assert connection.recv(100) == b"hello\n"
                        fleet.wait_counting("server")
                    assert gateway.stderr.readline() == "restoring server\n"
            finally:
                gateway.terminate()
                gateway.stderr.read()
    fleet.wait(lambda: not any(command.state < 4 for command in fleet.client.commands()))
    fleet.cli("stop", "server")


@pytest.mark.parametrize(
    ("example", "option", "told"),
    [
        *(("counter", f"--interval-s={one}", "is no time") for one in ("-1", "nan", "inf", "x")),
        ("training", "--interval-s=inf", "is no time"),
        ("training", "--seed=-1", "is no seed"),
    ],
)
def test_an_example_refuses_a_number_that_it_can_not_use(example: str, option: str, told: str) -> None:
    command = [sys.executable, str(ROOT / f"examples/{example}.py"), option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("listen", "server", "told"),
    [
        ("nonsense", "127.0.0.1:8000", "'nonsense' is no address: write HOST:PORT"),
        ("127.0.0.1:8080", "foo", "'foo' is no address: write HOST:PORT"),
        ("127.0.0.1:{port}", "127.0.0.1:8000", "the address of --listen can't be used"),
    ],
)
def test_a_gateway_refuses_an_address_that_it_can_not_use(listen: str, server: str, told: str) -> None:
    with create_server(("127.0.0.1", 0)) as used:
        address = listen.format(port=used.getsockname()[1])
        options = ["--listen", address, "--workload", "server", "--server", server]
        command = [sys.executable, str(ROOT / "examples/gateway.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_training_yields_its_gpu_between_epochs(local_host: LocalHost, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    example = str(ROOT / "examples/yielding_training.py")
    options = ["--epochs", "1000000", "--grace-s", "1"]
    training = local_host.start(sys.executable, example, *options, PYTHONPATH=str(tmp_path))
    local_host.wait_line(training, "epoch 2 loss 1.0000")
    other = local_host.exec("--gpus", "2", "--", "sh", "-c", "echo holding; sleep 1000")
    local_host.wait_line(other, "holding")
    local_host.wait(lambda: local_host.workloads()["training"].status.state == WORKLOAD_STATE_SUSPENDED)
    other.kill()
    seen = local_host.out(training).count("epoch")
    local_host.wait(lambda: local_host.out(training).count("epoch") > seen + 2)
    assert "loss 0" not in local_host.out(training)


@pytest.mark.long
def test_the_asynchronous_client_on_a_fleet(fleet: Fleet) -> None:
    fleet.run_counter("one")

    async def main() -> int:
        async with AsyncClient(fleet.address) as client:
            await client.wait(await client.suspend("one"))
            await client.wait(await client.restore("one"))
            await client.wait_workload("one", timeout_s=TIMEOUT_S)
            return len(await client.gpus())

    with variables_set(fleet.variables):
        assert asyncio.run(main()) == len(fleet.client.gpus())
    fleet.wait(lambda: "one" in fleet.leases().values())  # the load after the outcome has the lease
    fleet.wait_counting("one")
    fleet.cli("stop", "one")
