"""`leasehold web` keeps its certificate valid while pages only watch."""

import asyncio
import time
from pathlib import Path

import pytest
from leasehold_client.aio.caller_channel import CallerChannel
from leasehold_client.cli import web_page
from leasehold_client.contexts import Context, Contexts, locked_contexts, read_contexts

from tests.renewals import serving_renewals

TIMEOUT_S = 30.0


def test_the_certificate_is_renewed_without_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    async def main() -> None:
        channel, stop = CallerChannel(None, "alice", ""), asyncio.Event()
        old, _ = await channel.present()
        waiting = asyncio.create_task(web_page._renew_until(stop, channel))
        async with asyncio.timeout(TIMEOUT_S):
            while channel.current is old:  # noqa: ASYNC110 - the renewal tells nobody
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.wait_for(waiting, TIMEOUT_S)
        await channel.close()

    with serving_renewals(tmp_path) as coordinator:
        holder = coordinator.issue("user/alice")
        context = Context(
            "alice",
            "user/alice",
            coordinator=coordinator.address,
            key=holder.key.decode(),
            certificate=holder.chain.decode(),
            authorities=holder.roots.decode(),
            expire_s=time.time() + 2.5,
            renew_s=time.time() + 0.5,
        )
        with locked_contexts() as write:
            write(Contexts("alice", {"alice": context}))
        asyncio.run(main())
        assert len(coordinator.keys) == 1
        assert read_contexts().get("alice").certificate != context.certificate
