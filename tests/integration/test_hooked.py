"""One workload with hooks of several kinds, on a real fleet: their order down, up, and when one fails."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.worker.framework_servers import ScriptedServer

from .fleets import COUNTER, Fleet
from .models import ROOT, WORKER, Model

PROGRAM = """
import signal, sys
from tests.integration import model_server

trace = sys.argv.pop(1)

def note(text):
    with open(trace, "a") as file:
        file.write(text + "\\n")

class Server(model_server.VllmModel):
    def serve(self, method, target, body):
        if method == "POST" and target != "/generate":
            note(f"vllm {target}")
        return super().serve(method, target, body)

class Kernel(model_server.ModelKernel):
    def prepare(self):
        note("kernel prepare")
        super().prepare()
    def cancel(self):
        note("kernel cancel")
        super().cancel()

model_server.MODELS["vllm"] = Server
model_server.ModelKernel = Kernel
signal.signal(signal.SIGUSR1, lambda number, _: note(f"signal {number}"))
sys.exit(model_server.main())
"""
"""A model server that notes what hooks do to it."""

DOWN = [
    "vllm /pause?mode=wait&wait_for_inflight_requests=true",
    "vllm /sleep?level=1&mode=wait",
    "kernel prepare",
    "http /hooked/before_suspend/offload%2Bcuda_suspend",
]
UP = [
    "kernel cancel",
    "vllm /wake_up",
    "vllm /resume",
    "vllm /reset_prefix_cache",
    "http /hooked/after_restore",
]


class Gateway(ScriptedServer):
    """Who is called by hooks of kind http, and notes it in the same place."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        super().__init__()

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, object] | None:
        with self._trace.open("a") as file:
            file.write(f"http {target}\n")
        return super().answer(method, target, body)


@dataclass
class Hooked:
    """A model server with hooks, and what they did."""

    model: Model
    gateway: Gateway
    trace: Path

    def begin(self) -> None:
        """Starts it."""
        model, fleet = self.model, self.model.fleet
        hooks = fleet.folder / "hooks.json"
        down, up = {"phase": "HOOK_PHASE_BEFORE_SUSPEND"}, {"phase": "HOOK_PHASE_AFTER_RESTORE"}
        gateway = f"{self.gateway.url}/{{workload}}/{{phase}}"
        listed = [
            {"name": "engine", "vllm": {"url": f"http://127.0.0.1:{model.port}"}},
            {"name": "trainer", "kernel": {}},
            {"name": "out", **down, "http": {"method": "POST", "url": f"{gateway}/{{policy}}"}},
            {"name": "in", **up, "http": {"method": "POST", "url": gateway}},
            {"name": "flush", **down, "signal": {"signalNumber": 10}},
        ]
        hooks.write_text(json.dumps(listed))
        run = ["run", "--name", model.name, "--worker", WORKER, "--gpus", "1", "--hooks", str(hooks)]
        run += ["--evict", "offload+cuda_suspend", "--env", f"PYTHONPATH={ROOT}"]
        program = [sys.executable, "-c", PROGRAM, str(self.trace), "--kernel", "--port", f"{model.port}"]
        program += ["--port-file", str(fleet.programs / "port"), "--faults", str(model.faults)]
        fleet.cli(*run, "--", *program, "--weights", f"{model.weights_bytes}", "--kv", f"{model.cache_bytes}")
        model.wait_served()
        model.pid = model.workload.status.root_pid

    def noted(self) -> list[str]:
        """What hooks did since this was asked last."""
        lines = self.trace.read_text().splitlines()
        self.trace.write_text("")
        return lines


@pytest.fixture
def hooked(fleet: Fleet) -> Iterator[Hooked]:
    """One that runs."""
    trace = fleet.programs / "trace"
    trace.touch()
    trace.chmod(0o666)
    gateway = Gateway(trace)
    made = Hooked(Model(fleet, "hooked", kernel=True), gateway, trace)
    made.begin()
    yield made
    gateway.stop()


def test_hooks_of_all_kinds_are_called_down_and_up_and_are_undone_when_one_fails(hooked: Hooked) -> None:
    model, fleet = hooked.model, hooked.model.fleet
    model.generate()
    fleet.cli("suspend", model.name)
    model.require_parked("cuda_suspend")
    # Nobody waits for who gets the signal.
    fleet.wait(lambda: "signal 10" in hooked.trace.read_text())
    noted = hooked.noted()
    assert [each for each in noted if each != "signal 10"] == DOWN
    assert noted.index("signal 10") >= 4
    fleet.cli("wake", model.name)
    assert hooked.noted() == UP
    model.require_running()

    hooked.gateway.answers["/hooked/before_suspend/offload%2Bcuda_suspend"] = [503]
    refused = fleet.json("suspend", model.name, code=1)
    assert refused["error"]["reason"] == "ERROR_REASON_HOOK_FAILED"
    assert refused["error"]["metadata"]["hook"] == "out"
    assert hooked.noted() == [*DOWN, *UP[:4], "http /hooked/rollback"], "and no signal: it comes after that"
    model.require_running()

    model.fail_at("kernel.prepare", "raise")
    refused = fleet.json("suspend", model.name, code=1)
    assert refused["error"]["reason"] == "ERROR_REASON_KERNEL_FAILED"
    assert "prepare was told to" in refused["error"]["message"]
    model.require_running()
    hooked.noted()
    fleet.cli("checkpoint", model.name)
    assert hooked.noted() == ["kernel prepare", "kernel cancel"], "it is at rest no more, and can be again"
    model.require_running()


def test_a_rollback_that_a_hook_leaves_incomplete_is_shown_and_woken(fleet: Fleet) -> None:
    permission, called = fleet.programs / "permission", fleet.programs / "called"
    called.touch()
    called.chmod(0o666)
    back = f"echo >> {called}; test -e {permission}"
    hooks = [
        {"name": "begun", "phase": "BEFORE_SUSPEND", "command": {"arguments": ["true"]}},
        {"name": "back", "phase": "AFTER_RESTORE", "command": {"arguments": ["sh", "-c", back]}},
        {"name": "refused", "phase": "BEFORE_SUSPEND", "command": {"arguments": ["false"]}},
    ]
    file = fleet.programs / "hooks.json"
    file.write_text(json.dumps(hooks))
    counter = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]
    fleet.cli("run", "--name", "one", "--gpus", "1", "--hooks", str(file), "--", *counter)
    refused = fleet.json("suspend", "one", code=1)
    assert refused["error"]["metadata"]["hook"] == "refused"
    fleet.wait(lambda: "RUNNING(HOOK_FAILED)" in fleet.cli("get", "workloads", "one").stdout)
    fleet.wait(lambda: len(called.read_text()) >= 2)  # the worker tries again by itself
    permission.touch()
    fleet.cli("wake", "one")
    fleet.wait(lambda: "HOOK_FAILED" not in fleet.cli("get", "workloads", "one").stdout)
    fleet.wait_counting("one")


@pytest.mark.parametrize("is_undone", [True, False])
def test_a_suspend_whose_time_is_up_within_a_hook_says_what_is_rolled_back(
    fleet: Fleet, is_undone: bool
) -> None:
    file = fleet.programs / "hooks.json"
    slow = {"name": "slow", "phase": "BEFORE_SUSPEND", "command": {"arguments": ["sleep", "60"]}}
    back = {"name": "back", "phase": "AFTER_RESTORE", "command": {"arguments": ["false"]}}
    file.write_text(json.dumps([slow] if is_undone else [slow, back]))
    counter = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]
    fleet.cli("run", "--name", "one", "--gpus", "1", "--hooks", str(file), "--wait-ready", "--", *counter)
    late = fleet.json("suspend", "one", "--timeout", "5", code=1)
    undone = "rolled back" if is_undone else "not all is undone (see warnings)"
    assert late["error"]["message"] == f"timed out before the point of no return; {undone}"
    shown = fleet.cli("get", "workloads", "one").stdout
    assert ("RUNNING(HOOK_FAILED)" in shown) != is_undone
    fleet.wait_counting("one")
