"""The worker of this host over its unix socket: claims, leases and releases, without a coordinator.

``claim`` leases GPUs for the calling Python program::

    from leasehold_client import local

    with local.claim(gpus=1) as lease:
        print(lease.gpu_uuids)
"""

from leasehold_client.local.lease import LocalLease, claim
from leasehold_client.local.worker import LocalWorker, NoWorkerError, socket_path

__all__ = ["LocalLease", "LocalWorker", "NoWorkerError", "claim", "socket_path"]
