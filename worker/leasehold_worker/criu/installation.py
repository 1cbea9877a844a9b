"""The installed CRIU: its version, a test whether it works here, and the errors in its log."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from leasehold_worker.criu import criu_pb2, rpc
from leasehold_worker.criu.criu_pb2 import CriuRequest, CriuResponse
from leasehold_worker.criu.rpc import SwrkError

OLDEST_VERSION: Final = (4, 2)
"""On Linux 6.18, 3.17.1 (Debian 12) stops with "Unexpected rt vDSO area bounds", and 4.1.1 (Debian 13) can't
dump a process with a TCP socket ("sockets: Can't get 1:16 opt: Operation not supported")."""

PROBE_TIMEOUT_S: Final = 10.0
ERROR_LINES: Final = 2
HOW_TO_GET_IT: Final = "docs/criu.md says how to build one"

_ADMINISTRATOR: Final = 21
"""Number of CAP_SYS_ADMIN (capabilities(7))."""

_HARMLESS: Final = (
    *("RLIMIT_NOFILE", "Dumping FAILED", "Restoring FAILED", "action scripts failed", "script ret code"),
    *("reported script error", "Killing processes because of failure", "Can't send response"),
)
"""Parts of errors that CRIU logs even on success, or beside the decisive one."""


@dataclass(frozen=True, slots=True)
class CriuFacts:
    """A working CRIU.

    Attributes:
        path: The program.
        version: As 4.2.1.
    """

    path: Path
    version: str


async def probe(configured: str | None = None, *, timeout_s: float = PROBE_TIMEOUT_S) -> CriuFacts | str:
    """Looks for a working CRIU.

    Args:
        configured: The program; by default the one on PATH.
        timeout_s: Timeout of each of two questions to it.

    Returns:
        The facts, or the reason why there is none, with a remedy.
    """
    found = shutil.which(configured or "criu")
    if found is None:
        return f"{configured or 'criu'} is missing or not a program: {HOW_TO_GET_IT}"
    if not _is_administrator():
        return "CRIU needs root, as another worker drops CAP_SYS_ADMIN: start the worker as root"
    path = Path.cwd() / found
    try:
        answer = await _ask(path, criu_pb2.CRIU_REQUEST_TYPE_VERSION, timeout_s)
        version = (answer.version.major_number, answer.version.minor_number, answer.version.sublevel)
        text = ".".join(str(number) for number in version).removesuffix(".0")
        if version < OLDEST_VERSION:
            oldest = ".".join(str(number) for number in OLDEST_VERSION)
            return (
                f"{path} is version {text}, which fails on current kernels: {oldest} is "
                f"needed, and {HOW_TO_GET_IT}"
            )
        await _ask(path, criu_pb2.CRIU_REQUEST_TYPE_CHECK, timeout_s)
    except SwrkError as error:
        return f"{path} does not work here ({error}): see `criu check`"
    return CriuFacts(path, text)


async def _ask(path: Path, question: criu_pb2.CriuRequestType.ValueType, timeout_s: float) -> CriuResponse:
    """The answer of a CRIU to a question without options.

    Raises:
        SwrkError: CRIU refused, or did not answer in time.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            with trio.fail_after(timeout_s):
                async with rpc.start(path, errors=errors.fileno(), end_timeout_s=1.0) as criu:
                    await criu.send(CriuRequest(type=question))
                    answer = await criu.receive()
        except trio.TooSlowError:
            raise SwrkError(f"no answer within {timeout_s:g} s") from None
        if not answer.success:
            errors.seek(0)
            said = decisive_errors(errors.read().decode(errors="replace"))
            raise SwrkError(f"{said or answer.cr_errmsg or 'without a reason'}")
    return answer


def _is_administrator() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _ADMINISTRATOR & 1)
    return os.geteuid() == 0


def decisive_errors(log: str) -> str:
    """The first errors in a log of CRIU, without time and place. Empty: none."""
    lines = [
        line.partition("Error (")[2].partition("): ")[2] for line in log.splitlines() if "Error (" in line
    ]
    wanted = [line.strip() for line in lines if line and not any(part in line for part in _HARMLESS)]
    return "; ".join(wanted[:ERROR_LINES])


def read_errors(*paths: Path) -> str:
    """Like :func:`decisive_errors`, for the first of these logs with an error."""
    for path in paths:
        try:
            if said := decisive_errors(path.read_text(encoding="utf-8", errors="replace")):
                return said
        except OSError:
            continue
    return ""
