"""Every policy by which a workload can be parked, from the command line, on a real fleet."""

import itertools
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from leasehold_client.main import leasehold

from tests.worker.criu_cases import criu_setting

from .fleets import Fleet, make_fleet
from .models import STATES, WORKER, Model, images_are_local, require_images, told

WEIGHTS = ("retain", "offload", "discard")
ESTIMATED = {
    "keep_running": ["hooks"],
    "cuda_suspend": ["hooks", "checkpoint of"],
    "checkpoint": ["hooks", "checkpoint of", "image"],
    "stop": ["terminate"],
}
"""What the time that a dry run tells is made of, by process strategy."""

ALIVE = ("keep_running", "cuda_suspend")
STEPS = {
    "retain": [],
    "offload": ["its framework moves the weights to host memory"],
    "discard": ["its framework drops the weights"],
    "keep_running": [],
    "cuda_suspend": ["the driver moves device memory to host memory"],
    "checkpoint": [
        "the driver moves device memory to host memory",
        "CRIU writes the processes to disk, and they end",
    ],
}
STOP_STEPS = ["its application saves itself, if it is checkpointable", "its processes are ended"]
TIERS = {
    "cuda_suspend": ["TIER_HOST"],
    "checkpoint": ["TIER_DISK"],
    "stop": ["TIER_DISK"],
}
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory, is_mutual: bool) -> Iterator[Fleet]:
    """One fleet for all tests here that leave it as it was."""
    with make_fleet(tmp_path_factory.mktemp("strategies"), is_mutual=is_mutual) as started:
        started.start_worker(WORKER, settings=criu_setting())
        yield started


@pytest.fixture
def model(shared_fleet: Fleet) -> Iterator[Model]:
    """A model server that runs on the worker's first GPU."""
    yield from serving(Model(shared_fleet, f"chat-{next(NUMBERS)}"))


@pytest.fixture
def saver(shared_fleet: Fleet) -> Iterator[Model]:
    """One that saves itself."""
    yield from serving(Model(shared_fleet, f"saver-{next(NUMBERS)}", kernel=True))


def serving(model: Model) -> Iterator[Model]:
    """Runs a model server for the time of a test."""
    model.start(gpu=f"{WORKER}/0")
    model.generate()
    yield model
    model.clear_faults()
    model.client.wait(model.client.stop(model.name, grace_s=0), check=False)
    # What is told of leases may be older than that somebody else has got one and is ending.
    model.fleet.wait(lambda: not model.client.workloads() and not model.fleet.leases())


def verb(fleet: Fleet, *arguments: str) -> Any:
    """Runs a verb within this process, which takes a tenth of the time, and reads its document."""
    name, *others = arguments
    done = CliRunner().invoke(leasehold, [name, "-o", "json", *others], env=fleet.variables)
    assert done.exit_code == 0, (arguments, done.output)
    return json.loads(done.stdout)


def freed(weights: str, process: str) -> str:
    """What of device memory is free, by the table."""
    if process != "keep_running":
        return "all"
    return "nothing" if weights == "retain" else "weights"


def asked(weights: str, process: str) -> list[str]:
    """The options of a policy."""
    return ["--weights", weights, "--process", process]


def plan_is_told(model: Model, weights: str, process: str, *force: str) -> None:
    """The dry run says what would be done, and where the bytes would be."""
    plan = verb(model.fleet, "suspend", model.name, *asked(weights, process), *force, "--dry-run")
    assert not plan["refusals"]
    assert plan["policy"] == {
        "escalate_to": "PROCESS_STRATEGY_UNSPECIFIED",
        "weight_strategy": f"WEIGHT_STRATEGY_{weights.upper()}",
        "process_strategy": f"PROCESS_STRATEGY_{process.upper()}",
    }
    steps = ["the workload's hooks are called", *STEPS[weights], *STEPS[process]] if process != "stop" else []
    assert plan["steps"] == (steps or STOP_STEPS)
    at_rest = ["TIER_DEVICE", "TIER_HOST"] if weights == "offload" else ["TIER_DEVICE"]
    assert sorted(tier["tier"] for tier in plan["tiers"]) == TIERS.get(process, at_rest)
    assert float(plan["estimate"]["duration"].rstrip("s")) > 0
    for phase in ESTIMATED[process]:
        assert phase in plan["estimate"]["basis"]
    assert model.state_name == "RUNNING"


def cell(model: Model, weights: str, process: str, *force: str) -> None:
    """Parks a workload by one policy, and wakes it, with all that must be true in between and afterwards."""
    with told(f"{weights}+{process}"):
        plan_is_told(model, weights, process, *force)
        down = verb(model.fleet, "suspend", model.name, *asked(weights, process), *force)
        assert down["state"] == "COMMAND_STATE_SUCCEEDED"
        assert down["result"]["policy"]["process_strategy"] == f"PROCESS_STRATEGY_{process.upper()}"
        model.require_parked(process, freed=freed(weights, process))
        pid = model.pid
        up = verb(model.fleet, "wake", model.name, "--dry-run")
        assert float(up["estimate"]["duration"].rstrip("s")) > 0
        woken = verb(model.fleet, "wake", model.name)
        assert woken["state"] == "COMMAND_STATE_SUCCEEDED"
        assert not woken["result"]["warnings"], woken
        if process == "stop" and not model.kernel:
            model.requests = 0
        model.wait_served()
        model.require_running()
        model.pid = model.state()["pid"]
        assert (model.pid == pid) == (process != "stop")


def refused(model: Model, policy: list[str], wanted: str) -> None:
    """A suspend is refused for a reason, and nothing has happened; so says its dry run."""
    for dry_run in ([], ["--dry-run"]):
        done = model.fleet.cli("suspend", model.name, *policy, *dry_run, code=1)
        assert wanted in done.stderr
    model.require_running()


def test_policies_that_keep_the_processes(model: Model) -> None:
    for weights in WEIGHTS:
        for process in ALIVE:
            if (weights, process) == ("retain", "keep_running"):
                refused(model, asked(weights, process), "NOTHING_FREED")
                cell(model, weights, process, "--force")
            else:
                cell(model, weights, process)
    assert model.requests == 1 + 1 + 6, "the count goes on"


@pytest.mark.long
def test_policies_that_end_the_processes(model: Model) -> None:
    for number, weights in enumerate(WEIGHTS):
        if number == 0:
            refused(model, asked(weights, "stop"), "STATE_WOULD_BE_LOST")
        cell(model, weights, "stop", "--force")


@pytest.mark.long
def test_an_application_that_saves_itself_is_stopped_without_being_forced(saver: Model) -> None:
    for weights in WEIGHTS:
        cell(saver, weights, "stop")
    assert saver.requests == 1 + 3, "the count goes on, whoever counts"
    assert len(verb(saver.fleet, "get", "checkpoints", saver.name)["checkpoints"]) == 3


@pytest.mark.long
@images_are_local
def test_policies_that_write_images(model: Model) -> None:
    require_images(model.fleet)
    for weights in WEIGHTS:
        cell(model, weights, "checkpoint")


@pytest.mark.long
def test_meanwhile_another_workload_has_the_gpu(model: Model) -> None:
    fleet = model.fleet
    verb(fleet, "suspend", model.name, *asked("offload", "keep_running"))
    verb(fleet, "run", "--name", "tenant", "--gpu", f"{WORKER}/0", "--", "sleep", "1000")
    fleet.refuse("wake", model.name, code=1, match="NO_FREE_GPU")
    fleet.refuse("wake", model.name, "--to", f"{WORKER}/1", code=1, match="contexts stay on its GPUs")
    verb(fleet, "suspend", model.name, *asked("offload", "cuda_suspend"))
    model.require_parked("cuda_suspend")
    home = model.workload.status.parked_gpu_uuids[0]
    verb(fleet, "wake", model.name)
    model.require_running()
    assert model.gpus != [home], "the tenant has it"
    verb(fleet, "stop", "tenant", "--grace", "0")
    verb(fleet, "suspend", model.name, *asked("discard", "cuda_suspend"))
    verb(fleet, "wake", model.name, "--to", f"{WORKER}/0")
    model.require_running()
    assert model.gpus == [home]
    verb(fleet, "suspend", model.name, "--process", "stop", "--force")
    verb(fleet, "wake", model.name, "--to", f"{WORKER}/3")
    model.requests = 0
    model.wait_served()
    model.require_running()
    assert model.gpus == [model.host.gpus[3].uuid]


@pytest.mark.long
@images_are_local
def test_an_image_wakes_on_another_gpu(model: Model) -> None:
    require_images(model.fleet)
    for weights, gpu in (("retain", 1), ("discard", 2)):
        verb(model.fleet, "suspend", model.name, *asked(weights, "checkpoint"))
        verb(model.fleet, "wake", model.name, "--to", f"{WORKER}/{gpu}")
        model.require_running()
        assert model.gpus == [model.host.gpus[gpu].uuid]


def climb(model: Model, *rungs: str) -> None:
    """Parks a workload by one process strategy after the other, and wakes it from the last."""
    with told(" -> ".join(rungs)):
        for rung in rungs:
            verb(model.fleet, "suspend", model.name, *asked("offload", rung), "--force")
            model.require_parked(rung, freed=freed("offload", rung))
            parked_by = model.workload.status.parked_by
            again = verb(model.fleet, "suspend", model.name, *asked("retain", rung))
            assert again["result"]["already_there"]
            assert model.workload.status.parked_by == parked_by
        for weaker in list(STATES)[: list(STATES).index(rungs[-1])]:
            model.suspend(f"retain+{weaker}", force=True)
            assert model.state_name == STATES[rungs[-1]], "a weaker one changes nothing"
        verb(model.fleet, "wake", model.name)
        if rungs[-1] == "stop":
            model.requests = 0
        model.wait_served()
        model.require_running()
        model.pid = model.state()["pid"]


@pytest.mark.long
def test_a_parked_workload_is_parked_by_a_stronger_policy(model: Model) -> None:
    climb(model, "keep_running", "cuda_suspend")
    climb(model, "keep_running", "cuda_suspend", "stop")
    climb(model, "keep_running", "stop")


@pytest.mark.long
@images_are_local
def test_a_parked_workload_becomes_an_image(model: Model) -> None:
    require_images(model.fleet)
    climb(model, "keep_running", "cuda_suspend", "checkpoint")
    climb(model, "keep_running", "checkpoint")
    climb(model, "cuda_suspend", "checkpoint", "stop")


@pytest.mark.long
def test_the_ladder_is_climbed_as_far_as_it_goes(model: Model) -> None:
    """A driver that can't suspend: what is stronger is used if it is allowed, and no further."""
    model.host.set_fault("checkpoint", model.pid, error=801)
    for ladder in ([], ["--escalate-to", "checkpoint"]):
        refusal = model.fleet.cli("suspend", model.name, *asked("offload", "cuda_suspend"), *ladder, code=1)
        assert "UNSUPPORTED_STATE" in refusal.stderr
        model.require_running()
    done = verb(
        model.fleet, "suspend", model.name, *asked("offload", "cuda_suspend"), "--escalate-to", "stop"
    )
    assert any("offload+cuda_suspend failed" in warning for warning in done["result"]["warnings"]), done
    assert done["result"]["policy"]["process_strategy"] == "PROCESS_STRATEGY_STOP"
    model.require_parked("stop")
    model.clear_faults()
    verb(model.fleet, "wake", model.name)
    model.requests = 0
    model.wait_served()
    model.require_running()


PARKED_POLICIES = ("discard+keep_running", "offload+cuda_suspend", "offload+checkpoint", "retain+stop")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_worker_wakes_whatever_was_parked(
    empty_fleet: Fleet, is_mutual: bool, number: int
) -> None:
    fleet = empty_fleet
    leave = f'stop_workloads = "leave"\n{criu_setting()}'
    fleet.start_worker(WORKER, settings=leave)
    models = {}
    for policy in PARKED_POLICIES:
        weights, process = policy.split("+")
        model = models[policy] = Model(fleet, f"{process.replace('_', '-')}", kernel=process == "stop")
        model.start()
        model.generate()
    capability = {each.name: each for each in fleet.client.workers()[0].capabilities}["checkpoint_image"]
    if is_mutual or not capability.available:  # programs of enrolled users have no images
        del models["offload+checkpoint"]
    for policy, model in models.items():
        assert model.suspend(policy).result.policy
    fleet.end(WORKER, number)
    fleet.start_worker(WORKER, settings=leave)
    for policy, model in models.items():
        weights, process = policy.split("+")
        with told(policy):
            model.require_parked(process, freed=freed(weights, process))
            fleet.cli("wake", model.name)
            model.wait_served()
            model.require_running()
            assert (model.state()["pid"] == model.pid) == (process != "stop")
    fleet.end(WORKER, signal.SIGTERM)
    fleet.start_worker(WORKER)


@pytest.mark.long
def test_who_ends_of_sigterm_needs_no_suspend_before_being_killed(shared_fleet: Fleet) -> None:
    """It was woken, so it is suspended before it is killed; and the driver can't suspend what is ending."""
    model = Model(shared_fleet, "ending")
    model.start()
    assert model.suspend("retain+cuda_suspend").result.policy
    model.fleet.cli("wake", model.name)
    model.host.set_fault("lock", model.pid, error=304)
    model.fleet.cli("stop", model.name, "--grace", "0")
    model.clear_faults()
    model.fleet.wait(lambda: not model.fleet.leases())
