"""Hooks say who calls, and nobody else learns it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from leasehold.v1.hook_pb2 import Hook, HookCredential, HttpHook, SglangHook, VllmHook, WorkDrain
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks import runner
from leasehold_worker.hooks.context import HookFailedError
from leasehold_worker.hooks.credentials import read_token

from tests.worker.framework_servers import Answer, ScriptedServer, VllmServer, serving
from tests.worker.hook_contexts import BEFORE, OFFLOAD, context
from tests.worker.sglang_server import SglangServer

TOKEN = "sk-0123456789abcdef"


class Repeating(ScriptedServer):
    """Refuses everybody, and says whom."""

    def answer(self, method: str, target: str, body: bytes) -> Answer:
        super().answer(method, target, body)
        return 401, {"detail": f"invalid key {self.authorizations[-1]}"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


async def test_a_token_from_a_file_is_sent_with_every_request(token_file: Path, tmp_path: Path) -> None:
    credential = HookCredential(file=str(token_file))
    with serving(VllmServer()) as server:
        request = HttpHook(method="GET", url=f"{server.url}/health", credential=credential)
        drain = WorkDrain(idle=request)
        hook = Hook(name="engine", vllm=VllmHook(url=server.url, credential=credential), drain=drain)
        used = context([hook], tmp_path, OFFLOAD, measure=server.measure)
        await runner.down(used)
        await runner.up(used)
        assert len(server.calls) > 5
        assert server.authorizations == [f"Bearer {TOKEN}"] * len(server.calls)


async def test_a_token_from_a_variable_is_sent_to_sglang(tmp_path: Path) -> None:
    with serving(SglangServer()) as server:
        sglang = SglangHook(url=server.url, credential=HookCredential(environment_variable="SGLANG_KEY"))
        plain = context([Hook(name="engine", sglang=sglang)], tmp_path, OFFLOAD, measure=server.measure)
        used = replace(plain, environment={"SGLANG_KEY": TOKEN})
        await runner.down(used)
        await runner.up(used)
        assert set(server.authorizations) == {f"Bearer {TOKEN}"}


async def test_requests_without_a_credential_have_none(tmp_path: Path) -> None:
    with serving(ScriptedServer()) as server:
        hook = Hook(name="a", phase=BEFORE, http=HttpHook(method="GET", url=server.url))
        await runner.down(context([hook], tmp_path))
        assert server.authorizations == [None]


@pytest.mark.parametrize("kind", ["http", "vllm", "sglang"])
async def test_a_server_that_repeats_the_token_does_not_reveal_it(
    kind: str, token_file: Path, tmp_path: Path
) -> None:
    credential = HookCredential(file=str(token_file))
    with serving(Repeating()) as server:
        match kind:
            case "http":
                request = HttpHook(method="GET", url=server.url, credential=credential)
                hook = Hook(name="a", phase=BEFORE, http=request)
            case "vllm":
                hook = Hook(name="a", vllm=VllmHook(url=server.url, credential=credential))
            case _:
                hook = Hook(name="a", sglang=SglangHook(url=server.url, credential=credential))
        used = context([hook], tmp_path, OFFLOAD)
        with pytest.raises(OperationError, match=r"answered 401.*\[credential\]") as error:
            await runner.down(used)
    assert TOKEN not in " ".join([str(error.value), *error.value.metadata.values(), *used.warnings])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"two words\n", "has spaces"),
        (b"x" * 5000, "over 4096"),
        (b"a\r\nX-Evil: 1", "has"),
    ],
)
async def test_what_is_no_token_is_not_sent(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with serving(ScriptedServer()) as server:
        request = HttpHook(method="GET", url=server.url, credential=HookCredential(file=str(path)))
        with pytest.raises(OperationError, match=why) as error:
            await runner.down(context([Hook(name="a", phase=BEFORE, http=request)], tmp_path))
        assert server.calls == []
    assert "Evil" not in error.value.message


async def test_a_file_that_can_not_be_read_is_told_and_never_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, why in (
        (fifo, "not a regular file"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "can't be"),
    ):
        with pytest.raises(HookFailedError, match=why):
            await read_token(HookCredential(file=str(path)), {})
