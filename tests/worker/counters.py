"""Counters as workloads of a worker process."""

import contextlib
import os
import re
import sys
import time
from pathlib import Path

from leasehold.v1 import workload_pb2
from leasehold.v1.operation_pb2 import RunOperation
from leasehold.worker.v1.session_pb2 import ConnectResponse, ReadOutput
from leasehold_simgpu import SimulatedHost, SimulatedProcess

from .conftest import COUNTER
from .scripted_coordinator import Session


def counter_run(name: str, gpu_count: int = 1, **fields: object) -> RunOperation:
    arguments = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]
    spec = workload_pb2.WorkloadSpec(
        arguments=arguments, resources=workload_pb2.Resources(gpu_count=gpu_count)
    )
    return RunOperation(name=name, spec=spec, **fields)  # type: ignore[arg-type]  # fields by name


UNHANDLED = """
import runpy, signal, sys
signal.signal = lambda *_: None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


HEADLESS = """
import ctypes, runpy, signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal = signal.set_wakeup_fd = lambda *_: None  # neither works beside the first thread
del sys.argv[0]
threading.Thread(target=runpy.run_path, args=sys.argv[:1], kwargs={"run_name": "__main__"}).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""A counter that ignores SIGTERM and whose first thread has ended."""


def headless_run(name: str) -> RunOperation:
    """A counter as a workload whose first thread has ended, and which ignores SIGTERM."""
    run = counter_run(name)
    run.spec.arguments[1:2] = ["-c", HEADLESS, run.spec.arguments[1]]
    return run


def unhandled_run(name: str) -> RunOperation:
    """A counter that leaves SIGTERM as it is, which then would kill it."""
    run = counter_run(name)
    run.spec.arguments[1:2] = ["-c", UNHANDLED, run.spec.arguments[1]]
    return run


def read_output(session: Session, workload_id: str) -> str:
    read_id = f"read-{time.monotonic_ns()}"
    request = ReadOutput(read_id=read_id, workload_id=workload_id)
    session.down.put(ConnectResponse(read_output=request))
    frame = session.wait(lambda f: f.HasField("output_chunk") and f.output_chunk.read_id == read_id)
    return frame.output_chunk.data.decode()


def wait_counting(session: Session, workload_id: str, gpu_uuid: str | None = None) -> str:
    """Waits until the counter has printed two more lines, the last of them on the GPU."""
    before = len(read_output(session, workload_id).splitlines())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = read_output(session, workload_id).splitlines()
        if len(lines) >= before + 2 and (gpu_uuid is None or gpu_uuid in lines[-1]):
            return "\n".join(lines)
        time.sleep(0.02)
    raise AssertionError(f"{read_output(session, workload_id)}\n{counter_threads()}")


def counter_threads() -> str:
    """Where in the kernel the threads of all counters are, for the message of a test that waited in vain."""
    found = []
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if str(COUNTER).encode() in (task / "cmdline").read_bytes():
                state = re.search(r"^State:.*", (task / "status").read_text(), re.MULTILINE)
                where = (task / "wchan").read_text(), (task / "syscall").read_text().strip()
                found.append(f"{task}: {state and state[0]}, in {where}; {_on_gpu(task)}")
    return "\n".join(found)


def _on_gpu(task: Path) -> SimulatedProcess | None:
    """What the simulated driver knows of the process of a thread."""
    variables = dict(part.partition(b"=")[::2] for part in (task / "environ").read_bytes().split(b"\0"))
    host = SimulatedHost.open(Path(os.fsdecode(variables[b"LEASEHOLD_SIMGPU_DIR"])))
    return host.process(int(task.parent.parent.name))


def counts(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^count=(\d+) ", text, re.MULTILINE)]


def counters(host: SimulatedHost) -> list[SimulatedProcess]:
    """The programs on GPUs; the worker's helpers have no memory there."""
    return [process for process in host.processes() if process.gpu_bytes]


def slots(session: Session) -> list[int]:
    """What hello says of each GPU."""
    return [lease.state for lease in session.hello.gpu_leases]


def workload(session: Session, workload_id: str) -> workload_pb2.Workload:
    """What hello says of a workload."""
    return next(found for found in session.hello.workloads if found.workload_id == workload_id)


def until(session: Session, workload_id: str, state: int) -> workload_pb2.Workload:
    """The workload once it is told to be in a state."""
    if any(w.workload_id == workload_id and w.status.state == state for w in session.hello.workloads):
        return workload(session, workload_id)
    event = session.wait(
        lambda frame: (
            frame.workload_event.workload.workload_id == workload_id
            and frame.workload_event.workload.status.state == state
        )
    )
    return event.workload_event.workload
