"""Both decoders of frames under atheris, which looks for inputs that reach new code.

Run as ``python -m tests.fuzz.coverage_guided coordinator|worker -runs=100000`` with a Python that has
``atheris`` besides what the tests need; options with one hyphen are libFuzzer's. Every input is
a stream of frames, the first of them fine. It ends with a traceback where something is not handled.
"""

import asyncio
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["leasehold_coordinator", "leasehold_worker"]):
    from leasehold_client.config import credentials_directory
    from leasehold_coordinator.access.local_tokens import WORKER_FILE
    from leasehold_coordinator.api.session_service import SessionService, _parse
    from leasehold_coordinator.commands.dispatcher import Dispatcher
    from leasehold_coordinator.fleet.fleet import Fleet
    from leasehold_coordinator.shielded_tasks import settle
    from leasehold_coordinator.storage.store import Store
    from leasehold_worker.commands.ledger import CommandLedger
    from leasehold_worker.commands.states import is_terminal
    from leasehold_worker.session.grpc_bridge import _parse as parse_response

import grpc
from leasehold.worker.v1.session_pb2 import ConnectRequest, ConnectResponse

from tests.channels import authentication
from tests.coordinator.bench import VAULT
from tests.coordinator.scripted_worker import make_hello

from .messages import fill

SEPARATOR = b"\xfe\xff\xfe\xff"
SEEDS = 200


class FakeContext:
    """A stream that brings these frames and takes any number."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = iter(frames)
        self._token = (credentials_directory() / WORKER_FILE).read_text().strip()

    def peer(self) -> str:
        """The address of no peer."""
        return "ipv4:127.0.0.1:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        """As gRPC has it for TLS 1.3."""
        return {"ssl_tls_version": [b"TLSv1.3"]}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """The token of workers."""
        return [("authorization", f"Bearer {self._token}")]

    async def read(self) -> object:
        """The next frame, as the server's deserializer hands it over."""
        data = next(self._frames, None)
        return grpc.aio.EOF if data is None else _parse(data)

    async def write(self, frame: ConnectResponse) -> None:
        """Takes a frame, which must be one that can be sent."""
        frame.SerializeToString()


def fuzz_coordinator(folder: Path) -> Any:
    """Feeds frames to the coordinator's side of a stream, over a real store."""
    loop = asyncio.new_event_loop()
    store = Store.open(str(folder / "store.sqlite3"))
    fleet = Fleet(store, load_interval_s=5.0, vault=VAULT)
    service = SessionService(fleet, Dispatcher(fleet), authentication(store))
    hello = ConnectRequest(hello=make_hello("alpha")).SerializeToString()

    async def play(data: bytes) -> None:
        context: Any = FakeContext([hello, *data.split(SEPARATOR)])
        await service.Connect(None, context)
        await settle()

    def run(data: bytes) -> None:
        try:
            loop.run_until_complete(play(data))
        except BaseException:
            store.close()  # its thread would keep us from ending
            raise

    return run


def fuzz_worker(_: Path) -> Any:
    """Feeds frames to the worker's decoder and its ledger, which must keep every command's state legal."""

    def play(data: bytes) -> None:
        ledger = CommandLedger()
        ended: set[str] = set()
        for piece in data.split(SEPARATOR):
            frame = parse_response(piece)
            if isinstance(frame, bytes):
                continue
            if frame.WhichOneof("frame") == "command":
                ledger.receive(frame.command, 1, 0.0)
            elif frame.WhichOneof("frame") == "command_ack":
                ledger.acknowledge(frame.command_ack.command_id, 0.0)
            now = {update.command_id for update in ledger.unacknowledged if is_terminal(update.state)}
            assert not ended & {entry.command_id for entry in ledger.open_entries}
            ended |= now

    return play


def main() -> None:
    """Runs until libFuzzer's options say so."""
    side = sys.argv.pop(1)
    logging.disable()
    kind = ConnectRequest if side == "coordinator" else ConnectResponse
    with tempfile.TemporaryDirectory(prefix="leasehold-fuzz-") as name:
        corpus = Path(name, "corpus")
        corpus.mkdir()
        for seed in range(SEEDS):
            choose = random.Random(seed)
            frames = [fill(kind, choose).SerializeToString()[:4_000] for _ in range(3)]
            (corpus / str(seed)).write_bytes(SEPARATOR.join(frames))
        fuzz = (fuzz_coordinator if side == "coordinator" else fuzz_worker)(Path(name))
        atheris.Setup([*sys.argv, str(corpus)], fuzz)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
