"""docs/logs.md lists the fields of log lines and the spans of traces."""

import re
from pathlib import Path
from typing import Final

import leasehold_client.tracing
import leasehold_coordinator.log_json
import leasehold_coordinator.tracing
import leasehold_worker.log_json
from leasehold_coordinator.log_bounds import LINE_LIMIT
from leasehold_coordinator.log_format import LINE_LIMIT_CHARACTERS

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs/logs.md").read_text()
CONTEXT: Final = {"command", "workload", "session", "epoch", "worker", "trace"}


def test_the_page_lists_every_field() -> None:
    table = PAGE.partition("| Field | Value |")[2].partition("\n\n")[0]
    fields = {*leasehold_worker.log_json.FIELDS, *leasehold_coordinator.log_json.FIELDS}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == fields | CONTEXT


def test_the_page_has_the_bounds_of_lines_and_exports() -> None:
    assert f"at most {LINE_LIMIT_CHARACTERS:,} characters" in PAGE
    assert f"{LINE_LIMIT:,}\nlines per minute" in PAGE
    assert leasehold_coordinator.tracing.ENDPOINTS == leasehold_client.tracing.ENDPOINTS
    for name in leasehold_client.tracing.ENDPOINTS:
        assert name in PAGE
    assert f"waits {leasehold_client.tracing.EXPORT_TIMEOUT_S} s at most" in PAGE
    assert f"of a daemon {leasehold_coordinator.tracing.EXPORT_TIMEOUT_S} s" in PAGE
