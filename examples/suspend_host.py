"""Suspends every workload that holds GPUs of a host, and restores them: python suspend_host.py WORKER."""

import argparse
import sys

from leasehold_client import Client, LeaseholdError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("worker", help="name of the host's worker")
options = parser.parse_args()
try:
    with Client() as client:
        response = client.suspend_worker(options.worker)
        for refusal in response.refusals:
            print(f"{refusal.workload_name} stays on its GPUs: {refusal.error.message}")
        for command in response.commands:
            client.wait(command)
        print(f"Suspended workloads: {len(response.commands)}. Press Enter to restore them.")
        sys.stdin.readline()
        restores = [client.restore(command.workload_id) for command in response.commands]
        for command in restores:
            client.wait(command)
        print(f"Restored workloads: {len(restores)}.")
except LeaseholdError as error:
    sys.exit(f"suspend_host: {error}")
