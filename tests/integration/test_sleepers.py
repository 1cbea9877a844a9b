"""What a sleeping workload keeps: on its GPU, which offers that much less, and in host memory."""

import pytest
from leasehold_client.arguments.policies import parse_policy
from leasehold_simgpu import SimulatedHost, Timing

from .fleets import Fleet
from .models import CONTEXT_BYTES, FULL_BYTES, MIB, WORKER, Model, reason


def worker_with(fleet: Fleet, memory_bytes: int, *, gpus: int = 1, settings: str = "") -> None:
    """Starts a worker whose GPUs have some memory."""
    fleet.hosts[WORKER] = SimulatedHost.create(
        fleet.folder / "small-host",
        gpus=gpus,
        chip="H100",
        memory_bytes=memory_bytes,
        timing=Timing.instant(),
    )
    fleet.start_worker(WORKER, settings=settings)


@pytest.mark.long
@pytest.mark.parametrize(
    "restarts",
    [
        pytest.param(False, id="same worker"),
        pytest.param(True, id="restarted worker", marks=pytest.mark.long),
    ],
)
def test_a_gpu_offers_what_a_sleeping_workload_leaves(empty_fleet: Fleet, restarts: bool) -> None:
    fleet = empty_fleet
    worker_with(fleet, 4 * CONTEXT_BYTES)
    model = Model(fleet, "chat")
    model.start()
    assert reason(model.suspend("offload+keep_running")) == "SUCCEEDED"
    if restarts:
        fleet.end(WORKER)
        fleet.start_worker(WORKER)
    fleet.wait(lambda: fleet.client.gpus()[0].lease.asleep_bytes == CONTEXT_BYTES)
    sleep = ["--", "sleep", "60"]
    for where in (["--gpus", "1"], ["--gpu", f"{WORKER}/0"]):
        refused = fleet.cli("run", *where, "--gpu-memory", f"{1 + 3 * CONTEXT_BYTES}B", *sleep, code=1).stderr
        assert "NO_FREE_GPU" in refused
        assert "sleeping workloads" in refused
    taken = fleet.json(
        "run", "--name", "next", "--gpus", "1", "--gpu-memory", f"{3 * CONTEXT_BYTES}B", *sleep
    )
    assert taken["state"] == "COMMAND_STATE_SUCCEEDED"
    assert reason(model.wake()) == "NO_FREE_GPU"
    fleet.client.wait(fleet.client.stop("next", grace_s=0), check=False)
    assert reason(model.wake()) == "SUCCEEDED"
    model.require_running()
    fleet.wait(lambda: not fleet.client.gpus()[0].lease.HasField("asleep_bytes"))


@pytest.mark.long
def test_a_workload_that_would_keep_most_of_its_gpu_stays_awake(empty_fleet: Fleet) -> None:
    worker_with(empty_fleet, 3 * CONTEXT_BYTES // 2)
    model = Model(empty_fleet, "chat")
    model.start()
    refused = model.suspend("offload+keep_running")
    assert reason(refused) == "MEMORY_NOT_FREED"
    assert "keeps 512 MiB of the 768 MiB" in refused.error.message
    model.require_running()
    assert reason(model.suspend("offload+cuda_suspend")) == "SUCCEEDED"


@pytest.mark.long
def test_offloaded_weights_count_as_parked_and_make_room_for_others(empty_fleet: Fleet) -> None:
    fleet = empty_fleet
    limit = FULL_BYTES + 2 * MIB  # of the second one, only the framework knows how little it would move
    fleet.start_worker(WORKER, settings=f'parked_memory_limit = "{limit}B"')
    models = {}
    for name, ladder in (("a", ["--evict", "offload+keep_running", "--escalate-to", "stop"]), ("b", [])):
        models[name] = Model(fleet, name)
        models[name].start(*ladder)
    assert reason(fleet.client.wait(fleet.client.suspend("a"))) == "SUCCEEDED"
    stronger = fleet.json("suspend", "a", "--process", "cuda_suspend", "--dry-run")
    assert {check["name"]: check["detail"] for check in stronger["checks"]}["state"] == "a is SLEEPING"
    offload = parse_policy("offload+keep_running")
    plan = fleet.json("suspend", "b", "--weights", "offload", "--process", "keep_running", "--dry-run")
    checks = {check["name"]: check["detail"] for check in plan["checks"]}
    assert checks["host_memory"].startswith("workload a is suspended by")
    assert reason(fleet.client.wait(fleet.client.suspend("b", policy=offload))) == "SUCCEEDED"
    models["b"].require_parked("keep_running", freed="weights")
    assert models["a"].state_name in ("CHECKPOINTED", "STOPPED")


@pytest.mark.long
def test_offloaded_weights_do_not_exceed_the_limit_of_parked_memory(empty_fleet: Fleet) -> None:
    empty_fleet.start_worker(WORKER, settings=f'parked_memory_limit = "{FULL_BYTES - 1}B"')
    model = Model(empty_fleet, "chat")
    model.start()
    assert reason(model.suspend("offload+keep_running")) == "INSUFFICIENT_HOST_MEMORY"
    model.require_running()
    assert reason(model.suspend("discard+keep_running")) == "SUCCEEDED"
