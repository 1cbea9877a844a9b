"""Folding watches into a fleet."""

from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse
from leasehold_client.top.fleet_model import ENDED_COMMANDS_LIMIT, FleetModel

from .scripted_fleet import END_OF_SNAPSHOT, NOW, command, gpu, worker, workload

FLEET_END = WatchFleetResponse(bookmark=END_OF_SNAPSHOT)
WORKLOADS_END = WatchWorkloadsResponse(bookmark=END_OF_SNAPSHOT)


def test_a_snapshot_replaces_what_it_lacks_only_at_its_end() -> None:
    model = FleetModel()
    model.fold_fleet(WatchFleetResponse(worker=worker()))
    model.fold_fleet(WatchFleetResponse(gpu=gpu(0)))
    assert not model.gpus.values
    model.fold_fleet(FLEET_END)
    assert set(model.gpus.values) == {"GPU-alpha-0"}
    model.begin_fleet()
    model.fold_fleet(WatchFleetResponse(gpu=gpu(1)))
    assert set(model.gpus.values) == {"GPU-alpha-0"}
    assert not model.is_complete
    model.fold_fleet(FLEET_END)
    assert set(model.gpus.values) == {"GPU-alpha-1"}
    assert not model.workers.values
    assert not model.sample("GPU-alpha-0").HasField("temperature_celsius")


def test_deletions_and_unknown_deletions() -> None:
    model = FleetModel()
    for response in (WatchFleetResponse(worker=worker()), WatchFleetResponse(gpu=gpu(0)), FLEET_END):
        model.fold_fleet(response)
    for response in (
        WatchFleetResponse(deleted_gpu_uuid="GPU-alpha-0"),
        WatchFleetResponse(deleted_worker_id="w-alpha"),
        WatchFleetResponse(deleted_worker_id="w-nobody"),
    ):
        model.fold_fleet(response)
    assert not model.gpus.values
    assert not model.workers.values


def test_an_ended_workload_leaves_its_name() -> None:
    model = FleetModel()
    model.fold_workloads(WORKLOADS_END)
    model.fold_workloads(WatchWorkloadsResponse(workload=workload("one")))
    assert model.workload_name("id-of-one") == "one"
    ended = workload("one", state=workload_pb2.WORKLOAD_STATE_EXITED)
    model.fold_workloads(WatchWorkloadsResponse(workload=ended))
    assert not model.workloads.values
    assert model.workload_name("id-of-one") == "one"
    assert model.workload_name("id-of-nobody") == "id-of-nobody"


def test_ended_commands_are_bounded() -> None:
    model = FleetModel()
    model.fold_commands(WatchCommandsResponse(bookmark=END_OF_SNAPSHOT))
    for number in range(ENDED_COMMANDS_LIMIT + 3):
        model.fold_commands(WatchCommandsResponse(command=command(f"c-{number}")))
        ended = command(f"c-{number}", state=command_pb2.COMMAND_STATE_SUCCEEDED)
        model.fold_commands(WatchCommandsResponse(command=ended))
    assert not model.commands.values
    assert list(model.ended_commands) == [f"c-{number}" for number in range(3, ENDED_COMMANDS_LIMIT + 3)]


def test_a_command_that_ended_does_not_open_again() -> None:
    model = FleetModel()
    model.fold_commands(WatchCommandsResponse(bookmark=END_OF_SNAPSHOT))
    model.fold_commands(
        WatchCommandsResponse(command=command("c-1", state=command_pb2.COMMAND_STATE_SUCCEEDED))
    )
    model.put_command(command("c-1"))  # the answer to the request, after the watch
    assert not model.commands.values


def test_the_newest_measurements_win_and_missing_ones_are_unknown() -> None:
    model = FleetModel()
    model.fold_fleet(WatchFleetResponse(gpu=gpu(0)))
    model.fold_fleet(FLEET_END)
    older = gpu(0)
    older.lease.sample.sample_time.seconds = NOW.seconds - 5
    older.lease.sample.temperature_celsius = 10
    model.take_samples([older, gpu(5)])
    assert model.sample("GPU-alpha-0").temperature_celsius == 71
    assert not model.sample("GPU-alpha-5").HasField("temperature_celsius")
    silent = gpu(0)
    silent.lease.ClearField("sample")
    model.take_samples([silent])
    assert not model.sample("GPU-alpha-0").HasField("temperature_celsius")
