"""Times a command from client to worker and back, and the transport alone, without TLS and over mutual TLS.

Everything runs as processes on this machine: for each transport a coordinator with its store, a worker on a
simulated host whose driver takes no time, and a client. Each round suspends a suspended workload. This
command has no effect, but is stored, dispatched and carried out, and its outcome is stored and watched.
Rounds alternate with two raw gRPC hops (client to relay to echo and back) over the same transport. Then
several clients do the same concurrently, each with a workload of its own. The transports take turns of a few
rounds. The commit numbers of store and journal give the commits of both sides. Prints one JSON document.
"""

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold_client.config import state_directory
from leasehold_coordinator.storage.rows import binding_row

from bench.fleet.processes import ANY, Coordinator, spread
from bench.machine import machine
from bench.raw_hops import Hop, two_hops
from bench.real_worker import park, start_worker, suspend
from tests.certificates import Holder, enrol, write_rows
from tests.channels import open_channel

CLIENTS: Final = 8
"""Concurrent clients: as many as a worker has commands."""

TURN: Final = 10
"""Rounds of a transport before it is the turn of the other one."""

TURN_OF_A_CLIENT: Final = 5
"""The same, for each of several clients."""

PAYLOAD: Final = b"x" * 1024
"""Sent through the raw hops."""

SETTINGS: Final = "coordinator.toml"


class Transport:
    """The clients of one transport, and the times of their calls.

    Attributes:
        command_s: Seconds of each command of a client alone.
        hops_s: Seconds of each call through two raw hops.
        loaded_s: Seconds of each command under load.
        load_s: Seconds under load.
        commits: The commit numbers of each side, before, between and after both measurements.
    """

    def __init__(self, folder: Path, channel: grpc.Channel, hops: Hop) -> None:
        self._folder = folder
        self._channel = channel
        self._hops = hops
        self.reset()

    def reset(self) -> None:
        """Forgets everything that was measured."""
        self.command_s: list[float] = []
        self.hops_s: list[float] = []
        self.loaded_s: list[float] = []
        self.load_s = 0.0
        self.commits: list[dict[str, int]] = []

    def take_turn(self) -> None:
        """Times commands and raw hops in turn."""
        for _ in range(TURN):
            self.command_s.append(timed_s(self._command))
            self.hops_s.append(timed_s(lambda: self._hops(PAYLOAD)))

    def take_turn_under_load(self, clients: ThreadPoolExecutor) -> None:
        """Times commands of concurrent clients."""

        def client(number: int) -> None:
            for _ in range(TURN_OF_A_CLIENT):
                self.loaded_s.append(timed_s(lambda: self._command(number)))

        self.load_s += timed_s(lambda: list(clients.map(client, range(CLIENTS))))

    def _command(self, number: int = 0) -> None:
        if not suspend(self._channel, number):
            raise SystemExit("a command did not succeed, so the times are those of something else")

    def count_commits(self) -> None:
        """Reads the commit numbers of store and journal. Older releases have none."""
        found = {}
        for side, name in (("coordinator", "store.sqlite3"), ("worker", "worker/journal.sqlite3")):
            with (
                closing(sqlite3.connect(f"{(self._folder / name).as_uri()}?mode=ro", uri=True)) as reader,
                suppress(sqlite3.OperationalError),
            ):
                (found[side],) = reader.execute("SELECT number FROM commits").fetchone()
        self.commits.append(found)

    def report(self) -> dict[str, object]:
        """The reported figures."""
        before, between, after = self.commits
        return {
            "command": figures(self.command_s),
            "commits_per_command": difference(before, between, len(self.command_s)),
            "under_load": {
                "clients": CLIENTS,
                "command": figures(self.loaded_s),
                "commands_per_s": round(len(self.loaded_s) / self.load_s, 1),
                "commits_per_command": difference(between, after, len(self.loaded_s)),
            },
            "two_raw_grpc_hops": figures(self.hops_s),
            "command_by_hops_p50": p50_ratio(self.command_s, self.hops_s),
        }


def timed_s(action: Callable[[], object]) -> float:
    """Seconds that the action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def figures(times_s: list[float]) -> dict[str, float]:
    """Number, median, 99th percentile and the ratio of both."""
    found = spread(times_s)
    return {"count": len(times_s), **found, "p99_by_p50": round(found["p99_ms"] / found["p50_ms"], 2)}


def p50_ratio(times_s: list[float], base_s: list[float]) -> float:
    """The ratio of two medians."""
    return round(statistics.median(times_s) / statistics.median(base_s), 2)


def difference(before: dict[str, int], after: dict[str, int], commands: int) -> dict[str, float]:
    """Commits per command, of each side and of both."""
    found = {side: round((number - before[side]) / commands, 2) for side, number in after.items()}
    return found | ({"both": round(sum(found.values()), 2)} if len(found) > 1 else {})


@contextmanager
def open_transport(folder: Path, *, is_mutual: bool) -> Iterator[Transport]:
    """Starts the processes: with certificates as off loopback, or with tokens and without TLS."""
    folder.mkdir()
    with ExitStack() as stack:
        if is_mutual:
            user = enrol_both(folder)
            coordinator = Coordinator(folder, "--config", str(folder / SETTINGS), host=ANY, worker_host=ANY)
            options = ["--name", "bench", "--credentials", str(folder / "credentials")]
        else:
            user, coordinator, options = None, Coordinator(folder, "--insecure"), []
        stack.enter_context(coordinator)
        address = coordinator.address
        channel = stack.enter_context(user.open_channel(address) if user else open_channel(address))
        options += ["--coordinator", coordinator.worker_address]
        worker = stack.enter_context(start_worker(folder, *options))
        stack.enter_context(park(worker, channel, CLIENTS))
        yield Transport(folder, channel, stack.enter_context(two_hops(is_mutual=is_mutual)))


def enrol_both(folder: Path) -> Holder:
    """The certificate of an admin. That of the worker is written, and so are the coordinator's settings."""
    database = folder / "store.sqlite3"
    user, worker = enrol(database, state_directory(), "user/client", "worker/bench")
    binding = RoleBinding(identity="user/client", role=access_service_pb2.ROLE_ADMIN)
    write_rows(database, binding_row(binding))
    worker.write(folder / "credentials", "worker")
    # The coordinator's own user has no bounds, and an enrolled one would soon be refused.
    (folder / SETTINGS).write_text("caller_requests_per_s = 100000\n")
    return user


def measure(rounds: int) -> dict[str, object]:
    """Times both transports in turn."""
    with tempfile.TemporaryDirectory(prefix="leasehold-bench-") as name, ExitStack() as stack:
        without_tls, mutual_tls = transports = [
            stack.enter_context(open_transport(Path(name) / kind, is_mutual=kind == "mutual_tls"))
            for kind in ("without_tls", "mutual_tls")
        ]
        clients = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        for transport in transports:
            transport.take_turn()
            transport.take_turn_under_load(clients)
            transport.reset()
            transport.count_commits()
        for _ in range(0, rounds, TURN):
            for transport in transports:
                transport.take_turn()
        for transport in transports:
            transport.count_commits()
        for _ in range(0, rounds, TURN_OF_A_CLIENT * CLIENTS):
            for transport in transports:
                transport.take_turn_under_load(clients)
        for transport in transports:
            transport.count_commits()
        return {
            "without_tls": without_tls.report(),
            "mutual_tls": mutual_tls.report(),
            "mutual_tls_by_without_tls_p50": {
                "command": p50_ratio(mutual_tls.command_s, without_tls.command_s),
                "command_under_load": p50_ratio(mutual_tls.loaded_s, without_tls.loaded_s),
                "two_raw_grpc_hops": p50_ratio(mutual_tls.hops_s, without_tls.hops_s),
            },
        }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="commands to time, of each transport")
    options = parser.parse_args()
    document = {"benchmark": "command_latency", **measure(options.rounds), "machine": machine("grpcio")}
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
