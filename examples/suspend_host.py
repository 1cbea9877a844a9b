"""Suspends every workload that holds GPUs of a host, and restores them: python suspend_host.py WORKER."""

import argparse
import contextlib
import sys

from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED
from leasehold_client import Client, LeaseholdError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("worker", help="name of the host's worker")
options = parser.parse_args()
try:
    with Client() as client:
        response = client.suspend_worker(options.worker)
        ended = [client.wait(command, check=False) for command in response.commands]
        suspended = [one for one in ended if one.state == COMMAND_STATE_SUCCEEDED]
        errors = {one.workload_id: one.error.message for one in response.refusals}
        errors |= {one.workload_id: one.error.message for one in ended if one not in suspended}
        for workload, message in errors.items():
            print(f"workload {workload}: {message}")
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C restores them too
            print(f"Suspended workloads: {len(suspended)}. Press Enter to restore them.")
            sys.stdin.readline()
        restored = 0
        for command in suspended:
            try:
                client.wait(client.restore(command.workload_id))
                restored += 1
            except LeaseholdError as error:  # the others are restored all the same
                print(f"workload {command.workload_id}: {error}")
        print(f"Restored workloads: {restored}.")
        sys.exit(restored < len(ended) + len(response.refusals))
except LeaseholdError as error:
    sys.exit(f"suspend_host: {error}")
except KeyboardInterrupt:
    sys.exit("suspend_host: interrupted: `leasehold get workloads` shows what to `leasehold restore`")
