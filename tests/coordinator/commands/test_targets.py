"""The workloads that a request names."""

from pathlib import Path

import pytest
from leasehold.v1 import workload_pb2
from leasehold.v1.operation_pb2 import Operation, RestoreOperation
from leasehold.v1.workload_pb2 import Workload
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
