"""Context of log lines: the session, the command and the workload of the task that logs."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, final

_names: Final[ContextVar[Mapping[str, str]]] = ContextVar("log_context", default={})  # noqa: B039 - never changed


@contextmanager
def log_context(**names: str) -> Iterator[None]:
    """Adds names to the log lines of this task, and of tasks and threads started within the context."""
    token = _names.set({**_names.get(), **names})
    try:
        yield
    finally:
        _names.reset(token)


@final
class ContextFilter(logging.Filter):
    """Sets ``names`` of each record, and ``context`` to ``[name=value …] `` or to an empty string."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        names = {name: value for name, value in _names.get().items() if value}
        text = " ".join(f"{name}={value}" for name, value in names.items())
        record.__dict__ |= {"names": names, "context": f"[{text}] " if text else ""}
        return True
