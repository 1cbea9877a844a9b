"""A bare grpc.aio server that echoes each message of the same streams, for comparison.

`python -m bench.fleet.echo` serves it.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import uvloop

from bench.fleet.processes import Swarm, load_interval_s, memory_bytes, settle, steady
from bench.light_workers import ECHO


async def echo() -> None:
    """A bare server that echoes every message. Prints its address."""

    async def give_back(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while isinstance(message := await context.read(), bytes):
            await context.write(message)

    server = grpc.aio.server(options=[("grpc.http2.bdp_probe", 0)])
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(give_back)
    service, name = ECHO.lstrip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


@contextmanager
def echo_server() -> Iterator[tuple[str, int]]:
    """The bare server as a process. Yields its address and pid."""
    command = [sys.executable, "-m", "bench.fleet.echo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.kill()


def measure_echo(count: int, seconds: float) -> dict[str, float]:
    """The same measurements of the bare server with this number of streams."""
    with echo_server() as (address, pid):
        time.sleep(0.5)
        idle_bytes = memory_bytes(pid, "VmRSS")
        with Swarm(address, count, "--echo-interval", str(load_interval_s(count))) as swarm:
            swarm.wait_connected()
            settle(count)
            found = steady(pid, swarm, seconds)
            found["kib_per_worker"] = round((memory_bytes(pid, "VmRSS") - idle_bytes) / count / 1024, 1)
            return found


if __name__ == "__main__":
    uvloop.run(echo())
