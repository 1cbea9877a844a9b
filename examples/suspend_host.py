"""Suspends every workload that holds GPUs of a host, and restores them: python suspend_host.py WORKER."""

import sys

from leasehold_client import Client

with Client() as client:
    response = client.suspend_worker(sys.argv[1])
    for refusal in response.refusals:
        print(f"{refusal.workload_name} stays on its GPUs: {refusal.error.message}")
    for command in response.commands:
        client.wait(command)
    print(f"{len(response.commands)} workloads are suspended. Press Enter to restore them.")
    sys.stdin.readline()
    restores = [client.restore(command.workload_id) for command in response.commands]
    for command in restores:
        client.wait(command)
    print(f"{len(restores)} workloads are restored.")
