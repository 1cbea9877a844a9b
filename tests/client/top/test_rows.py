"""Rows of a fleet: their order, and what filters leave."""

from collections.abc import Iterable

import pytest
from leasehold.v1 import worker_pb2
from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse
from leasehold_client.top.fleet_model import FleetModel
from leasehold_client.top.rows import ORDERS, Matches, View, command_rows, fleet_rows

from .scripted_fleet import END_OF_SNAPSHOT, LEASED, command, gpu, parked, worker, workload


def model_of(fleet: Iterable[Worker | FleetGpu], workloads: Iterable[Workload] = ()) -> FleetModel:
    model = FleetModel()
    for one in fleet:
        change = {"worker": one} if isinstance(one, Worker) else {"gpu": one}
        model.fold_fleet(WatchFleetResponse(**change))
    for each in workloads:
        model.fold_workloads(WatchWorkloadsResponse(workload=each))
    model.fold_fleet(WatchFleetResponse(bookmark=END_OF_SNAPSHOT))
    model.fold_workloads(WatchWorkloadsResponse(bookmark=END_OF_SNAPSHOT))
    model.fold_commands(WatchCommandsResponse(bookmark=END_OF_SNAPSHOT))
    return model


@pytest.fixture
def model() -> FleetModel:
    """Alpha with a leased and a free GPU and a parked workload, beta with a free one, and gamma is lost."""
    return model_of(
        [
            worker("beta", pending_claimers=1),
            gpu(0, worker="beta"),
            worker("alpha"),
            gpu(1),
            gpu(0, LEASED, "one"),
            worker("gamma", state=worker_pb2.WORKER_STATE_LOST),
        ],
        [workload("one", "GPU-alpha-0"), parked("two"), workload("cpu-only")],
    )


def keys(model: FleetModel, view: View) -> list[str]:
    return [row.key for row in fleet_rows(model, view)]


def test_slots_then_workloads_without_slot_then_claims(model: FleetModel) -> None:
    assert keys(model, View()) == [
        "host w-alpha",
        "gpu GPU-alpha-0",
        "gpu GPU-alpha-1",
        "workload id-of-cpu-only",
        "workload id-of-two",
        "host w-beta",
        "gpu GPU-beta-0",
        "claims w-beta",
        "host w-gamma",
    ]


def test_closed_hosts(model: FleetModel) -> None:
    assert keys(model, View(opens_hosts=False)) == ["host w-alpha", "host w-beta", "host w-gamma"]
    opened = View(opens_hosts=False, toggled=frozenset({"w-beta"}))
    assert keys(model, opened)[1:4] == ["host w-beta", "gpu GPU-beta-0", "claims w-beta"]


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("name", "w-alpha"),
        ("most free GPUs", "w-alpha"),
        ("most parked bytes", "w-alpha"),
        ("most waiting claims", "w-beta"),
        ("out of contact first", "w-gamma"),
    ],
)
def test_orders(model: FleetModel, order: str, first: str) -> None:
    assert keys(model, View(order=order))[0] == f"host {first}"
    assert order in ORDERS


@pytest.mark.parametrize("order", ["most free GPUs", "most waiting claims"])
def test_last_known_numbers_of_a_host_out_of_contact_rank_it_nowhere(order: str) -> None:
    lost = worker("alpha", state=worker_pb2.WORKER_STATE_LOST, pending_claimers=9)
    gpus = [gpu(0), gpu(1), gpu(0, worker="beta")]
    model = model_of([lost, worker("beta", pending_claimers=1), *gpus])
    assert keys(model, View(order=order))[0] == "host w-beta"
    assert "claims w-alpha" not in keys(model, View())


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("beta", ["host w-beta", "gpu GPU-beta-0", "claims w-beta"]),
        ("alpha leased", ["host w-alpha", "gpu GPU-alpha-0"]),
        ("two", ["host w-alpha", "workload id-of-two"]),
        ("parked", ["host w-alpha", "workload id-of-two"]),
        ("lost", ["host w-gamma"]),
        ("nothing", []),
    ],
)
def test_words(model: FleetModel, words: str, left: list[str]) -> None:
    assert keys(model, View(words=tuple(words.split()))) == left


def test_matches_of_an_expression(model: FleetModel) -> None:
    none: frozenset[str] = frozenset()
    by_gpu = Matches(none, frozenset({"GPU-alpha-1"}), none)
    assert keys(model, View(matches=by_gpu)) == ["host w-alpha", "gpu GPU-alpha-1"]
    by_workload = Matches(none, none, frozenset({"id-of-one", "id-of-two"}))
    assert keys(model, View(matches=by_workload)) == ["host w-alpha", "gpu GPU-alpha-0", "workload id-of-two"]
    by_worker = Matches(frozenset({"w-gamma"}), none, none)
    assert keys(model, View(matches=by_worker)) == ["host w-gamma"]


def test_commands_have_names(model: FleetModel) -> None:
    model.put_command(command("c-1"))
    model.put_command(command("c-2", ""))
    of_gpus = command("c-3", "")
    of_gpus.operation.cordon.gpu_uuids.extend(["GPU-beta-0", "GPU-99999999-0000"])
    model.put_command(of_gpus)
    assert [(row.key, getattr(row, "about", "")) for row in command_rows(model)] == [
        ("command c-1", "one"),
        ("command c-2", "alpha"),
        ("command c-3", "beta/0, GPU-99999999"),
    ]
