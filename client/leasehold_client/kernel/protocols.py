"""What an application that saves itself looks like to Leasehold."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from leasehold.v1 import workload_pb2

from leasehold_client.kernel.codec import Codec

C = TypeVar("C")


class Health(enum.Enum):
    """How an application says that it is."""

    UNKNOWN = workload_pb2.KERNEL_HEALTH_UNSPECIFIED
    HEALTHY = workload_pb2.KERNEL_HEALTH_HEALTHY
    DEGRADED = workload_pb2.KERNEL_HEALTH_DEGRADED
    UNHEALTHY = workload_pb2.KERNEL_HEALTH_UNHEALTHY


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts(Generic[C]):
    """Which application it is, and what its checkpoints are.

    Attributes:
        kernel_id: Which one it is. What another one saved is not restored into it.
        kind: What kind of application it is.
        version: Version of what it saves. What has another one is not restored into it: count it up whenever
            the code could not read older checkpoints.
        codec: Turns its checkpoints into bytes and back.
        describe: Says of a checkpoint what people should see, such as its step: 8 KiB at most.
    """

    kernel_id: str
    kind: str
    version: int
    codec: Codec[C]
    describe: Callable[[C], Mapping[str, str]] | None = None


class CheckpointableKernel(Protocol[C]):
    """An application that saves itself, in plain threads.

    The worker calls: ``can_checkpoint``, ``checkpoint_size_estimate``, ``prepare``, ``is_quiescent`` until it
    is true, ``checkpoint``. Whatever goes wrong in between, ``cancel`` follows. The calls come one at a time,
    in a thread that is not the application's own. What raises is a failure, which is told and logged.
    """

    def can_checkpoint(self) -> tuple[bool, str]:
        """Whether it could save itself now, and why not. Returns at once."""
        ...

    def checkpoint_size_estimate(self) -> int:
        """About how many bytes that would be. 0: unknown. Returns at once."""
        ...

    def prepare(self) -> None:
        """Asks it to come to rest at its next good place. Returns at once."""
        ...

    def is_quiescent(self) -> bool:
        """Whether it is at rest: nothing of what it saves changes before ``cancel``. Returns at once."""
        ...

    def checkpoint(self) -> C:
        """What it is, at rest. It must stay as it is until it is encoded, which ends by ``cancel``."""
        ...

    def cancel(self) -> None:
        """Undoes ``prepare``: it goes on. Called after ``prepare`` only, also if that raised."""
        ...

    def restore(self, checkpoint: C) -> None:
        """Becomes what was saved, before ``serve`` returns. Where it raises, an older one may follow."""
        ...

    def health(self) -> Health:
        """How it is. Returns at once."""
        ...


class AsyncCheckpointableKernel(Protocol[C]):
    """As :class:`CheckpointableKernel`, in the application's own loop of trio or asyncio."""

    async def can_checkpoint(self) -> tuple[bool, str]:
        """Whether it could save itself now, and why not."""
        ...

    async def checkpoint_size_estimate(self) -> int:
        """About how many bytes that would be. 0: unknown."""
        ...

    async def prepare(self) -> None:
        """Asks it to come to rest at its next good place."""
        ...

    async def is_quiescent(self) -> bool:
        """Whether it is at rest."""
        ...

    async def checkpoint(self) -> C:
        """What it is, at rest. It is encoded in a thread, and must stay as it is until ``cancel``."""
        ...

    async def cancel(self) -> None:
        """Undoes ``prepare``: it goes on."""
        ...

    async def restore(self, checkpoint: C) -> None:
        """Becomes what was saved, before it begins."""
        ...

    async def health(self) -> Health:
        """How it is."""
        ...
