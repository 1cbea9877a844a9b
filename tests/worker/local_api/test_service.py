"""Calls of the local API: how many there may be, and of whom."""

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trio
from leasehold.local.v1 import local_service_pb2
from leasehold.v1 import errors_pb2
from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.processes import identify
from leasehold_worker.local_api import service
from leasehold_worker.local_api.call_limits import CallLimits

from tests.worker.kernel_host import open_served


def peer(uid: int) -> Peer:
    identity = identify(os.getpid())
    assert identity is not None
    return Peer(identity, uid, f"user-{uid}")


def test_a_user_has_half_of_the_places_and_some_are_kept_for_root() -> None:
    places = CallLimits(16, "calls")
    stranger, another, third = (peer(os.geteuid() + 1 + number) for number in range(3))
    with contextlib.ExitStack() as held:
        for _ in range(8):
            held.enter_context(places.taken(stranger))
        with pytest.raises(OperationError, match=r"user user-.* has 8 calls open") as refused:
            held.enter_context(places.taken(stranger))
        assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
        for _ in range(6):
            held.enter_context(places.taken(another))
        with pytest.raises(OperationError, match="14 calls are open, the limit of a worker for users"):
            held.enter_context(places.taken(third))
        for _ in range(2):
            held.enter_context(places.taken(peer(0)))
        with pytest.raises(OperationError, match="16 calls are open"):
            held.enter_context(places.taken(peer(0)))
    with places.taken(stranger):
        pass


async def test_a_call_that_does_not_say_what_it_asks_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_MESSAGE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(service, "LOOK_INTERVAL_S", 0.01)
    silence = threading.Event()

    def nothing() -> Iterator[local_service_pb2.ListRequest]:
        silence.wait()
        yield from ()

    def ask(socket: Path, method: str) -> grpc.StatusCode:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call: grpc.StreamUnaryMultiCallable[local_service_pb2.ListRequest, bytes] = channel.stream_unary(
                f"/leasehold.local.v1.LocalService/{method}"
            )
            with pytest.raises(grpc.RpcError) as ended:
                call(nothing(), timeout=20)
            return ended.value.code()

    async with open_served(tmp_path) as served:
        try:
            for method in ("List", "Release", "Claim"):
                code = await trio.to_thread.run_sync(ask, served.folder / "worker.sock", method)
                assert code == grpc.StatusCode.CANCELLED
        finally:
            silence.set()


CLAIM_WITH_UNKNOWN_FIELD = """
import os, grpc
from leasehold.local.v1.local_service_pb2 import ClaimOpen, ClaimRequest
from leasehold.local.v1.local_service_pb2_grpc import LocalServiceStub
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import WorkloadSpec

unknown = EvictionPolicy.FromString(bytes.fromhex("faf004 a08d06") + bytes(100_000))  # field 9999
request = ClaimRequest(open=ClaimOpen(spec=WorkloadSpec(eviction=unknown)))
assert request.ByteSize() > 100_000
with grpc.insecure_channel("unix:" + os.environ["LEASEHOLD_SOCKET"]) as channel:
    for response in LocalServiceStub(channel).Claim(request):
        print(response.WhichOneof("frame"), flush=True)
"""


async def test_a_claim_keeps_no_fields_that_nobody_knows(tmp_path: Path) -> None:
    """A report with them could be too large for a frame, which would end the worker's session."""
    async with open_served(tmp_path) as served:
        claimant = served.start_command(sys.executable, "-c", CLAIM_WITH_UNKNOWN_FIELD)
        await claimant.wait_line("granted")
        (workload,) = served.parts.workloads.all()
        assert workload.spec.ByteSize() < 100
        await served.end(claimant)


async def test_lists_at_once_are_few(tmp_path: Path) -> None:
    """The event loop makes lists, and a user has more calls than that."""
    silence = threading.Event()

    def nothing() -> Iterator[local_service_pb2.ListRequest]:
        silence.wait()
        yield from ()

    def refusal(socket: Path) -> str:
        """The refusal of the one list too many, while the others send no request."""
        ended: queue.SimpleQueue[grpc.Future[bytes]] = queue.SimpleQueue()
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            lists: grpc.StreamUnaryMultiCallable[local_service_pb2.ListRequest, bytes] = channel.stream_unary(
                "/leasehold.local.v1.LocalService/List"
            )
            for _ in range(service.LISTS_LIMIT + 1):
                lists.future(nothing(), timeout=20).add_done_callback(ended.put)
            call = ended.get()
            assert isinstance(call, grpc.Call)
            return call.details()

    async with open_served(tmp_path) as served:
        try:
            said = await trio.to_thread.run_sync(refusal, served.folder / "worker.sock")
        finally:
            silence.set()
    assert said == "8 lists are open, the limit of a worker: wait until one of them ends"


async def test_malformed_requests_have_no_lines_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each had a traceback, so any user of the socket could fill the disk."""

    def ask(socket: Path, method: str) -> str:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
                f"/leasehold.local.v1.LocalService/{method}"
            )
            with pytest.raises(grpc.RpcError) as refused:
                call(iter([b"\xff"]), timeout=20)
            return f"{refused.value.code()} {refused.value.details()}"

    async with open_served(tmp_path) as served:
        for method in ("List", "Release", "Claim", "ServeKernel"):
            said = await trio.to_thread.run_sync(ask, served.folder / "worker.sock", method)
            assert said == "StatusCode.INTERNAL Exception deserializing request!"
    assert "deserializing" not in caplog.text
