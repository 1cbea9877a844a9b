"""Events of workers: a worker whose reports change all the time displaces no events of others."""

import time
from pathlib import Path

import pytest
from leasehold.v1 import event_pb2, gpu_pb2, lease_pb2
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.worker.v1.session_pb2 import WorkerLoad
from leasehold_coordinator.fleet import worker_news

from tests.coordinator.bench import Bench, on_bench
from tests.coordinator.pages import all_events
from tests.coordinator.scripted_worker import make_hello

HEALTHS = (gpu_pb2.GPU_HEALTH_XID_ERROR, gpu_pb2.GPU_HEALTH_OK)


def test_flapping_gpus_displace_no_events_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + now)
    monkeypatch.setattr(worker_news, "EVENT_BURST", 50)

    async def scenario(bench: Bench) -> None:
        nonlocal now
        registry = bench.fleet.registry
        for name in ("alpha", "beta"):
            registry.add_stored(make_hello(name), 1)

        def report(name: str, number: int) -> None:
            known = registry.find(name)
            leases = [
                GpuLease(gpu_uuid=gpu.uuid, state=lease_pb2.SLOT_STATE_FREE, health=HEALTHS[number % 2])
                for gpu in known.hello.gpus
            ]
            assert registry.apply_load(known, WorkerLoad(sequence=number + 1, gpu_leases=leases))
            bench.fleet.worker_news.publish(known)

        report("beta", 0)
        for number in range(6_000):
            report("alpha", number)
        now += 60
        report("alpha", 6_000)
        await bench.fleet.events.flush()
        told = [
            event for event in await all_events(bench.store) if event.kind == event_pb2.EVENT_KIND_GPU_HEALTH
        ]
        assert any(event.worker_name == "beta" for event in told)
        assert len(told) < 100
        assert any("earlier changes have no event" in event.message for event in told)

    on_bench(tmp_path, scenario)
