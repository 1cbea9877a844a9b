"""docs/errors.md tells of every reason, and of no other, with its gRPC code."""

import re
from pathlib import Path

import pytest
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold_client.errors import LeaseholdError
from leasehold_client.remedies import REMEDIES
from leasehold_coordinator.api.status_codes import status_code
from leasehold_coordinator.errors import RETRY_AFTER_S
from leasehold_worker.local_api import service

PAGE = Path(__file__).resolve().parents[2] / "docs/errors.md"
REASONS = [name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()[1:]]


def number(reason: str) -> ErrorReason.ValueType:
    return ErrorReason.Value(f"ERROR_REASON_{reason}")


def rows() -> list[tuple[str, list[str], str]]:
    """Code, reasons and explanation of each row of the table of codes."""
    table = PAGE.read_text().partition("## gRPC codes")[2]
    found = re.findall(r"^\| ([A-Z_]+) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    return [(code, re.findall(r"`([A-Z_]+)`", reasons), why) for code, reasons, why in found]


def test_the_page_has_every_reason_in_the_order_of_the_enum() -> None:
    listed = re.findall(r"^\| `([A-Z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == REASONS


def plain(remedy: str) -> str:
    """A remedy of the page without links: a page's name becomes its path, and procedures are left out."""
    remedy = re.sub(r" ?\[Procedure[^]]*\]\(.*?\)\.", "", remedy)
    remedy = re.sub(r"\[(\w+\.md)\]\(.*?\)", r"docs/\1", remedy)
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", remedy).removeprefix("\N{EN DASH}")


def test_errors_of_the_client_have_the_remedies_of_the_page() -> None:
    listed = re.findall(r"^\| `([A-Z_]+)` \| .*? \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert {reason: plain(remedy) for reason, remedy in listed} == REMEDIES
    assert LeaseholdError("no GPU is free", "NO_FREE_GPU").remedy == REMEDIES["NO_FREE_GPU"]
    assert [LeaseholdError("a message", reason).remedy for reason in ("", "OF_A_LATER_VERSION")] == ["", ""]


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_has_the_code_of_the_page(reason: str) -> None:
    codes = [code for code, reasons, _ in rows() if reason in reasons] or ["FAILED_PRECONDITION"]
    assert codes == [status_code(number(reason)).name]
    local = service._CODES.get(number(reason))
    assert local is None or [local.name] == codes


def test_the_page_says_which_refusals_pass_by_themselves() -> None:
    assert rows()[-1][:2] == ("FAILED_PRECONDITION", [])
    told = {reason for _, reasons, why in rows() for reason in reasons if "RetryInfo says" in why}
    assert {number(reason) for reason in told} == set(RETRY_AFTER_S)


def test_a_code_is_unavailable_if_the_unchanged_call_may_soon_succeed() -> None:
    for reason in REASONS:
        if status_code(number(reason)).name == "UNAVAILABLE":
            assert number(reason) in RETRY_AFTER_S, reason
