"""Checkpointable applications: programs that save their own state, and continue from it on any GPU.

A program implements :class:`CheckpointableKernel`, and serves it before its work::

    from leasehold_client import kernel

    facts = kernel.KernelFacts(kernel_id="trainer", kind="mlp", version=1, codec=kernel.Msgpack(State))
    with kernel.serve(trainer, facts, required=False):
        trainer.run()

``serve`` is for plain threads, ``serve_trio`` and ``serve_asyncio`` are for event loops. See docs/kernels.md.
"""

from leasehold_client.errors import LeaseholdError
from leasehold_client.kernel.codec import Codec, Msgpack
from leasehold_client.kernel.protocols import (
    AsyncCheckpointableKernel,
    CheckpointableKernel,
    Health,
    KernelFacts,
)
from leasehold_client.kernel.server import serve, serve_asyncio, serve_trio
from leasehold_client.kernel.session import ServedKernel
from leasehold_client.local.worker import NoWorkerError

__all__ = [
    "AsyncCheckpointableKernel",
    "CheckpointableKernel",
    "Codec",
    "Health",
    "KernelFacts",
    "LeaseholdError",
    "Msgpack",
    "NoWorkerError",
    "ServedKernel",
    "serve",
    "serve_asyncio",
    "serve_trio",
]
