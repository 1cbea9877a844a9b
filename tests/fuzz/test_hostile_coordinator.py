"""A worker, spoken to by a coordinator that means harm or is broken.

Bytes that are no frame are in ``tests/worker/session/test_agent_sessions.py``: a worker that has read them
reconnects only after a minute.
"""

import random
from collections.abc import Callable

from hypothesis import given
from leasehold.v1 import command_pb2
from leasehold.v1.operation_pb2 import RunOperation, StopOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.worker.v1.session_pb2 import ConnectResponse

from tests.worker.conftest import WorkerProcess, coordinator, start_worker  # noqa: F401 - fixtures
from tests.worker.scripted_coordinator import ScriptedCoordinator

from .conftest import Examples
from .messages import fill
from .test_hostile_peers import SEEDS

OBEYED = ("goodbye", "drain", "welcome")
"""Frames that end the session, as they should."""


def test_hostile_frames_change_nothing_for_a_worker_and_its_workloads(
    start_worker: Callable[..., WorkerProcess],  # noqa: F811
    coordinator: ScriptedCoordinator,  # noqa: F811
    examples: Examples,
) -> None:
    worker = start_worker(None)
    session = coordinator.next_session()
    run = RunOperation(name="honest", spec=WorkloadSpec(arguments=["sleep", "300"]))
    assert session.run("honest-1", "w-honest", run=run).state == command_pb2.COMMAND_STATE_SUCCEEDED

    @examples
    @given(SEEDS)
    def play(seed: int) -> None:
        choose = random.Random(seed)
        frame = fill(ConnectResponse, choose)
        if frame.WhichOneof("frame") in OBEYED:
            return
        if frame.HasField("heartbeat"):
            frame.heartbeat.ClearField("load_interval")  # an odd one ends the session, too
        if frame.HasField("command") and choose.random() < 0.7:
            frame.command.epoch = session.epoch
        session.down.put(frame)

    play()
    stopped = session.run("honest-2", "w-honest", stop=StopOperation())
    assert stopped.state in (command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_REJECTED)
    assert not session.ended
    assert worker.process.poll() is None
    assert "Traceback" not in worker.log.read_text()
