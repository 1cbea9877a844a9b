"""The start of a coordinator process on the ports of an earlier one."""

import re
import subprocess
import time
from collections.abc import Callable
from typing import Final

LISTENING: Final = re.compile(r" on (\S+) for clients, (\S+) for workers\n")
"""A coordinator's line about its addresses."""

PORT_IN_USE: Final = "the port is in use"
PORT_TIMEOUT_S: Final = 30.0


def start_until_listening(
    start: Callable[[], subprocess.Popen[str]], log: Callable[[], str]
) -> tuple[subprocess.Popen[str], str, str]:
    """Starts a coordinator, again and again while another program has one of its ports.

    After the end of a coordinator, a connection of another suite on this machine may have its port.

    Args:
        start: Starts the process, with a pipe as its output.
        log: The text of its log.

    Returns:
        The process, its address for clients and its address for workers.
    """
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while True:
        process = start()
        assert process.stdout is not None
        line = process.stdout.readline()
        if listening := LISTENING.search(line):
            return process, listening[1], listening[2]
        process.wait(PORT_TIMEOUT_S)
        process.stdout.close()
        assert PORT_IN_USE in log(), (line, log())
        assert time.monotonic() < deadline, log()
        time.sleep(0.1)
