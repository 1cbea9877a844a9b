"""An image directory in which others have written anything: it is listed, kept in bounds and cleaned."""

import hashlib
import json
import os
import random
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.worker.v1.session_pb2 import CheckpointQuery
from leasehold_worker.checkpoints.application_format import FORMAT, MAGIC, PAYLOAD_OFFSET
from leasehold_worker.checkpoints.image_manifest import MANIFEST_FILE
from leasehold_worker.errors import OperationError
from leasehold_worker.session.checkpoint_query import answer_checkpoints

from tests.worker.checkpoints.test_directory import World

from .conftest import Examples

SEEDS = st.integers(0, 2**32)
VALUES: tuple[Any, ...] = (
    *(2**40, 2**63, -1, 10**30, 1e308, 0, True, None, "", "x" * 200_000, "\ud800", "\0", "../..", [], {}),
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-13-01", {"a": "\udfff"}, [[1]]),
)
"""What a field may say instead."""

NESTED = b"[" * 50_000
TIMES = (0, -(2**40), 2**40, 2**33)


def fields(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are in a JSON document."""
    found = [at] if at else []
    if isinstance(document, dict | list):
        inside = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in inside:
            found += fields(value, (*at, key))
    return found


def altered(document: Any, choose: random.Random) -> Any:
    """A document with another value somewhere."""
    *outer, last = choose.choice(fields(document))
    place = document
    for key in outer:
        place = place[key]
    place[last] = choose.choice(VALUES)
    return document


def alter_header(path: Path, choose: random.Random) -> None:
    """Writes another header, whose digest is right."""
    data = path.read_bytes()
    length = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[48 : 48 + length])
    text = NESTED if choose.random() < 0.1 else json.dumps(altered(header, choose)).encode()
    text = text[: PAYLOAD_OFFSET - 48]
    prefix = struct.pack("<8sII32s", MAGIC, FORMAT, len(text), hashlib.sha256(text).digest())
    path.write_bytes((prefix + text).ljust(PAYLOAD_OFFSET, b"\0") + data[PAYLOAD_OFFSET:])


def alter_manifest(path: Path, choose: random.Random) -> None:
    """Writes another manifest, whose digest is right."""
    file = json.loads(path.read_text())
    nested = choose.random() < 0.1
    text = NESTED.decode() if nested else json.dumps(altered(file["manifest"], choose))
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    path.write_text(f'{{"format": 2, "sha256": "{digest}", "manifest": {text}}}')


def replace(path: Path, choose: random.Random) -> None:
    """Puts something that is no such file in its place."""
    match choose.randrange(6):
        case 0:
            path.unlink()
            os.mkfifo(path)
        case 1:
            path.unlink()
            path.symlink_to("/dev/zero")
        case 2:
            path.unlink()
            path.mkdir()
        case 3:
            os.truncate(path, 2**40)
        case 4:
            path.write_bytes(choose.randbytes(100))
        case _:
            path.unlink()
            path.symlink_to(path.name)


def play(seed: int, folder: Path) -> None:
    choose = random.Random(seed)
    world = World(folder)
    good = {world.image("w-1", 100), world.saved("w-2")}
    image, saved = world.image("w-1", 100), world.saved("w-2")
    (file,) = folder.glob(f"*/{saved}*")
    (manifest,) = folder.glob(f"*/{image}/{MANIFEST_FILE}")
    for path, alter in ((file, alter_header), (manifest, alter_manifest)):
        if choose.random() < 0.7:
            alter(path, choose)
        else:
            replace(path, choose)
        os.utime(path, (0, choose.choice(TIMES)), follow_symlinks=False)
    os.utime(manifest.parent, (0, choose.choice(TIMES)))

    async def look() -> None:
        listed: dict[str, Checkpoint] = {}
        query = CheckpointQuery(query_id="q")
        more = True
        with trio.fail_after(20):
            while more:
                answer = await answer_checkpoints(disk, query, "worker-here")
                assert not answer.HasField("error"), answer.error
                assert len(answer.SerializeToString()) < 262_144, "it fits into a frame"
                listed |= {checkpoint.checkpoint_id: checkpoint for checkpoint in answer.checkpoints}
                query.after_checkpoint_id, more = answer.checkpoints[-1].checkpoint_id, answer.more
        assert good <= listed.keys()
        assert not [each for each in good if listed[each].problem]

    disk = world.disk()
    trio.run(look)
    disk.available_bytes()
    disk._expire(set(), set(), set())
    for workload_id in ("w-1", "w-2"):
        disk.clean_up(world.registry.add(workload_id))
    disk.sweep()
    for checkpoint_id in (image, saved):
        try:
            disk.delete([checkpoint_id], force=True)
        except OperationError:
            continue


def test_odd_files_harm_no_others(examples: Examples) -> None:
    @examples
    @given(SEEDS)
    def run(seed: int) -> None:
        with TemporaryDirectory() as folder:
            play(seed, Path(folder))

    run()
