"""The Python client on a real coordinator: watches, records, and options of requests."""

import pytest
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_client import Client, LeaseholdError

from tests.coordinator.api.test_command_service import reported
from tests.coordinator.api.test_watches import exit_workload
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker

CPU = WorkloadSpec(arguments=["program"])


def test_watches_show_what_the_client_does(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    with Client(coordinator.address) as client:
        watches = (
            client.watch_fleet(),
            client.watch_workloads(),
            client.watch_commands(worker="alpha"),
            client.watch_events(),
        )
        for watch in watches:
            assert any(response.bookmark.snapshot_end for response in watch)
        _, workloads, commands, events = watches
        workload, command = client.run(CPU, name="one", labels={"team": "a"}, request_id="r-1")
        assert client.run(CPU, name="one", labels={"team": "a"}, request_id="r-1")[1].command_id == (
            command.command_id
        )
        assert dict(next(workloads).workload.labels) == {"team": "a"}
        assert next(commands).command.command_id == command.command_id
        assert next(event for event in events if event.event.command_id == command.command_id)
        worker.succeed("run", reported(workload, workload_pb2.WORKLOAD_STATE_RUNNING, 1))
        with pytest.raises(LeaseholdError) as refused:
            client.stop("one", expected_generation=7)
        assert refused.value.reason == "GENERATION_MISMATCH"
        updated = client.update_workload("one", labels={"team": "b"}, annotations={"note": "c"})
        assert (dict(updated.labels), dict(updated.annotations)) == ({"team": "b"}, {"note": "c"})
        with pytest.raises(LeaseholdError) as refused:
            client.update_workload("one", labels={}, etag=workload.etag)
        assert refused.value.reason == "ETAG_MISMATCH"
        assert dict(client.update_workload("one", labels={}).annotations) == {"note": "c"}
        exit_workload(coordinator, worker, workload)
        assert client.delete_workload("one").deleted_command_count == 1
        assert any(response.deleted_workload_id == workload.workload_id for response in workloads)
        assert any(response.deleted_command_id == command.command_id for response in commands)


def test_a_request_can_be_validated(coordinator: CoordinatorProcess, worker: ScriptedWorker) -> None:
    with Client(coordinator.address) as client:
        workload, command = client.run(CPU, name="one", validate_only=True)
        assert (workload.name, command) == ("one", command_pb2.Command())
        assert not client.workloads()


def test_a_watch_is_resumed_or_says_that_changes_were_missed(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    with Client(coordinator.address) as client:
        watching = client.watch_fleet()
        token = next(response.resume_token for response in watching if response.resume_token)
        client.run(CPU, name="one")
        assert next(client.watch_workloads("one")).workload.name == "one"
        resumed = client.watch_fleet(token)
        worker.report()
        worker.close()
        assert next(resumed).HasField("worker")
        coordinator.restart()
        with pytest.raises(LeaseholdError) as error:
            list(watching)
        assert error.value.reason == "INVALID_TOKEN"
