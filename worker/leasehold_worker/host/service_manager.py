"""The worker's messages to systemd about itself, as sd_notify(3) describes."""

import os
import socket
from contextlib import suppress
from typing import Final, final

import trio

BEATS: Final = 2
"""Signs of life in each watchdog interval."""


@final
class ServiceManager:
    """The service manager that has started this process, if there is one. A message that is lost is no error.

    Args:
        address: Path of its datagram socket; "@" begins an abstract name. Empty: there is none.
        watchdog_s: Time without a sign of life after which it kills this process. None: never.
    """

    def __init__(self, address: str, watchdog_s: float | None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s

    @classmethod
    def of_environment(cls) -> "ServiceManager":
        """Reads NOTIFY_SOCKET and WATCHDOG_USEC, and removes them: programs must not speak for the worker."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        interval_us, pid = (os.environ.pop(name, "") for name in ("WATCHDOG_USEC", "WATCHDOG_PID"))
        is_watched = interval_us.isdecimal() and int(interval_us) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(interval_us) / 1e6 if is_watched else None)

    def tell(self, state: str) -> None:
        """Sends an assignment, such as ``READY=1``."""
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.setblocking(False)
            sender.sendto(state.encode(), address)

    async def show_life(self) -> None:
        """Sends signs of life for as long as the event loop turns, until it is cancelled."""
        while self._watchdog_s is not None:
            self.tell("WATCHDOG=1")
            await trio.sleep(self._watchdog_s / BEATS)
