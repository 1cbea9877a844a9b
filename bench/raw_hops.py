"""Two raw gRPC hops, from a client to a relay to an echo and back, for comparison.

`python -m bench.raw_hops` serves one of them.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import TypeAlias

import grpc
from leasehold_client.config import state_directory
from leasehold_coordinator.access.authority import LOOPBACK_NAMES
from leasehold_coordinator.server.transport import ServerTls, open_state

from tests.certificates import issue

Hop: TypeAlias = "grpc.UnaryUnaryMultiCallable[bytes, bytes]"


@contextmanager
def two_hops(*, is_mutual: bool) -> Iterator[Hop]:
    """The call to a relay, over mutual TLS or without TLS. Relay and echo are processes of their own."""
    with (
        _process(is_mutual=is_mutual) as echo,
        _process("--relay-to", echo, is_mutual=is_mutual) as relay,
        _open_channel(relay, is_mutual=is_mutual) as channel,
    ):
        hop: Hop = channel.unary_unary("/raw/Hop")
        yield hop


@contextmanager
def _process(*arguments: str, is_mutual: bool) -> Iterator[str]:
    """A hop. Yields its address."""
    command = [sys.executable, "-m", "bench.raw_hops", *arguments, *(["--mutual-tls"] if is_mutual else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started.stdout.readline().strip()
        finally:
            started.terminate()


def _open_channel(address: str, *, is_mutual: bool) -> grpc.Channel:
    if not is_mutual:
        return grpc.insecure_channel(address)
    authorities, _ = open_state(state_directory())
    return issue(authorities.newest, "service/hop").open_channel(address)


def main() -> None:
    """Serves a hop until the process is ended, and prints its address."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relay-to", metavar="HOST:PORT", help="address of the next hop; default: an echo")
    parser.add_argument("--mutual-tls", action="store_true")
    options = parser.parse_args()
    is_mutual = options.mutual_tls
    onwards: Hop | None = None
    if options.relay_to:
        onwards = _open_channel(options.relay_to, is_mutual=is_mutual).unary_unary("/raw/Hop")

    def answer(request: bytes, _: grpc.ServicerContext) -> bytes:
        return onwards(request) if onwards else request

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", {"Hop": method}),))
    if is_mutual:
        authorities, _ = open_state(state_directory())
        tls = ServerTls(authorities, frozenset(LOOPBACK_NAMES), is_mutual=True)
        port = server.add_secure_port("127.0.0.1:0", tls.credentials())
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
