"""A rate limit on the log: a peer can cause a line with each frame, and must not fill the disk."""

import logging
import time
from dataclasses import dataclass
from typing import Final, final

LINE_LIMIT: Final = 1_000
"""Lines that one logging statement may write in one period."""

PERIOD_S: Final = 60.0


@dataclass(slots=True)
class _Period:
    began: float
    told: int = 0
    left_out: int = 0


@final
class LineBound(logging.Filter):
    """Suppresses lines of a logging statement over its limit. Its next line says how many were suppressed."""

    def __init__(self) -> None:
        super().__init__()
        self._periods: dict[tuple[str, int], _Period] = {}
        """By file and line of the logging statement."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        statement, now = (record.pathname, record.lineno), time.monotonic()
        period = self._periods.setdefault(statement, _Period(now))
        if now - period.began >= PERIOD_S:
            if period.left_out:
                record.msg = f"{record.getMessage()} ({period.left_out} such lines before it were left out)"
                record.args = ()
            period = self._periods[statement] = _Period(now)
        if period.told >= LINE_LIMIT:
            period.left_out += 1
            return False
        period.told += 1
        return True
