"""A channel with the client certificate of a context, which is renewed when it is due.

gRPC keeps the certificate of a channel for the channel's life. So calls after a renewal use a new channel,
and those under way end on the old one.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

import grpc

from leasehold_client.contexts import Context, read_contexts
from leasehold_client.coordinator.pem_checks import has_certificates, key_problem
from leasehold_client.errors import LeaseholdError, UsageError

logger = logging.getLogger(__name__)

RETRY_S: Final = 60.0
"""Time between two attempts to renew a certificate."""


@final
class RenewedContext:
    """A context whose certificate is renewed when it is due.

    Args:
        context: The context.

    Raises:
        UsageError: The certificate has expired or is not valid yet.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._next_attempt_s = 0.0
        self._lock = threading.Lock()
        self.present().require_valid()

    def present(self) -> Context:
        """The context with the newest certificate, which is renewed by a call if it is due.

        An expired certificate can't be renewed: one that another process has stored is taken over. After a
        failed renewal, a later call tries again. The renewed context stays the present one also if
        its caller is cancelled, so callers compare it with the context of their channel.
        """
        with self._lock:
            if self._is_due():
                self._renew()
            elif self._context.expire_s <= time.time():
                self._take_over()
            return self._context

    def newest(self) -> Context:
        """The context with the newest certificate that any process has stored, without a renewal."""
        with self._lock:
            self._take_over()
            return self._context

    def _take_over(self) -> None:
        with suppress(UsageError):  # the coordinator's refusal of the old certificate says what to do
            self._replace(read_contexts().get(self._context.name))

    def _replace(self, found: Context) -> None:
        """Takes a context of the same name, unless a later login has made another one of it."""
        known = self._context
        is_same = (found.identity, found.coordinator) == (known.identity, known.coordinator)
        if is_same and found.certificate != known.certificate:
            self._context = found

    def _is_due(self) -> bool:
        is_due = self._context.renew_s <= time.time() < self._context.expire_s
        return is_due and time.monotonic() >= self._next_attempt_s

    def _renew(self) -> None:
        from leasehold_client.coordinator.login import renew  # late: most verbs need no cryptography

        try:
            self._replace(renew(self._context.name, self._context.certificate))
        except LeaseholdError as error:
            self._next_attempt_s = time.monotonic() + RETRY_S
            identity = self._context.identity
            logger.warning("the certificate of %s can't be renewed: %s", identity, error.message)


def context_credentials(context: Context) -> grpc.ChannelCredentials:
    """Credentials with the certificate of a context.

    Raises:
        UsageError: The context is damaged.
    """
    authorities, key, chain = (
        text.encode() for text in (context.authorities, context.key, context.certificate)
    )
    if not (has_certificates(authorities) and has_certificates(chain)) or key_problem(chain, key):
        raise UsageError(
            f"the key or a certificate of the context {context.name} is damaged: `leasehold context delete "
            f"{context.name}`, and log in again"
        )
    return grpc.ssl_channel_credentials(authorities, key, chain)


@final
class RenewingChannel(grpc.Channel):
    """A channel for unary calls and response streams.

    Args:
        context: The context.
        address: HOST:PORT of the coordinator.
        options: Settings of gRPC.

    Raises:
        UsageError: The context is damaged.
    """

    def __init__(self, context: RenewedContext, address: str, options: Sequence[tuple[str, int]]) -> None:
        self._context = context
        self._address = address
        self._options = options
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        """The present channel, and before it those whose calls may not have ended."""
        self._opened: Context | None = None
        """The context of the present channel."""
        self.present()

    def present(self) -> grpc.Channel:
        """The channel for the next call."""
        with self._lock:
            context = self._context.present()
            if context is not self._opened:
                credentials = context_credentials(context)
                self._channels.append(grpc.secure_channel(self._address, credentials, options=self._options))
                self._opened = context
            return self._channels[-1]

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """A unary method."""
        return _Method(lambda: self.present().unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """A method with a response stream."""
        return _Method(lambda: self.present().unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """A method with a request stream."""
        return _Method(lambda: self.present().stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """A method with both streams."""
        return _Method(lambda: self.present().stream_stream(*arguments, **named))

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """Tells a function the state of the present channel."""
        self.present().subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Ends :meth:`subscribe`."""
        for channel in self._channels:
            channel.unsubscribe(callback)

    def close(self) -> None:
        """Closes all channels, which ends their calls."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> "RenewingChannel":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@final
class _Method:
    """A method of a stub, which finds its channel at each call."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Makes a call."""
        return self._find()(*arguments, **named)

    def with_call(self, *arguments: Any, **named: Any) -> Any:
        """Makes a call, and returns its metadata too. Interceptors of gRPC call this."""
        return self._find().with_call(*arguments, **named)

    def future(self, *arguments: Any, **named: Any) -> Any:
        """Begins a call, for interceptors of gRPC."""
        return self._find().future(*arguments, **named)
