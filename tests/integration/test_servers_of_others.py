"""Model servers that no worker started: they get hooks and a policy by exec, adopt and claim, too."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fleets import Fleet
from .local_hosts import LocalHost
from .models import MIB, ROOT, WORKER, Model, reason

CLAIMING = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from leasehold_client import local
from leasehold_client.arguments.hooks_file import read_hooks
from leasehold_client.arguments.policies import parse_policy
hooks, *sys.argv[1:] = sys.argv[1:]
policy = parse_policy("offload+keep_running")
with local.claim(1, name="claimed", eviction=policy, hooks=read_hooks(Path(hooks))):
    from tests.integration import model_server
    model_server.main()
"""


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    return tmp_path / "hooks.json"


@pytest.fixture(
    params=[
        "exec",
        pytest.param("adopt", marks=pytest.mark.long),
        pytest.param("claim", marks=pytest.mark.long),
    ]
)
def model(request: pytest.FixtureRequest, fleet: Fleet, alpha: LocalHost, hooks: Path) -> Iterator[Model]:
    """A server that came to be a workload in one of these ways, to sleep by its own policy."""
    made = Model(fleet, {"exec": "executed", "adopt": "adopted", "claim": "claimed"}[request.param])
    hooks.write_text(json.dumps([{"name": "engine", "vllm": {"url": f"http://127.0.0.1:{made.port}"}}]))
    options = ["--port", f"{made.port}", "--port-file", str(fleet.programs / "port"), "--faults"]
    options += [str(made.faults), "--weights", f"{4 * MIB}", "--kv", f"{2 * MIB}"]
    server = [sys.executable, "-m", "tests.integration.model_server", *options]
    evict = ["--evict", "offload+keep_running", "--hooks", str(hooks)]
    where = {"PYTHONPATH": str(ROOT)}
    match request.param:
        case "exec":
            process = alpha.exec("--name", made.name, "--gpus", "1", *evict, "--", *server, **where)
            made.wait_served()
        case "claim":
            process = alpha.python(CLAIMING, str(hooks), *options)
            made.wait_served()
        case _:
            assert alpha.simulated is not None
            gpu = alpha.simulated.gpus[0].uuid
            # Hooks of an adopted process need the Unix user of the owner's programs.
            process = alpha.start(*fleet.program_user, *server, **where, CUDA_VISIBLE_DEVICES=gpu)
            made.wait_served()
            pid = ["--worker", WORKER, "--pid", str(process.pid)]
            fleet.cli("adopt", *pid, "--name", made.name, *evict)
    made.pid = process.pid
    yield made
    process.terminate()
    process.wait(30)
    fleet.wait(lambda: not fleet.client.workloads())


@pytest.mark.long
def test_it_sleeps_and_wakes_by_its_own_policy_and_hooks(model: Model) -> None:
    assert reason(model.client.wait(model.client.suspend(model.name))) == "SUCCEEDED"
    model.require_parked("keep_running", freed="weights")
    assert reason(model.wake()) == "SUCCEEDED"
    model.require_running()


@pytest.mark.long
def test_a_hook_that_can_not_be_called_is_refused_at_once(alpha: LocalHost, hooks: Path) -> None:
    hooks.write_text(json.dumps([{"name": "engine", "vllm": {"url": "https://127.0.0.1"}}]))
    refused = alpha.exec("--gpus", "0", "--hooks", str(hooks), "--", "true")
    assert refused.wait(30) == 125
    assert "https is not supported" in alpha.err(refused)
    hooks.write_text("[]")
    refused = alpha.exec(
        "--gpus", "0", "--evict", "retain+stop", "--escalate-to", "keep_running", "--", "true"
    )
    assert refused.wait(30) == 125
