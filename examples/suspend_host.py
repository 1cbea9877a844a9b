"""Suspends every workload that holds GPUs of a host, and restores them: python suspend_host.py WORKER."""

import argparse
import sys
from collections.abc import Callable, Iterable

from leasehold.v1.command_pb2 import Command
from leasehold_client import Client, LeaseholdError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("worker", help="name of the host's worker")
options = parser.parse_args()


def each(call: Callable[[str], Command], workloads: Iterable[str]) -> dict[str, Command]:
    """Results of a call by workload. A failure is told, and does not stop the others."""
    results = {}
    for workload in workloads:
        try:
            results[workload] = call(workload)
        except LeaseholdError as error:
            print(f"workload {workload}: {error}")
    return results


try:
    with Client() as client:
        response = client.suspend_worker(options.worker)
        for refusal in response.refusals:
            print(f"{refusal.workload_name} stays on its GPUs: {refusal.error.message}")
        suspends = {command.workload_id: command for command in response.commands}
        suspended = each(lambda workload: client.wait(suspends[workload]), suspends)
        print(f"Suspended workloads: {len(suspended)}. Press Enter to restore them.")
        sys.stdin.readline()
        restores = each(client.restore, suspended)
        restored = each(lambda workload: client.wait(restores[workload]), restores)
        print(f"Restored workloads: {len(restored)}.")
        if len(restored) < len(suspends):
            sys.exit(1)
except LeaseholdError as error:
    sys.exit(f"suspend_host: {error}")
