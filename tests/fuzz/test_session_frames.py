"""A worker whose coordinator says anything: frames that end the session too, and welcomes of all kinds."""

import random
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from leasehold.worker.v1.session_pb2 import ConnectResponse, ReadOutput
from leasehold_worker.session import grpc_bridge
from leasehold_worker.session import session as coordinator_session

from tests.worker.scripted_coordinator import TIMEOUT_S, ScriptedCoordinator, Session
from tests.worker.session.test_session import next_session, open_link

from .conftest import Examples
from .messages import fill

SEEDS = st.integers(0, 2**32)


async def test_no_frame_ends_more_than_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: Examples
) -> None:
    for module, name in (
        (grpc_bridge, "REFUSED_BACKOFF_S"),
        (coordinator_session, "REFUSED_BACKOFF_S"),
        (coordinator_session, "RECONNECT_LIMIT_S"),
        (coordinator_session, "BACKOFF_MIN_S"),
        (coordinator_session, "BACKOFF_MAX_S"),
    ):
        monkeypatch.setattr(module, name, 0.01)
    coordinator = ScriptedCoordinator()
    try:
        async with open_link(coordinator, tmp_path):
            first = await next_session(coordinator)
            await trio.to_thread.run_sync(play_all, coordinator, first, examples)
    finally:
        coordinator.stop()


def play_all(coordinator: ScriptedCoordinator, first: Session, examples: Examples) -> None:
    """Sends frames, and sees after each that the worker answers, in that session or in another."""
    sessions = [first]

    @examples
    @given(SEEDS)
    def play(seed: int) -> None:
        choose = random.Random(seed)
        frame = any_frame(choose)
        if frame.HasField("welcome") and choose.random() < 0.5:
            coordinator.first_answer = frame
            sessions[-1].end()
            sessions.append(coordinator.next_session())
            coordinator.first_answer = None
        else:
            sessions[-1].down.put(frame)
        while not answers(sessions[-1], f"read-{seed}-{len(sessions)}"):
            sessions.append(coordinator.next_session())

    play()


def any_frame(choose: random.Random) -> ConnectResponse:
    """A frame of any kind, all of them equally often."""
    frame = ConnectResponse()
    content = getattr(frame, choose.choice(ConnectResponse.DESCRIPTOR.fields).name)
    content.SetInParent()
    content.CopyFrom(fill(type(content), choose))
    return frame


def answers(session: Session, read_id: str) -> bool:
    """Whether the worker answers a question in a session. False: the session has ended."""
    session.down.put(ConnectResponse(read_output=ReadOutput(read_id=read_id, workload_id="none")))
    with session.arrived:
        assert session.arrived.wait_for(
            lambda: session.ended or any(frame.output_chunk.read_id == read_id for frame in session.frames),
            TIMEOUT_S,
        )
        return not session.ended
