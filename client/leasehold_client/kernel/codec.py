"""What a kernel's checkpoints are as bytes."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar, final

import msgspec

C = TypeVar("C")


class Codec(Protocol[C]):
    """Turns a kernel's checkpoints into bytes and back. Called in a thread of Leasehold's."""

    def encode(self, checkpoint: C) -> bytes | Iterable[bytes]:
        """The checkpoint as bytes, or as pieces of any size, which need not all be in memory at once."""
        ...

    def decode(self, data: bytes) -> C:
        """The checkpoint that these bytes are. Raises what it likes where they are none."""
        ...


@final
class Msgpack(Generic[C]):
    """MessagePack by msgspec: for its Structs, dataclasses, and what Python has built in.

    What is read is checked against the type.

    Args:
        checkpoint_type: The type of the checkpoints.
    """

    def __init__(self, checkpoint_type: type[C]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(checkpoint_type)

    def encode(self, checkpoint: C) -> bytes:
        """The checkpoint as MessagePack."""
        return self._encoder.encode(checkpoint)

    def decode(self, data: bytes) -> C:
        """The checkpoint of MessagePack.

        Raises:
            msgspec.MsgspecError: The bytes are none of this type.
        """
        return self._decoder.decode(data)
