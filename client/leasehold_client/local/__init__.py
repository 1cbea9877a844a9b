"""This host's worker, by its unix socket: claims, who holds what, and giving back. No coordinator is needed.

``claim`` is the way for a Python program to get GPUs for itself::

    from leasehold_client import local

    with local.claim(gpus=1) as lease:
        print(lease.gpu_uuids)
"""

from leasehold_client.local.lease import LocalLease, claim
from leasehold_client.local.worker import LocalWorker, NoWorkerError, socket_path

__all__ = ["LocalLease", "LocalWorker", "NoWorkerError", "claim", "socket_path"]
