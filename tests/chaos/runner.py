"""Asks for many commands while everything breaks, and counts. One JSON object is printed.

python -m tests.chaos.runner --commands 1000 --seed 1
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from leasehold.v1 import command_pb2, errors_pb2, fleet_service_pb2
from leasehold_worker.commands.journal_file import connect
from leasehold_worker.commands.journal_records import decode_workload, workload_of
from leasehold_worker.workloads.invariants import violations
from leasehold_worker.workloads.states import ENDED

from .claims import Claimer
from .fleet import WORKERS, ChaosFleet, chaos_fleet
from .judge import Seen, Verdict, judge
from .load import Client, look
from .namespaces import partition, separated_fleet
from .scenarios import TROUBLES, Trouble, crash_at, crash_points, why_no_namespaces

CLIENTS_PER_WORKER = 2
ROUND_COMMANDS = 3
"""What one client asks for in one round, at least: it goes on until the trouble is over."""

AGREE_TIMEOUT_S = 30.0
"""How long loads may take to tell what outcomes have told."""


def play(
    fleet: ChaosFleet, trouble: Trouble, seed: int, commands: int = ROUND_COMMANDS, *, claims: bool = False
) -> Verdict:
    """One round: clients ask, something goes wrong, everything heals, and all is compared.

    Args:
        fleet: The fleet.
        trouble: What goes wrong.
        seed: Of all choices.
        commands: How many each client asks for at least.
        claims: Claims on the hosts compete with the clients for GPUs.
    """
    clients = [
        Client(fleet, worker, number, commands, seed)
        for worker in WORKERS
        for number in range(CLIENTS_PER_WORKER)
    ]
    claimers = [Claimer(fleet.folder / worker / "worker.sock", seed) for worker in WORKERS if claims]
    fleet.starts_of.clear()
    for client in clients:
        client.start()
    try:
        trouble(fleet, random.Random(seed))
    finally:
        for client in clients:
            client.trouble_is_over.set()
    fleet.heal()
    for claimer in claimers:
        OUTCOMES["claim GRANTED"] += claimer.end()
    for client in clients:
        client.join()
        if client.problem is not None:
            raise client.problem
    deadline = time.monotonic() + AGREE_TIMEOUT_S
    while True:
        seen = [one for client in clients for one in look(fleet, client.lives, client.name.split("-")[0])]
        verdict = judge(seen)
        verdict.wrong += strays(fleet, clients)
        verdict.wrong += broken_records(fleet)
        if not verdict.wrong or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    verdict.refused += sum(client.refused for client in clients)
    for name in fleet.everybody:
        if "Traceback" in fleet.log(name):
            verdict.wrong.append(f"the log of {name} has a traceback")
    _count_outcomes(seen)
    fleet_is_cleared(fleet, clients)
    return verdict


def strays(fleet: ChaosFleet, clients: Sequence[Client]) -> list[str]:
    """Leases of nobody whom a client knows: every claim is over by then."""
    known = {life.workload_id for client in clients for life in client.lives}
    gpus = fleet.fleet.ListGpus(fleet_service_pb2.ListGpusRequest(), timeout=10).gpus
    return [
        f"{gpu.gpu.uuid} is leased to {gpu.lease.workload_id}, which nobody runs"
        for gpu in gpus
        if gpu.lease.workload_id not in {"", *known}
    ]


def broken_records(fleet: ChaosFleet) -> list[str]:
    """What the records of the workers' journals violate, once no operation runs."""
    return [text for worker in WORKERS for text in broken_journal(fleet.folder / worker / "journal.sqlite3")]


def broken_journal(path: Path) -> list[str]:
    """What the workloads of one journal violate."""
    with closing(connect(path, "ro")) as journal:
        records = [decode_workload(data) for (data,) in journal.execute("SELECT record FROM workloads")]
    wrong: list[str] = []
    for record in records:
        workload = workload_of(record, path)
        if workload.state in ENDED:
            workload.ended.set()  # the registry does so when a worker starts with the record
        wrong += violations(workload)
    return wrong


OUTCOMES: Counter[str] = Counter()


def _count_outcomes(seen: Sequence[Seen]) -> None:
    for one in seen:
        for asked in one.asked:
            state = command_pb2.CommandState.Name(command_pb2.CommandState.ValueType(asked.state))
            reason = errors_pb2.ErrorReason.Name(errors_pb2.ErrorReason.ValueType(asked.reason))
            text = state.removeprefix("COMMAND_STATE_")
            OUTCOMES[f"{text} {reason.removeprefix('ERROR_REASON_')}" if asked.reason else text] += 1


def fleet_is_cleared(fleet: ChaosFleet, clients: Sequence[Client]) -> None:
    """Stops what the round has left, so that the next one finds free GPUs."""
    for client in clients:
        for life in client.lives:
            client.stop_for_good(life)


def rounds(commands: int, reached: set[str]) -> list[tuple[str, Trouble]]:
    """The scenarios of a run, in turn: every crash point first, then the others over and over."""
    planned = [(f"crash {name} {point}", crash_at(name, point, reached)) for name, point in crash_points()]
    wanted = max(1, commands // (ROUND_COMMANDS * len(WORKERS) * CLIENTS_PER_WORKER))
    others = list(TROUBLES.items())
    while len(planned) < wanted:
        planned.append(others[len(planned) % len(others)])
    return planned[:wanted]


def main() -> None:
    """Runs, prints, and exits with 1 where something was lost, doubled, left open or wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    options = parser.parse_args()
    began = time.monotonic()
    total, wrong = Counter[str](), list[str]()
    by_scenario, reached = Counter[str](), set[str]()

    def add(name: str, verdict: Verdict) -> None:
        by_scenario[name.split()[0]] += verdict.asked
        for field in ("asked", "done_once", "refused", "unknown_at_end", "lost", "doubled"):
            total[field] += getattr(verdict, field)
        wrong.extend(f"{name}: {text}" for text in verdict.wrong)
        sys.stderr.write(f"{name}: {verdict.asked} asked, {len(verdict.wrong)} wrong\n")

    with tempfile.TemporaryDirectory(prefix="leasehold-chaos-") as folder, chaos_fleet(Path(folder)) as fleet:
        for number, (name, trouble) in enumerate(rounds(options.commands, reached)):
            if options.only not in name:
                continue
            add(name, play(fleet, trouble, options.seed * 1000 + number, claims=True))
    skipped = why_no_namespaces()
    if not skipped and options.only in "partition":
        with (
            tempfile.TemporaryDirectory(prefix="leasehold-chaos-") as folder,
            separated_fleet(Path(folder)) as fleet,
        ):
            for number in range(max(1, options.commands // 200)):
                add("partition", play(fleet, partition, options.seed * 1000 + 500 + number))
    document = {
        **{field: total[field] for field in ("asked", "done_once", "refused")},
        **{field: total[field] for field in ("unknown_at_end", "lost", "doubled")},
        "by_scenario": dict(by_scenario),
        "by_outcome": dict(OUTCOMES.most_common()),
        "crash_points_reached": len(reached),
        "crash_points_missed": [point for _, point in crash_points() if point not in reached],
        "partitions_skipped": skipped,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
        "seed": options.seed,
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    bad = total["unknown_at_end"] + total["lost"] + total["doubled"] + len(wrong)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
