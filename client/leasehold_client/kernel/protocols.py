"""Protocols of checkpointable applications."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from leasehold.v1 import workload_pb2

from leasehold_client.kernel.codec import Codec

C = TypeVar("C")


class Health(enum.Enum):
    """Health that an application reports."""

    UNKNOWN = workload_pb2.KERNEL_HEALTH_UNSPECIFIED
    HEALTHY = workload_pb2.KERNEL_HEALTH_HEALTHY
    DEGRADED = workload_pb2.KERNEL_HEALTH_DEGRADED
    UNHEALTHY = workload_pb2.KERNEL_HEALTH_UNHEALTHY


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts(Generic[C]):
    """Identity and checkpoint format of an application.

    Attributes:
        kernel_id: Identity of the application. A checkpoint of another identity is never restored.
        kind: Kind of application.
        version: Version of the checkpoint format. A checkpoint of another version is never restored, so
            increase the version when the code can't read older checkpoints.
        codec: Converts checkpoints to bytes and back.
        describe: Returns facts about a checkpoint for people, such as its step: at most 8 KiB.
    """

    kernel_id: str
    kind: str
    version: int
    codec: Codec[C]
    describe: Callable[[C], Mapping[str, str]] | None = None


class CheckpointableKernel(Protocol[C]):
    """A checkpointable application with plain threads.

    The worker calls ``can_checkpoint``, ``checkpoint_size_estimate``, ``prepare``, ``is_quiescent`` until it
    returns true, and ``checkpoint``. ``cancel`` follows after success and after any failure. Calls come one
    at a time, in a thread of Leasehold. An exception fails the call, and is reported and logged.
    """

    def can_checkpoint(self) -> tuple[bool, str]:
        """Whether the application can checkpoint now, and otherwise the reason. Returns at once."""
        ...

    def checkpoint_size_estimate(self) -> int | None:
        """Approximate size of a checkpoint in bytes. None: unknown. Returns at once."""
        ...

    def prepare(self) -> None:
        """Requests that the application quiesce at its next safe point. Returns at once."""
        ...

    def is_quiescent(self) -> bool:
        """Whether the application is quiescent: its state is constant until ``cancel``. Returns at once."""
        ...

    def checkpoint(self) -> C:
        """Returns the state of the quiescent application. The state must stay unchanged until ``cancel``."""
        ...

    def cancel(self) -> None:
        """Ends the quiescence. Called only after ``prepare``, also if ``prepare`` raised."""
        ...

    def restore(self, checkpoint: C) -> None:
        """Adopts a saved state before ``serve`` returns. After an exception, an older state may follow."""
        ...

    def health(self) -> Health:
        """The health of the application. Returns at once."""
        ...


class AsyncCheckpointableKernel(Protocol[C]):
    """As :class:`CheckpointableKernel`, with coroutines in the application's trio or asyncio loop."""

    async def can_checkpoint(self) -> tuple[bool, str]:
        """Whether the application can checkpoint now, and otherwise the reason."""
        ...

    async def checkpoint_size_estimate(self) -> int | None:
        """Approximate size of a checkpoint in bytes. None: unknown."""
        ...

    async def prepare(self) -> None:
        """Requests that the application quiesce at its next safe point."""
        ...

    async def is_quiescent(self) -> bool:
        """Whether the application is quiescent."""
        ...

    async def checkpoint(self) -> C:
        """Returns the state. It is encoded in another thread, and must stay unchanged until ``cancel``."""
        ...

    async def cancel(self) -> None:
        """Ends the quiescence."""
        ...

    async def restore(self, checkpoint: C) -> None:
        """Adopts a saved state before the application starts."""
        ...

    async def health(self) -> Health:
        """The health of the application."""
        ...
