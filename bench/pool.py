"""Times grants of GPUs: by the pool alone, and through the local socket of a worker.

The pool alone is compared with ``trio.CapacityLimiter`` and ``asyncio.Semaphore``. These count to one, while
the pool chooses among eight GPUs, gives each lease an id and a token, and orders by priority. One GPU passes
from holder to holder while a number of others wait for it.

For the socket, a worker runs on a simulated host, and this process claims and releases one GPU repeatedly: by
an open channel, and by a new channel each time. These alternate with a call that changes nothing, and with a
write to the disk of the worker's journal. Prints one JSON document.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import trio
import trio.testing
from leasehold.local.v1 import local_service_pb2
from leasehold.v1 import workload_pb2
from leasehold_client import local
from leasehold_client.local import LocalWorker
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool

from bench.machine import machine
from bench.real_worker import start_worker

GPUS = 8
WAITERS = (1, 100, 1000)
TURNS = 3
WARM_UP = 10
ONE = GpuRequest(1)


class Relay:
    """A lease that passes from holder to holder, timed from each release until the next holder runs."""

    def __init__(self, grants: int) -> None:
        self._left = grants
        self._released = 0.0
        self.latencies_s: list[float] = []

    async def run(self, acquire: Callable[[], Awaitable[Callable[[], object]]]) -> None:
        """One participant. ``acquire`` waits, and returns the function that releases."""
        while self._left > 0:
            release = await acquire()
            if self._released:
                self.latencies_s.append(time.perf_counter() - self._released)
            self._left -= 1
            self._released = time.perf_counter()
            release()


async def relay_in_trio(
    acquire: Callable[[], Awaitable[Callable[[], object]]], waiters: int, relay: Relay
) -> None:
    """Lets one participant hold the lease while all others wait."""
    first = await acquire()
    async with trio.open_nursery() as nursery:
        for _ in range(waiters + 1):
            nursery.start_soon(relay.run, acquire)
        await trio.testing.wait_all_tasks_blocked()
        first()


async def with_pool(waiters: int, relay: Relay) -> None:
    """The worker's pool of eight GPUs, seven of which stay leased."""
    pool = GpuPool([PoolGpu(f"GPU-{slot}", "H100", 80 * 2**30) for slot in range(GPUS)])
    pool.claim_gpus("keeper", [gpu.uuid for gpu in pool.slots.gpus[1:]])

    async def acquire() -> Callable[[], object]:
        lease: Lease | None = await pool.claim("w", ONE)
        assert lease is not None
        return lambda: pool.release(lease)

    await relay_in_trio(acquire, waiters, relay)


async def with_limiter(waiters: int, relay: Relay) -> None:
    """``trio.CapacityLimiter``."""
    limiter = trio.CapacityLimiter(1)

    async def acquire() -> Callable[[], object]:
        borrower = object()
        await limiter.acquire_on_behalf_of(borrower)
        return lambda: limiter.release_on_behalf_of(borrower)

    await relay_in_trio(acquire, waiters, relay)


async def with_semaphore(waiters: int, relay: Relay) -> None:
    """``asyncio.Semaphore``."""
    semaphore = asyncio.Semaphore(1)

    async def acquire() -> Callable[[], object]:
        await semaphore.acquire()
        return semaphore.release

    first = await acquire()
    tasks = [asyncio.ensure_future(relay.run(acquire)) for _ in range(waiters + 1)]
    await asyncio.sleep(0.05)
    first()
    await asyncio.gather(*tasks)


Relaying = Callable[[int, Relay], Coroutine[None, None, None]]


def run_in_trio(main: Relaying, waiters: int, relay: Relay) -> None:
    """One relay in a loop of its own."""
    trio.run(main, waiters, relay)


def run_in_asyncio(main: Relaying, waiters: int, relay: Relay) -> None:
    """One relay in a loop of its own."""
    asyncio.run(main(waiters, relay))


def timed_relay(run: Callable[[Relay], object], grants: int) -> dict[str, float]:
    """One relay from its first release to its last."""
    relay = Relay(grants)
    run(relay)
    return {
        "per_second": len(relay.latencies_s) / sum(relay.latencies_s),
        "p50_us": percentile(relay.latencies_s, 50) * 1e6,
        "p99_us": percentile(relay.latencies_s, 99) * 1e6,
    }


def measure_pool(grants: int) -> list[dict[str, object]]:
    """Medians of the three, measured in turn, for each number of waiters."""
    report: list[dict[str, object]] = []
    for waiters in WAITERS:
        runs: dict[str, Callable[[Relay], object]] = {
            "pool": partial(run_in_trio, with_pool, waiters),
            "capacity_limiter": partial(run_in_trio, with_limiter, waiters),
            "semaphore": partial(run_in_asyncio, with_semaphore, waiters),
        }
        turns = [{name: timed_relay(run, grants) for name, run in runs.items()} for _ in range(TURNS)]
        figures: dict[str, dict[str, float]] = {
            name: {
                figure: round(statistics.median(turn[name][figure] for turn in turns), 1)
                for figure in ("per_second", "p50_us", "p99_us")
            }
            for name in runs
        }
        ratio = figures["capacity_limiter"]["per_second"] / figures["pool"]["per_second"]
        report.append({"waiters": waiters, **figures, "pool_to_limiter_time_per_grant": round(ratio, 2)})
    return report


def grant_by(connection: LocalWorker) -> float:
    """Seconds of a grant by an open channel. The grant is released afterwards."""
    opened = local_service_pb2.ClaimOpen(
        spec=workload_pb2.WorkloadSpec(resources=workload_pb2.Resources(gpu_count=1)),
        hold=local_service_pb2.CLAIM_HOLD_STREAM,
    )
    took_s = 0.0
    began = time.perf_counter()
    for response in connection.claim(local_service_pb2.ClaimRequest(open=opened)):
        if response.WhichOneof("frame") == "granted":
            took_s = time.perf_counter() - began
            connection.release(response.granted.workload_id)
    return took_s


def grant_anew(socket: Path) -> float:
    """Seconds of ``local.claim``, which opens a channel."""
    began = time.perf_counter()
    with local.claim(gpus=1, socket=socket):
        return time.perf_counter() - began


def timed(act: Callable[[], object]) -> float:
    """Seconds of a call that changes nothing."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def write_through(path: Path) -> None:
    """Appends a page to a file, and waits until it is on disk."""
    with path.open("ab", buffering=0) as file:
        file.write(b"x" * 4096)
        os.fsync(file.fileno())


def measure_socket(rounds: int) -> dict[str, object]:
    """Grants of a free GPU, a bare call and a write, in turn.

    A process of its own makes the calls, since the process that started the worker can't claim.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        start_worker(Path(name), gpus=GPUS) as worker,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as claimant,
    ):
        return claimant.submit(sample_socket, worker.socket, rounds).result()


def sample_socket(socket: Path, rounds: int) -> dict[str, object]:
    """The measurements of :func:`measure_socket`, with the worker of this socket."""
    samples: dict[str, list[float]] = {
        "grant_by_open_channel": [],
        "grant_by_new_channel": [],
        "bare_call": [],
        "fsync": [],
    }
    with LocalWorker(socket) as connection:
        for turn in range(rounds + WARM_UP):
            taken = {
                "grant_by_open_channel": grant_by(connection),
                "grant_by_new_channel": grant_anew(socket),
                "bare_call": timed(connection.list),
                "fsync": timed(lambda: write_through(socket.with_name("page"))),
            }
            if turn >= WARM_UP:
                for kind, took_s in taken.items():
                    samples[kind].append(took_s)
    return {
        kind: {f"p{cut}_ms": round(percentile(took_s, cut) * 1000, 3) for cut in (50, 99)}
        for kind, took_s in samples.items()
    }


def percentile(samples: list[float], cut: int) -> float:
    """A percentile of the times."""
    return statistics.quantiles(samples, n=100)[cut - 1]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grants", type=int, default=10_000, help="grants of each relay")
    parser.add_argument("--rounds", type=int, default=300, help="grants through the socket, of each kind")
    options = parser.parse_args()
    report = {
        "benchmark": "pool",
        "grants": options.grants,
        "alone": measure_pool(options.grants),
        "rounds": options.rounds,
        "through_the_socket": measure_socket(options.rounds),
        "machine": machine("grpcio", "trio"),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
