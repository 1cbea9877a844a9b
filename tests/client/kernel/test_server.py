"""Kernels on the application's side: what they are made of, and programs without a worker."""

import dataclasses
import hashlib
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from leasehold.local.v1 import kernel_pb2
from leasehold.local.v1.kernel_pb2 import KernelCall, KernelChunk, KernelPayload
from leasehold.local.v1.local_service_pb2 import ServeKernelRequest, ServeKernelResponse
from leasehold_client import kernel
from leasehold_client.kernel import calls as kernel_calls
from leasehold_client.kernel.calls import CHUNK_BYTES, KernelCalls


@dataclasses.dataclass
class State:
    step: int
    weights: list[float]


class App:
    """Counts, and notes what it is told."""

    def __init__(self) -> None:
        self.state = State(7, [0.5, 0.25])
        self.told: list[str] = []

    def can_checkpoint(self) -> tuple[bool, str]:
        return True, ""

    def checkpoint_size_estimate(self) -> int:
        return 100

    def prepare(self) -> None:
        self.told.append("prepare")

    def cancel(self) -> None:
        self.told.append("cancel")

    def is_quiescent(self) -> bool:
        return True

    def checkpoint(self) -> State:
        return self.state

    def restore(self, checkpoint: State) -> None:
        self.state = checkpoint

    def health(self) -> kernel.Health:
        return kernel.Health.HEALTHY


class AsyncApp:
    """The same in a loop."""

    def __init__(self) -> None:
        self.app = App()

    async def can_checkpoint(self) -> tuple[bool, str]:
        return self.app.can_checkpoint()

    async def checkpoint_size_estimate(self) -> int:
        return self.app.checkpoint_size_estimate()

    async def prepare(self) -> None:
        self.app.prepare()

    async def cancel(self) -> None:
        self.app.cancel()

    async def is_quiescent(self) -> bool:
        return self.app.is_quiescent()

    async def checkpoint(self) -> State:
        return self.app.checkpoint()

    async def restore(self, checkpoint: State) -> None:
        self.app.restore(checkpoint)

    async def health(self) -> kernel.Health:
        return self.app.health()


FACTS = kernel.KernelFacts(kernel_id="app", kind="test", version=1, codec=kernel.Msgpack(State))


class Pieces:
    """Bytes in pieces of odd sizes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def encode(self, checkpoint: State) -> list[bytes]:
        return [bytes([number]) * size for number, size in enumerate(self.sizes)]

    def decode(self, data: bytes) -> State:
        return State(len(data), [])


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEASEHOLD_SOCKET", raising=False)
    monkeypatch.delenv("LEASEHOLD_WORKLOAD_ID", raising=False)


def test_message_pack_reads_what_it_wrote_and_nothing_else() -> None:
    codec = kernel.Msgpack(State)
    assert codec.decode(codec.encode(State(3, [1.5]))) == State(3, [1.5])
    with pytest.raises(msgspec.MsgspecError):
        codec.decode(msgspec.msgpack.encode({"step": "three"}))


def test_without_a_worker_it_is_refused_with_the_remedy() -> None:
    with pytest.raises(kernel.NoWorkerError, match=r"LEASEHOLD_SOCKET is not set.*required=False"):
        kernel.serve(App(), FACTS)


def test_a_program_runs_without_leasehold_too() -> None:
    before = threading.active_count()
    with kernel.serve(App(), FACTS, required=False) as served:
        assert not served.is_served
        assert served.restored_checkpoint_id == ""
        assert threading.active_count() == before


async def test_a_program_in_a_loop_runs_without_leasehold_too() -> None:
    async with kernel.serve_trio(AsyncApp(), FACTS, required=False) as served:
        assert not served.is_served
    with pytest.raises(kernel.NoWorkerError):
        async with kernel.serve_trio(AsyncApp(), FACTS):
            pass


def test_a_worker_that_is_not_there_is_waited_for_in_vain(tmp_path: Path) -> None:
    with pytest.raises(kernel.NoWorkerError, match=r"none\.sock"):
        kernel.serve(App(), FACTS, socket=tmp_path / "none.sock", wait_s=0.3)
    with kernel.serve(App(), FACTS, socket=tmp_path / "none.sock", wait_s=0.1, required=False) as served:
        assert not served.is_served
    assert not [thread for thread in threading.enumerate() if thread.name == "leasehold-kernel"]


def test_a_program_that_is_to_be_restored_does_not_begin_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEASEHOLD_RESTORE", "1")
    with pytest.raises(kernel.NoWorkerError):
        kernel.serve(App(), FACTS, required=False)
    path = tmp_path / "none.sock"
    with pytest.raises(kernel.NoWorkerError, match=r"none\.sock"):
        kernel.serve(App(), FACTS, socket=path, wait_s=0.1, restore_wait_s=0.1, required=False)
    assert not [thread for thread in threading.enumerate() if thread.name == "leasehold-kernel"]


async def test_who_waits_in_a_loop_can_be_cancelled(tmp_path: Path) -> None:
    with trio.move_on_after(0.2) as scope:
        async with kernel.serve_trio(AsyncApp(), FACTS, socket=tmp_path / "none.sock"):
            pass
    assert scope.cancelled_caught
    assert not [thread for thread in threading.enumerate() if thread.name == "leasehold-kernel"]


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [CHUNK_BYTES], [CHUNK_BYTES + 1], [3] * 50_000, [200_000, 0, 1, 70_000]]
)
def test_pieces_of_any_size_become_chunks_of_one_size(sizes: list[int]) -> None:
    facts = dataclasses.replace(FACTS, codec=Pieces(*[min(size, 250_000) for size in sizes[:200]]))
    sizes = sizes[:200]
    sent: list[ServeKernelRequest] = []
    call = KernelCall(call_id=5, method=kernel_pb2.KERNEL_METHOD_CHECKPOINT)
    answer = KernelCalls(App(), facts).answer(call, sent.append)
    chunks = [frame.chunk.data for frame in sent]
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK_BYTES] * (len(chunks) - 1)
    assert b"".join(chunks) == b"".join(bytes([number]) * size for number, size in enumerate(sizes))
    assert answer.saved.size_bytes == sum(sizes)
    assert {frame.chunk.call_id for frame in sent} <= {5}


def test_cancel_follows_prepare_and_nothing_else() -> None:
    app = App()
    calls = KernelCalls(app, FACTS)

    def call(method: kernel_pb2.KernelMethod.ValueType) -> None:
        assert calls.answer(KernelCall(method=method), lambda _: None).HasField("done")

    call(kernel_pb2.KERNEL_METHOD_CANCEL)
    assert app.told == []
    call(kernel_pb2.KERNEL_METHOD_PREPARE)
    call(kernel_pb2.KERNEL_METHOD_CANCEL)
    call(kernel_pb2.KERNEL_METHOD_CANCEL)
    assert app.told == ["prepare", "cancel"]


def test_a_cancel_that_failed_is_called_again_when_the_worker_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App()
    calls = KernelCalls(app, FACTS)
    calls.answer(KernelCall(method=kernel_pb2.KERNEL_METHOD_PREPARE), lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(app, "cancel", lambda: 1 / 0)
        answer = calls.answer(KernelCall(method=kernel_pb2.KERNEL_METHOD_CANCEL), lambda _: None)
        assert "ZeroDivisionError" in answer.failure
    calls.undo()
    calls.undo()
    assert app.told == ["prepare", "cancel"]


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (OSError("no file caf\udce9"), "OSError: no file caf\\udce9"),
        (ValueError("\udce9" * 2_000), ("ValueError: " + "\\udce9" * 200)[:1024]),
        (UnreadableError(), "UnreadableError: its text can't be read"),
    ],
    ids=["half", "long", "unreadable"],
)
def test_a_failure_of_any_text_is_answered(
    error: Exception, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    # Workers of pytest can't send a log with half a character.
    monkeypatch.setattr(kernel_calls.logger, "disabled", True)
    app = App()
    monkeypatch.setattr(app, "prepare", fail)
    monkeypatch.setattr(app, "restore", fail)
    calls = KernelCalls(app, FACTS)
    data = FACTS.codec.encode(app.state)
    assert isinstance(data, bytes)
    frames = [
        ServeKernelResponse(chunk=KernelChunk(call_id=1, data=data)),
        ServeKernelResponse(
            end=KernelPayload(call_id=1, size_bytes=len(data), sha256=hashlib.sha256(data).digest())
        ),
    ]
    for answer in (
        calls.answer(KernelCall(method=kernel_pb2.KERNEL_METHOD_PREPARE), lambda _: None),
        calls.restore(KernelCall(call_id=1), iter(frames), ""),
    ):
        assert answer.failure == failure
        assert answer.SerializeToString()


def test_a_reason_of_any_text_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    monkeypatch.setattr(app, "can_checkpoint", lambda: (False, "caf\udce9 is open"))
    call = KernelCall(method=kernel_pb2.KERNEL_METHOD_CAN_CHECKPOINT)
    answer = KernelCalls(app, FACTS).answer(call, lambda _: None)
    assert (answer.readiness.ready, answer.readiness.reason) == (False, "caf\\udce9 is open")


def test_what_arrives_damaged_is_not_restored() -> None:
    app = App()
    frames = [
        ServeKernelResponse(chunk=KernelChunk(call_id=1, data=b"other")),
        ServeKernelResponse(end=KernelPayload(call_id=1, size_bytes=5, sha256=b"x" * 32)),
    ]
    answer = KernelCalls(app, FACTS).restore(KernelCall(call_id=1), iter(frames), "")
    assert "the received checkpoint is damaged" in answer.failure
    assert app.state.step == 7


def test_a_method_that_this_version_does_not_know_is_answered() -> None:
    answer = KernelCalls(App(), FACTS).answer(KernelCall(call_id=1), lambda _: None)
    assert "is unknown to this version of Leasehold" in answer.failure


def test_the_program_of_the_page_runs() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/kernels.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done: dict[str, Any] = {"__name__": "page"}
    exec(program.replace("1_000_000", "1000"), done)
    assert done["counting"].state == done["State"](1000, 500.0)
