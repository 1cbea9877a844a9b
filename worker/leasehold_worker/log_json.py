"""Log lines as JSON: one object per line, with the fields that ``docs/logs.md`` lists."""

import logging
from datetime import UTC, datetime
from typing import Final

import structlog
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict

FIELDS: Final = ("verb", "outcome", "duration_s", "reason", "phase")
"""Fields that a logging statement may add by ``extra``."""


def json_formatter() -> logging.Formatter:
    """The formatter. Characters outside of ASCII are escaped, so no text of others forges a line."""
    return ProcessorFormatter(
        foreign_pre_chain=[_add_time, add_log_level, add_logger_name, ExtraAdder(FIELDS), _add_context],
        processors=[
            ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(),
        ],
    )


def _add_time(_logger: object, _method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    created = datetime.fromtimestamp(record.created, UTC)
    return {"time": created.isoformat(timespec="microseconds"), **event}


def _add_context(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Adds the names of the log context, which no field may replace."""
    return {**event, **getattr(event["_record"], "names", {})}
