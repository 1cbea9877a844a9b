"""A program that is started to be restored, and a worker that dies before it could say so."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.operation_pb2 import RestoreOperation, RunOperation, SuspendOperation
from leasehold.worker.v1.session_pb2 import CommandUpdate

from tests.worker.kernel_programs import SAVING
from tests.worker.parking_cases import STOP, SUCCEEDED, Start
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command

PROGRAM = f"""{SAVING}
app = App()
with kernel.serve(app, facts, required=False, wait_s=0.2) as served:
    say("begun", "afresh" if not served.restored_checkpoint_id else "restored")
    threading.Event().wait()
"""


ONCE = f"""{SAVING}
if os.path.exists("served"):
    threading.Event().wait()
app = App()
with kernel.serve(app, facts) as served:
    open("served", "w").close()
    say("begun")
    threading.Event().wait()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "program", "why"),
    [
        ("restless", PROGRAM, "did not become quiescent within 0.4 s"),
        pytest.param("", ONCE, "did not register within 0.6 s", marks=pytest.mark.long),
    ],
    ids=["rest", "start"],
)
def test_how_long_an_application_may_take_is_a_setting(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path, mode: str, program: str, why: str
) -> None:
    settings = tmp_path / "worker.toml"
    settings.write_text("kernel_quiescence_s = 0.4\nkernel_start_s = 0.6\n")
    start_worker(None, config=str(settings))
    session = coordinator.next_session()
    run = RunOperation(name="app")
    run.spec.arguments.extend([sys.executable, "-c", program, mode, "1000"])
    assert session.run("run", "w", run=run).state == SUCCEEDED
    (output,) = tmp_path.glob("**/w/output.log")
    wait(lambda: "begun" in output.read_text())
    outcome = stop(session)
    if mode != "restless":
        assert outcome.state == SUCCEEDED, outcome.error
        outcome = session.run("wake", "w", restore=RestoreOperation())
    assert why in outcome.error.message


def stop(session: Session) -> CommandUpdate:
    """Stops the workload once its application, which begins in any case, has registered."""
    policy = EvictionPolicy(process_strategy=STOP)
    deadline = time.monotonic() + 30
    while True:
        outcome = session.run(f"stop-{time.monotonic_ns()}", "w", suspend=SuspendOperation(policy=policy))
        if outcome.error.reason != errors_pb2.ERROR_REASON_STATE_WOULD_BE_LOST:
            return outcome
        assert time.monotonic() < deadline, outcome


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_a_program_whose_worker_died_before_its_restore_does_not_begin_afresh(
    start_worker: Start, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    worker = start_worker(None, crash_point="program-started:2")
    session = coordinator.next_session()
    run = RunOperation(name="app")
    run.spec.arguments.extend([sys.executable, "-c", PROGRAM, "", "1000"])
    assert session.run("run", "w", run=run).state == SUCCEEDED
    (output,) = tmp_path.glob("**/w/output.log")
    wait(lambda: "begun afresh" in output.read_text())
    stopped = stop(session)
    assert stopped.state == SUCCEEDED, stopped.error

    session.send(make_command("wake", "w", restore=RestoreOperation()))
    worker.process.wait(30)
    before = output.read_text()

    def told() -> str:
        return output.read_text()[len(before) :]

    wait(lambda: "waiting for the restore" in told() or "begun" in told())
    assert "begun" not in told()

    start_worker(None)
    again = coordinator.next_session()
    assert again.outcome("wake").error.reason == errors_pb2.ERROR_REASON_INTERRUPTED
    woken = again.run("wake-2", "w", restore=RestoreOperation())
    assert woken.state == SUCCEEDED, woken.error
    wait(lambda: "begun restored" in told())
    assert "begun afresh" not in told()
