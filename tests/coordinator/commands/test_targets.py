"""The workloads that a request names."""

from pathlib import Path

import pytest
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.operation_pb2 import Move, Operation, RemapOperation, RestoreOperation
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest
from leasehold_coordinator.commands.holds import find_room
from leasehold_coordinator.commands.targets import find_target
from leasehold_coordinator.errors import FleetError

from tests.coordinator.bench import Bench, on_bench


def test_a_restore_preempts_only_workloads_of_its_own_worker(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for name, worker_id in (("one", "worker-alpha"), ("two", "worker-alpha"), ("three", "worker-beta")):
            running = Workload(workload_id=f"w-{name}", name=name, worker_id=worker_id)
            running.status.state = workload_pb2.WORKLOAD_STATE_RUNNING
            await bench.fleet.save_workload(running)
        reader = bench.fleet.reader
        target = await find_target(reader, "one", Operation(restore=RestoreOperation(preempt=["two"])))
        assert target.workload_ids == ["w-one", "w-two"]
        with pytest.raises(FleetError, match="one and three are on different workers") as refused:
            await find_target(reader, "one", Operation(restore=RestoreOperation(preempt=["three"])))
        assert refused.value.metadata["field"] == "operation.preempt"
        assert "remap" not in refused.value.message

    on_bench(tmp_path, scenario)


def test_an_unknown_workload_to_preempt_is_one_of_the_field_preempt(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(FleetError, match="has the id or name 'nope'") as refused:
            await find_room(bench.fleet.reader, CreateWorkloadRequest(preempt=["nope"]))
        assert refused.value.reason == errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD
        assert refused.value.metadata["field"] == "preempt"

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("kind", ["remap", "preempt"])
def test_many_ended_workloads_are_not_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Reads of the store would keep other decisions waiting."""

    async def scenario(bench: Bench) -> None:
        running = Workload(workload_id="w-one", name="one", worker_id="worker-alpha")
        running.status.state = workload_pb2.WORKLOAD_STATE_RUNNING
        await bench.fleet.save_workload(running)
        names = [f"ended-{number}" for number in range(200)]
        for name in names:
            ended = Workload(workload_id=f"w-{name}", name=name, worker_id="worker-alpha")
            ended.status.state = workload_pb2.WORKLOAD_STATE_EXITED
            await bench.fleet.save_workload(ended)
        reads: list[str] = []
        find_now = bench.store.find_workload

        async def find(name: str, owner: str = "") -> Workload | None:
            reads.append(name)
            return await find_now(name, owner)

        monkeypatch.setattr(bench.store, "find_workload", find)
        pairs = [GpuPair(old_uuid="GPU-alpha-0", new_uuid="GPU-alpha-1")]
        moves = [Move(workload_id=name, pairs=pairs) for name in ("one", *names)]
        operation = Operation(remap=RemapOperation(moves=moves))
        if kind == "preempt":
            operation = Operation(restore=RestoreOperation(preempt=names))
        with pytest.raises(FleetError) as refused:
            await find_target(bench.fleet.reader, "one", operation)
        assert refused.value.reason == errors_pb2.ERROR_REASON_WRONG_STATE
        assert reads == ["ended-0"]

    on_bench(tmp_path, scenario)
