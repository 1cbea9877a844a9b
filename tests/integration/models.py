"""Model servers as workloads of a real fleet, and what is true of them, their GPUs and their disk."""

import http.client
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Workload, WorkloadState
from leasehold_client.arguments.policies import parse_policy
from leasehold_client.coordinator.client import Client
from leasehold_client.demo.counts import read_counter
from leasehold_client.main import leasehold
from leasehold_simgpu import SimulatedHost, SimulatedProcess
from leasehold_simgpu.new_host import DEFAULT_CONTEXT_BYTES

from tests.ports import free_port

from .fleets import TIMEOUT_S, Fleet
from .mutual_tls import local_only
from .tensors import expected_checksum

ROOT: Final = Path(__file__).resolve().parents[2]
COUNTER: Final = ROOT / "examples/counter.py"
WORKER: Final = "alpha"
MIB: Final = 2**20
CONTEXT_BYTES: Final = DEFAULT_CONTEXT_BYTES
WEIGHTS_BYTES: Final = 4 * MIB
CACHE_BYTES: Final = 2 * MIB
FULL_BYTES: Final = CONTEXT_BYTES + WEIGHTS_BYTES + CACHE_BYTES
CHECKSUM: Final = expected_checksum(WEIGHTS_BYTES)

STATES: Final = {
    "keep_running": "SLEEPING",
    "cuda_suspend": "SUSPENDED",
    "checkpoint": "CHECKPOINTED",
    "stop": "STOPPED",
}
"""What a workload is that was parked by a process strategy."""

HOOK_TIMEOUT: Final = "60s"
"""The timeout of a hook that must not time out. A hook makes up to eight calls. For each call a worker with
run_as starts an interpreter, which takes 40 ms, and many times as long on a busy machine."""


images_are_local: Final = local_only(
    "the worker writes images of its own user's programs only, and programs of enrolled users run as others"
)


@contextmanager
def told(what: object) -> Iterator[None]:
    """Says of a failure in which case it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {what}")
        raise


def require_images(fleet: Fleet) -> None:
    """Skips a test where the worker can't write images, for the reason that it tells."""
    (worker,) = fleet.json("get", "workers")["workers"]
    capabilities = {each["name"]: each for each in worker["capabilities"]}
    capability = capabilities["checkpoint_image"]
    if not capability.get("available"):
        pytest.skip(capability.get("reason", "the worker can't write images"))


@dataclass
class Model:
    """One model server, as a workload. With two GPUs it has a second process there, a counter.

    Attributes:
        requests: How many it was asked, and must know of.
    """

    fleet: Fleet
    name: str
    kernel: bool = False
    framework: str = "vllm"
    gpu_count: int = 1
    weights_bytes: int = WEIGHTS_BYTES
    cache_bytes: int = CACHE_BYTES
    requests: int = 0
    port: int = field(default_factory=free_port)
    pid: int = 0

    @property
    def faults(self) -> Path:
        """The file that says what its server does wrong."""
        return self.fleet.programs / f"{self.name}.faults"

    @property
    def program(self) -> Path:
        """What is started."""
        return self.fleet.folder / f"{self.name}.sh"

    @property
    def counts(self) -> Path:
        """The output of its second process."""
        return self.fleet.programs / f"{self.name}.counts"

    @property
    def host(self) -> SimulatedHost:
        return self.fleet.hosts[WORKER]

    @property
    def client(self) -> Client:
        return self.fleet.client

    @property
    def images(self) -> Path:
        """Where its worker keeps what is on disk."""
        return self.fleet.folder / WORKER / "images"

    def start(
        self, *options: str, gpu: str = "", timeout: str = HOOK_TIMEOUT, wait_s: float = TIMEOUT_S
    ) -> None:
        """Runs it, and waits until it serves."""
        hooks = self.fleet.folder / f"{self.name}.hooks"
        url = f"http://127.0.0.1:{self.port}"
        engine = {"url": url}
        if self.framework == "vllm":
            engine |= {"suspend_method": "suspend_nccl", "resume_method": "resume_nccl"}
        hooks.write_text(json.dumps([{"name": "engine", self.framework: engine, "timeout": timeout}]))
        port_file = self.fleet.programs / f"{self.name}.port"
        options_of_program = ["--port", str(self.port), "--port-file", str(port_file)]
        options_of_program += ["--faults", str(self.faults), *(["--kernel"] if self.kernel else [])]
        options_of_program += ["--framework", self.framework]
        options_of_program += ["--weights", f"{self.weights_bytes}", "--kv", f"{self.cache_bytes}"]
        self.program.write_text(
            f'{self._begin()}exec {sys.executable} -m tests.integration.model_server "$@"\n'
        )
        self.program.chmod(0o755)
        where = ["--gpu", gpu] if gpu else ["--gpus", str(self.gpu_count), "--worker", WORKER]
        run = ["run", "--name", self.name, *where, "--hooks", str(hooks), *options]
        run += ["--env", f"PYTHONPATH={ROOT}", "--", str(self.program), *options_of_program]
        self.fleet.wait(lambda: self._is_begun(run))
        self.wait_served(wait_s)
        if self.gpu_count == 2:
            self._wait_counting()
        self.pid = self.workload.status.root_pid

    def _begin(self) -> str:
        """The begin of its program: what runs before the server."""
        if self.gpu_count == 1:
            return "#!/bin/sh\n"
        second_gpu = "CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES#*,}"
        return f"#!/bin/sh\n{second_gpu} {sys.executable} {COUNTER} --interval-s 0.02 >{self.counts} 2>&1 &\n"

    def _is_begun(self, run: list[str]) -> bool:
        """Runs it, unless the coordinator has not heard yet that the last one's GPU is free again."""
        done = CliRunner().invoke(leasehold, run, env=self.fleet.variables)
        if done.exit_code and "(NO_FREE_GPU)" in done.output:
            return False
        assert done.exit_code == 0, (run, done.output)
        return True

    def wait_served(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until it answers, and its worker knows its kernel."""
        self.fleet.wait(self._serves, timeout_s)
        if self.kernel:
            self.fleet.wait(lambda: self.workload.status.HasField("kernel"))

    def _serves(self) -> bool:
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def call(self, method: str, path: str) -> tuple[int, Any]:
        """Asks the server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, json.loads(data) if data else None
        finally:
            connection.close()

    def state(self) -> dict[str, Any]:
        """What the server says of itself."""
        status, state = self.call("GET", "/state")
        assert status == 200
        return dict(state)

    def generate(self) -> None:
        """Asks it for something, which it counts."""
        status, answer = self.call("POST", "/generate")
        assert status == 200, answer
        self.requests += 1
        assert answer == {"requests": self.requests}

    def fail_at(self, name: str, fault: str, times: int = 1) -> None:
        """Has the server do something wrong at its next calls."""
        self.faults.write_text(json.dumps({name: [fault, times]}))

    def clear_faults(self) -> None:
        """Has everything go well again."""
        self.faults.unlink(missing_ok=True)
        self.host.clear_faults()

    @property
    def workload(self) -> Workload:
        return self.client.workload(self.name)

    @property
    def state_name(self) -> str:
        """Its state as people read it."""
        return WorkloadState.Name(self.workload.status.state).removeprefix("WORKLOAD_STATE_")

    @property
    def gpus(self) -> list[str]:
        """The GPUs that its worker says it has."""
        return list(self.workload.status.lease.gpu_uuids)

    @property
    def process(self) -> SimulatedProcess | None:
        """Its CUDA process, if it lives."""
        pid = self.workload.status.root_pid
        return self.host.process(pid) if pid else None

    @property
    def members(self) -> list[SimulatedProcess]:
        """Its CUDA processes that live, the server first."""
        root = self.workload.status.root_pid
        found = [each for each in self.host.processes() if root in (each.pid, _parent(each.pid))]
        return sorted(found, key=lambda each: each.pid != root)

    def device_bytes(self) -> int:
        """What NVML lists for it."""
        return sum(sum(each.gpu_bytes.values()) for each in self.members if each.resident)

    def suspend(self, policy: str, *, force: bool = False, escalate_to: str | None = None) -> Command:
        """Parks it, and returns the command at its end."""
        asked = parse_policy(policy, escalate_to)
        return self.client.wait(self.client.suspend(self.name, policy=asked, force=force), check=False)

    def wake(self) -> Command:
        """Wakes it, and returns the command at its end."""
        return self.client.wait(self.client.restore(self.name), check=False)

    def slot_holders(self) -> dict[str, str]:
        """Name of the holder, or the state, by GPU."""
        return {gpu.gpu.uuid: _holder(gpu) for gpu in self.client.gpus()}

    # --- What must be true

    def require_running(self) -> None:
        """It is as it was: it serves with its own weights, holds its GPU, and nothing of it is elsewhere."""
        assert self.state_name == "RUNNING", self.log()
        assert not self.workload.status.HasField("error"), self.log()
        found = self.state()
        wanted = {"checksum": CHECKSUM, "requests": self.requests, "cache": True, "sleeping": []}
        assert {name: found[name] for name in wanted} == wanted, (found, wanted, self.log())
        assert found["pid"] == self.workload.status.root_pid
        self.generate()
        gpu_uuids = self.gpus
        assert len(gpu_uuids) == self.gpu_count
        self._wait_held(gpu_uuids)
        assert [(each.state.name, each.resident) for each in self.members] == [
            ("RUNNING", True)
        ] * self.gpu_count
        server, *others = (each.gpu_bytes for each in self.members)
        assert list(server.values()) == [FULL_BYTES]
        assert sorted([*server, *(uuid for other in others for uuid in other)]) == sorted(gpu_uuids)
        if others:
            self._wait_counting()
        assert not self.workload.status.HasField("parked_by")
        self._require_disk(images=0)

    def require_parked(self, process_strategy: str, *, freed: str = "all") -> None:
        """It is parked as asked, its GPU is free, and its bytes are where they should be.

        Args:
            process_strategy: What it was parked by.
            freed: What is free: nothing, weights or all.
        """
        status = self.workload.status
        assert self.state_name == STATES[process_strategy], self.log()
        assert not status.HasField("lease")
        self.fleet.wait(lambda: self.name not in self.slot_holders().values())
        left = {"nothing": FULL_BYTES, "weights": CONTEXT_BYTES, "all": 0}[freed]
        assert self.device_bytes() == left
        alive = process_strategy in ("keep_running", "cuda_suspend")
        # One that has ended is there until its parent has noticed.
        self.fleet.wait(lambda: os.path.exists(f"/proc/{self.pid}") == alive)
        assert (self.host.process(self.pid) is not None) == alive
        if process_strategy == "cuda_suspend":
            assert [each.state.name for each in self.members] == ["CHECKPOINTED"] * self.gpu_count
        if process_strategy == "keep_running":
            assert (self.state()["sleeping"] == []) == (freed == "nothing")
        self._require_disk(images=int(process_strategy == "checkpoint"))

    def _wait_counting(self) -> None:
        """Its second process counts on, and has lost no byte."""
        goal = read_counter(self.counts.read_text()).counts + 2
        self.fleet.wait(lambda: read_counter(self.counts.read_text()).counts >= goal)
        found = read_counter(self.counts.read_text())
        assert (found.lost, found.corrupt) == (0, 0), self.counts.read_text()[-500:]

    def _wait_held(self, gpu_uuids: list[str]) -> None:
        """The pool says the same as the workload, once the worker's next load is here."""

        def agrees() -> bool:
            held = [uuid for uuid, holder in self.slot_holders().items() if holder == self.name]
            return sorted(held) == sorted(gpu_uuids)

        self.fleet.wait(agrees)

    def _require_disk(self, *, images: int) -> None:
        """What is on disk is whole, in use, and no more than that."""
        mine = self.images / self.workload.workload_id
        files = sorted(path.name for path in mine.iterdir()) if mine.exists() else []
        assert not [name for name in files if name.endswith((".partial", ".work"))]
        assert len([name for name in files if name.startswith("i-")]) == images, files

    def log(self) -> str:
        """What its worker has logged, and the program has written: for failures."""
        return self.fleet.log(WORKER)[-3000:] + b"".join(self.client.output(self.name)).decode()[-2000:]


def _parent(pid: int) -> int:
    """The parent of a process, or 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


def _holder(gpu: FleetGpu) -> str:
    return gpu.workload_name or SlotState.Name(gpu.lease.state).removeprefix("SLOT_STATE_")


def reason(command: Command) -> str:
    """How a command ended: SUCCEEDED, or the reason why not."""
    if command.HasField("error"):
        return ErrorReason.Name(command.error.reason).removeprefix("ERROR_REASON_")
    return CommandState.Name(command.state).removeprefix("COMMAND_STATE_")
