"""A worker's parts that move a workload, and can't look at it then for lack of threads or descriptors.

``python -m tests.worker.operations.blind_moves FOLDER SCENARIO``, on a simulated host with two GPUs. Prints
as JSON what became of the workload, and whether another claim was granted one of its GPUs.
"""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import trio
from leasehold.v1 import gpu_pb2, workload_pb2
from leasehold.v1.operation_pb2 import Move, RemapOperation, RestoreOperation, RunOperation, SuspendOperation
from leasehold_simgpu import SimulatedHost
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.progress import Progress
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.operations import cuda_suspend
from leasehold_worker.workloads.states import state_text

COUNTER: Final = Path(__file__).resolve().parents[3] / "examples/counter.py"
TIMEOUT_S: Final = 60.0


async def _no_thread(*_: object) -> NoReturn:
    await trio.lowlevel.checkpoint()
    raise RuntimeError("can't start new thread")


async def _no_descriptor(*_: object, **__: object) -> NoReturn:
    await trio.lowlevel.checkpoint()
    raise OSError(errno.EMFILE, "too many open files")


def _be_blind_after_proof(parts: Parts) -> None:
    """NVML can't be asked once the members are where they should be."""
    verification: Any = parts.verification
    prove = verification.prove_placed

    async def proved(*arguments: Any) -> None:
        await prove(*arguments)
        verification.usage = _no_thread

    verification.prove_placed = proved


async def _play(parts: Parts, host: SimulatedHost, scenario: str) -> dict[str, object]:
    moves: Any = cuda_suspend
    first, second = (gpu.uuid for gpu in host.gpus)
    spec = workload_pb2.WorkloadSpec(
        arguments=[sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"],
        resources=workload_pb2.Resources(gpu_count=1),
    )
    operations = parts.operations
    run = RunOperation(name="one", spec=spec, gpu_uuids=[first])
    await operations.run("w-1", run, Progress.unheard())
    workload = parts.workloads.get("w-1")
    root = workload.root.pid
    while not host.process(root):  # noqa: ASYNC110 - another process starts to use CUDA
        await trio.sleep(0.02)
    if scenario != "remap":
        await operations.suspend("w-1", SuspendOperation(), Progress.unheard())
    claims: list[str] = []

    async def claim(gpu_uuid: str) -> None:
        await parts.pool.claim("other", GpuRequest(1, gpu_uuids=(gpu_uuid,)))
        claims.append(gpu_uuid)

    told = ""
    async with trio.open_nursery() as nursery:
        reserve: Any = operations._acquisition.reserve

        def reserve_with_rivals(plan: Any) -> Any:
            reserved = reserve(plan)
            for lease in reserved:
                for gpu_uuid in lease.gpu_uuids:
                    nursery.start_soon(claim, gpu_uuid)
            return reserved

        setattr(operations._acquisition, "reserve", reserve_with_rivals)  # noqa: B010
        if scenario == "order":
            moves.is_sequential = _no_descriptor
        elif scenario == "libraries":
            moves.read_process = _no_descriptor
        else:
            _be_blind_after_proof(parts)
        try:
            if scenario == "remap":
                pairs = [gpu_pb2.GpuPair(old_uuid=first, new_uuid=second)]
                await operations.remap(
                    RemapOperation(moves=[Move(workload_id="w-1", pairs=pairs)]), Progress.unheard()
                )
            else:
                wanted = second if scenario == "libraries" else first
                await operations.restore("w-1", RestoreOperation(gpu_uuids=[wanted]), Progress.unheard())
        except OSError as error:
            told = str(error)
        for _ in range(50):  # a grant is made in the step of a release, and its claim goes on in the next
            await trio.lowlevel.checkpoint()
        state, held = state_text(workload.state), list(workload.gpu_uuids)
        granted = list(claims)
        nursery.cancel_scope.cancel()
    return {
        "state": state,
        "held": [("first", "second")[uuid == second] for uuid in held],
        "granted": [("first", "second")[uuid == second] for uuid in granted],
        "told": told,
    }


async def main(folder: Path, scenario: str) -> None:
    """Plays one scenario."""
    host = SimulatedHost.open(Path(os.environ["LEASEHOLD_SIMGPU_DIR"]))
    config = WorkerConfig(name="alpha", state_dir=folder)
    with trio.fail_after(TIMEOUT_S):
        async with open_parts(config, folder / "workloads", lambda _: None) as parts:
            try:
                print(json.dumps(await _play(parts, host, scenario)))
            finally:
                for workload in parts.workloads.all():
                    os.kill(workload.root.pid, 9)
                parts.nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2])
