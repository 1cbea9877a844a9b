"""What a workload's program and its launcher get of which environment."""

from collections.abc import Callable

import pytest
from leasehold.v1.operation_pb2 import RunOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_worker.programs.child_input import environment_entries
from leasehold_worker.programs.environment import inherited_environment

from tests.worker.conftest import WorkerProcess
from tests.worker.counters import read_output
from tests.worker.scripted_coordinator import ScriptedCoordinator


def test_what_is_not_named_is_not_inherited() -> None:
    given = {
        "PATH": "/bin",
        "LC_TIME": "C",
        "AWS_SECRET_ACCESS_KEY": "s",
        "LD_PRELOAD": "x",
        "WANDB_MODE": "on",
    }
    assert inherited_environment((), given) == {"PATH": "/bin", "LC_TIME": "C"}
    assert inherited_environment(["WANDB_*"], given) == {"PATH": "/bin", "LC_TIME": "C", "WANDB_MODE": "on"}


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"])
def test_a_variable_that_no_environment_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="invalid environment variable"):
        environment_entries({name: "value"})


def test_a_launcher_loads_nothing_of_its_program_and_a_program_gets_no_secrets(
    start_worker: Callable[..., WorkerProcess],
    coordinator: ScriptedCoordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-worker")
    start_worker(None)
    session = coordinator.next_session()
    preload = {"LD_PRELOAD": "/nonexistent/library.so", "WORD": "two\nlines"}
    spec = WorkloadSpec(arguments=["env"], environment=preload)
    session.run("c1", "w1", run=RunOperation(name="one", spec=spec))
    session.wait(lambda frame: frame.workload_event.workload.status.HasField("exit"))
    said = read_output(session, "w1")
    assert "WORD=two\nlines\n" in said
    assert said.count("cannot be preloaded") == 1, said
    assert "secret-of-the-worker" not in said
