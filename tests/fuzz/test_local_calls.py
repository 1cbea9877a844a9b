"""The local API, asked anything by a process of the host: any messages, and bytes that are none."""

import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import trio
from google.protobuf import message_factory
from hypothesis import given
from hypothesis import strategies as st
from leasehold.local.v1 import local_service_pb2
from leasehold.local.v1.local_service_pb2_grpc import LocalServiceStub

from tests.worker.kernel_host import open_served

from .conftest import Examples
from .messages import fill

SEEDS = st.integers(0, 2**32)
SERVICE = local_service_pb2.DESCRIPTOR.services_by_name["LocalService"]
ANSWER_S = 0.2
"""How long a claim or a kernel may last that the worker lets in."""

FINE = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}
"""What a process may be answered: never UNKNOWN, which is an error that nobody handled."""


def damaged(choose: random.Random, method: str) -> bytes:
    """A request with any content, mostly whole."""
    kind = message_factory.GetMessageClass(SERVICE.methods_by_name[method].input_type)
    data = bytearray(fill(kind, choose).SerializeToString()[:200_000])
    if data and choose.randrange(5) == 0:
        del data[choose.randrange(len(data)) :]
    return bytes(data)


async def test_a_process_harms_no_other_by_what_it_asks(tmp_path: Path, examples: Examples) -> None:
    async with open_served(tmp_path) as served:
        await trio.to_thread.run_sync(play_all, served.folder / "worker.sock", examples)


def play_all(socket: Path, examples: Examples) -> None:
    """Asks, and sees after each that the worker still answers others."""
    address = f"unix:{socket}"
    options = [("grpc.use_local_subchannel_pool", 1)]
    with (
        grpc.insecure_channel(address, options) as hostile,
        grpc.insecure_channel(address, options) as honest,
    ):

        @examples
        @given(SEEDS, st.sampled_from(sorted(SERVICE.methods_by_name)))
        def play(seed: int, method: str) -> None:
            choose = random.Random(seed)
            frames = [damaged(choose, method) for _ in range(choose.randrange(4))]
            code, details = ask(hostile, method, frames)
            fine = code in FINE or (code, details) == UNREADABLE or is_refused_stream(code, details)
            assert fine, (method, details)
            LocalServiceStub(honest).List(local_service_pb2.ListRequest(), timeout=20)

        play()


UNREADABLE = (grpc.StatusCode.INTERNAL, "Exception deserializing request!")
"""What gRPC says of bytes that are no message."""


def is_refused_stream(code: grpc.StatusCode, details: str) -> bool:
    """Whether the connection had all its streams in use, so nothing began (RFC 9113, REFUSED_STREAM)."""
    return code is grpc.StatusCode.UNAVAILABLE and "RST_STREAM with error code 7" in details


def ask(channel: grpc.Channel, method: str, frames: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Calls a method with any number of requests. Returns its status."""

    def requests() -> Iterator[bytes]:
        yield from frames

    path = f"/{SERVICE.full_name}/{method}"
    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    call = stream(requests(), timeout=ANSWER_S)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    return call.code(), call.details()
