"""What saving and imaging do with the disk: room is held while they write, and what they write is needed."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import Kernel, WorkloadSpec
from leasehold_worker.agent.assembly import open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.applications.checkpointing import save
from leasehold_worker.checkpoints import volume_calls
from leasehold_worker.checkpoints.application_format import PAYLOAD_OFFSET
from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.image_store import ImageStore
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.operations import image_checkpoint
from leasehold_worker.operations.stop_restart import StopRestart
from leasehold_worker.planning.plan import Plan, TierNeed, WorkloadPlan
from leasehold_worker.workloads.eviction import DISK, RETAIN, STOP
from leasehold_worker.workloads.states import RUNNING
from leasehold_worker.workloads.workload import Workload

from tests.worker.checkpoints.test_directory import HERE, MIB, World, ids
from tests.worker.criu_cases import fake_criu, program
from tests.worker.dead_volumes import dead_volume
from tests.worker.kernel_host import SIZE, Served, open_served

TELLING_CRIU = """#!/bin/sh
echo "$CRIU_LIBS_DIR" >> {told}
exec {criu} "$@"
"""
"""Tells where it would load plugins from."""

SUSPENDING = workload_pb2.WORKLOAD_STATE_SUSPENDING


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "images")


def stop_restart(served: Served, disk: CheckpointDirectory) -> StopRestart:
    """Those of a worker, with another disk."""
    parts = served.parts
    return StopRestart(
        parts.workloads,
        parts.host_shares,
        parts.exit_monitor,
        parts.programs,
        served.applications,
        served.store,
        disk,
        parts.termination,
        parts.stop_restart._acquisition,
    )


def refusal_of(disk: CheckpointDirectory, checkpoint_id: str) -> str:
    with pytest.raises(OperationError) as refused:
        disk.delete([checkpoint_id], force=False)
    return errors_pb2.ErrorReason.Name(refused.value.reason).removeprefix("ERROR_REASON_")


async def test_room_is_made_before_an_application_saves_itself(tmp_path: Path, world: World) -> None:
    async with open_served(tmp_path) as served:
        unneeded = world.image("gone", 3 * MIB)
        disk = world.disk(limit=5 * MIB, keep_images=True)
        _, kernel = await served.serve()
        progress = Progress(_nobody)
        await stop_restart(served, disk).checkpoint(kernel.workload.workload_id, progress)
        assert ids(disk) == [progress.checkpoint_id]
        assert unneeded not in ids(disk)
        assert disk.used_bytes() > SIZE
        assert disk.available_bytes() == 5 * MIB - disk.used_bytes(), "no room is held any more"


@pytest.mark.long
async def test_room_is_held_before_an_application_comes_to_rest(tmp_path: Path, world: World) -> None:
    async with open_served(tmp_path) as served:
        _, kernel = await served.serve()
        held: dict[str, int] = {}
        with world.disk().room() as room:

            def progress(step: str, _: int) -> None:
                held.setdefault(step, room.held_bytes)

            await save(kernel, served.store, room=room, resume=True, progress=progress)
        assert (held["ask"], held["prepare"]) == (0, PAYLOAD_OFFSET + SIZE)


async def test_what_a_worker_saves_says_that_it_is_its_own(tmp_path: Path) -> None:
    config = WorkerConfig(state_dir=tmp_path)
    async with open_parts(config, tmp_path / "workloads", _nobody, worker_id=HERE) as parts:
        with parts.stop_restart._application_store.begin("w-1", "train", Kernel(kernel_id="k")) as writer:
            writer.commit({})
        assert [each.owner_worker_id for each in parts.disk.checkpoints()] == [HERE]


async def test_what_says_nothing_of_its_size_stays_within_the_budget(tmp_path: Path, world: World) -> None:
    async with open_served(tmp_path) as served:
        disk = world.disk(limit=2 * MIB)
        # It yields without an end, or until it is told that there is no room.
        _, kernel = await served.serve("encode-fails", size=0)
        room = disk.room()
        with room:
            room.hold(2 * MIB - PAYLOAD_OFFSET - 1)
            with pytest.raises(OperationError) as refused:
                await stop_restart(served, disk).checkpoint(kernel.workload.workload_id, Progress(_nobody))
        assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DISK
        assert disk.available_bytes() == 2 * MIB


@pytest.mark.long
async def test_what_an_application_saves_does_not_eat_what_an_image_was_promised(
    tmp_path: Path, world: World
) -> None:
    async with open_served(tmp_path) as served:
        disk = world.disk(limit=6 * MIB)
        _, kernel = await served.serve()
        before = disk.room()
        with before:
            before.hold(3 * MIB)
            with pytest.raises(OperationError) as refused:
                await stop_restart(served, disk).checkpoint(kernel.workload.workload_id, Progress(_nobody))
        assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_DISK
        await stop_restart(served, disk).checkpoint(kernel.workload.workload_id, Progress(_nobody))
        assert len(ids(disk)) == 1


async def test_what_a_workload_is_stopped_with_is_needed_while_it_ends(tmp_path: Path, world: World) -> None:
    async with open_served(tmp_path) as served:
        _, kernel = await served.serve()
        world.registry.workloads.append(kernel.workload)
        disk = world.disk()
        seen: list[str] = []

        async def intend(intent: Intent) -> None:
            await trio.lowlevel.checkpoint()
            if intent.phase == "end":
                seen.append(refusal_of(disk, intent.checkpoint_id))
                raise OperationError(errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, "it can't be written down")

        policy = EvictionPolicy(weight_strategy=RETAIN, process_strategy=STOP)
        plan = Plan([WorkloadPlan(kernel.workload)], policy=policy, saves=True)
        with pytest.raises(OperationError, match="written down"):
            await stop_restart(served, disk).suspend(plan, Progress(_nobody, intend))
        assert seen == ["CHECKPOINT_IN_USE"]
        assert disk.in_use() == set(), "it runs on, and needs nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root")
async def test_an_image_is_needed_from_before_it_is_final_until_its_workload_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CRIU", "")
    monkeypatch.setattr(image_checkpoint, "GONE_TIMEOUT_S", 0.1)  # nobody waits for the process here
    criu = tmp_path / "criu-that-tells"
    criu.write_text(TELLING_CRIU.format(told=tmp_path / "plugins", criu=fake_criu(tmp_path).path))
    criu.chmod(0o755)
    config = WorkerConfig(state_dir=tmp_path, criu=str(criu), checkpoint_limit=4 * MIB)
    with program(tmp_path) as counter:
        async with open_parts(config, tmp_path / "workloads", _nobody, worker_id=HERE) as parts:
            workload = Workload(
                workload_id="w-1",
                name="counter",
                spec=WorkloadSpec(),
                root=counter,
                output_path=tmp_path / "output.log",
                start_time=datetime.now(UTC),
                lease=None,
                state=SUSPENDING,
            )
            parts.exit_monitor.add(workload)
            seen: list[bool] = []

            async def intend(intent: Intent) -> None:
                await trio.lowlevel.checkpoint()
                seen.append(intent.checkpoint_id in parts.disk.in_use())
                seen.append(parts.disk.available_bytes() == MIB)

            plan = Plan([WorkloadPlan(workload)], tiers=[TierNeed(DISK, 3 * MIB, None)])
            kept = await parts.image_checkpoint.keep(plan, Progress(_nobody, intend))
            assert seen == [True, True]
            plugins = (tmp_path / "plugins").read_text().splitlines()[-1]
            assert plugins.endswith(f"{kept.checkpoint_id}.partial.work"), "where none is: none is loaded"
            assert parts.disk.available_bytes() > 3 * MIB, "the image is there, and takes what it takes"
            # Nobody has said yet what became of the workload.
            await trio.to_thread.run_sync(parts.disk._expire, set(), set(), {"w-1"})
            assert refusal_of(parts.disk, kept.checkpoint_id) == "CHECKPOINT_IN_USE"
            parts.workloads.set_state(workload, RUNNING)
            await trio.to_thread.run_sync(parts.disk._expire, set(), set(), {"w-1"})
            assert ImageStore(tmp_path / "images").images() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root")
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "at its deadline"])
async def test_a_volume_of_images_that_hangs_does_not_hold_up_the_rollback_of_a_suspend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    if not is_cancelled:
        monkeypatch.setattr(image_checkpoint, "DELETE_TIMEOUT_S", 0.3)
    monkeypatch.setenv("FAKE_CRIU", "")
    images = tmp_path / "volume"
    config = WorkerConfig(state_dir=tmp_path, criu=str(fake_criu(tmp_path).path), image_dir=images)
    with program(tmp_path) as counter, dead_volume(images):
        async with open_parts(config, tmp_path / "workloads", _nobody, worker_id=HERE) as parts:
            workload = Workload(
                workload_id="w-1",
                name="counter",
                spec=WorkloadSpec(),
                root=counter,
                output_path=tmp_path / "output.log",
                start_time=datetime.now(UTC),
                lease=None,
                state=SUSPENDING,
            )
            parts.exit_monitor.add(workload)
            plan = Plan([WorkloadPlan(workload)], tiers=[TierNeed(DISK, 3 * MIB, None)])
            began = trio.current_time()
            with trio.move_on_after(0.5 if is_cancelled else 60) as scope:
                with pytest.raises(OperationError) as failed:
                    await parts.image_checkpoint.keep(plan, Progress(_nobody))
                assert failed.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
            assert scope.cancelled_caught == is_cancelled
            assert trio.current_time() - began < 10, "nothing waits for the volume"
            # Every plan that looks at the volume ends, and refuses no rung: the next one could be a stop.
            monkeypatch.setattr(volume_calls, "CALL_TIMEOUT_S", 0.3)
            with pytest.raises(OperationError) as failed:
                await parts.operations.preflight._policies._look_at_disk(plan, MIB)
            assert failed.value.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE
            assert not plan.findings.refusals


def _nobody(_: object) -> None:
    pass
