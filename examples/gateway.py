"""A gateway that restores a server when a connection arrives, and suspends the server when it is idle.

    python gateway.py --listen 127.0.0.1:8080 --workload llama --server 127.0.0.1:8000 --idle-s 300

The server is a workload that listens at --server, such as vLLM. The gateway copies bytes in both directions,
so any protocol over TCP works. A connection waits for the restore. An open connection keeps the server awake.
"""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

from leasehold_client import AsyncClient, LeaseholdError, WorkloadState

PARKED: Final = {
    WorkloadState.WORKLOAD_STATE_SLEEPING,
    WorkloadState.WORKLOAD_STATE_SUSPENDED,
    WorkloadState.WORKLOAD_STATE_CHECKPOINTED,
    WorkloadState.WORKLOAD_STATE_STOPPED,
}
CHUNK_BYTES: Final = 65_536

Address = tuple[str, int]
"""A host and a port."""

logger = logging.getLogger("gateway")


class Server:
    """A workload that is awake while it has connections, and for some time after the last one.

    Args:
        client: The client of the coordinator.
        workload: Id or name.
        idle_s: Seconds without connections after which the workload is suspended.
    """

    def __init__(self, client: AsyncClient, workload: str, idle_s: float) -> None:
        self._client = client
        self._workload = workload
        self._idle_s = idle_s
        self._command = asyncio.Lock()
        self._connections = 0
        self._used = asyncio.Event()

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Restores the workload if it is parked, and keeps it awake within the context."""
        self._connections += 1
        try:
            async with self._command:
                if await self._is_parked():
                    logger.info("restoring %s", self._workload)
                    await self._client.wait(await self._client.restore(self._workload))
            yield
        finally:
            self._connections -= 1
            self._used.set()

    async def suspend_when_idle(self) -> None:
        """Suspends the workload each time that it had no connection for long enough. Never returns."""
        while True:
            self._used.clear()
            try:
                await asyncio.wait_for(self._used.wait(), self._idle_s)
            except TimeoutError:
                try:
                    await self._suspend()
                except LeaseholdError as error:  # the workload runs on, and the next attempt comes later
                    logger.warning("%s can't be suspended: %s", self._workload, error)

    async def _suspend(self) -> None:
        async with self._command:
            if not self._connections and not await self._is_parked():
                logger.info("suspending %s", self._workload)
                await self._client.wait(await self._client.suspend(self._workload))

    async def _is_parked(self) -> bool:
        found = await self._client.workload(self._workload)
        return found.status.state in PARKED


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copies bytes until the source ends, and then ends the target's direction."""
    while data := await source.read(CHUNK_BYTES):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def relay(
    server: Server, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serves one connection."""
    try:
        async with server.awake():
            inner_reader, inner_writer = await asyncio.open_connection(*address)
            with contextlib.closing(inner_writer):
                async with asyncio.TaskGroup() as both:
                    both.create_task(copy(reader, inner_writer))
                    both.create_task(copy(inner_reader, writer))
    except LeaseholdError as error:
        logger.warning("the server can't be restored: %s", error)
    except (OSError, ExceptionGroup) as error:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        logger.info("a connection broke: %s", ", ".join(map(str, causes)))
    finally:
        writer.close()


def parse_address(text: str) -> Address:
    """Parses HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no address: write HOST:PORT, such as 127.0.0.1:8080")
    return host, int(port)


async def main() -> None:
    """Runs the gateway."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--listen", type=parse_address, default="127.0.0.1:8080")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--server", type=parse_address, required=True)
    parser.add_argument("--idle-s", type=float, default=300.0)
    options = parser.parse_args()
    async with AsyncClient() as client:
        server = Server(client, options.workload, options.idle_s)
        connections: set[asyncio.Task[object] | None] = set()  # asyncio itself does not keep them

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(task := asyncio.current_task())
            try:
                await relay(server, options.server, reader, writer)
            finally:
                connections.discard(task)

        try:
            listener = await asyncio.start_server(serve, *options.listen)
        except OSError as error:
            parser.exit(1, f"the address of --listen can't be used ({error.strerror}): choose another\n")
        async with listener:
            logger.info("listening on %s:%d", *listener.sockets[0].getsockname()[:2])
            await server.suspend_when_idle()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
