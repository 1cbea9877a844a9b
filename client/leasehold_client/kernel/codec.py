"""Codecs of application checkpoints."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar, final

import msgspec

C = TypeVar("C")


class Codec(Protocol[C]):
    """Converts checkpoints to bytes and back. Called in a thread of Leasehold."""

    def encode(self, checkpoint: C) -> bytes | Iterable[bytes]:
        """Encodes a checkpoint as bytes, or as pieces of any size that are read one after the other."""
        ...

    def decode(self, data: bytes) -> C:
        """Decodes a checkpoint. Any exception means that the bytes are invalid."""
        ...


@final
class Msgpack(Generic[C]):
    """MessagePack by msgspec, for msgspec Structs, dataclasses and built-in types.

    Decoded data is validated against the type.

    Args:
        checkpoint_type: The type of the checkpoints.
    """

    def __init__(self, checkpoint_type: type[C]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(checkpoint_type)

    def encode(self, checkpoint: C) -> bytes:
        """Encodes a checkpoint as MessagePack."""
        return self._encoder.encode(checkpoint)

    def decode(self, data: bytes) -> C:
        """Decodes a checkpoint from MessagePack.

        Raises:
            msgspec.MsgspecError: The bytes are not of the type.
        """
        return self._decoder.decode(data)
