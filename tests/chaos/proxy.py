"""A TCP proxy that delays, throttles, cuts and refuses connections, in a thread of its own."""

import asyncio
import contextlib
import threading
from typing import final

CHUNK_BYTES = 1024


@final
class Proxy:
    """Passes connections on to one address.

    Attributes:
        delay_s: How long each chunk waits.
        refusing: Connections are closed as soon as they are made.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.delay_s = 0.0
        self.refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.close()
            return
        try:
            onward_reader, onward_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, onward_writer}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump(reader, onward_writer))
            tasks.create_task(self._pump(onward_reader, writer))
        self._writers -= {writer, onward_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Breaks every connection that there is."""

        def close() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(close)

    def stop(self) -> None:
        """Ends the proxy."""
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
