"""docs/errors.md tells of every reason, and of no other, with its gRPC code."""

import ast
import re
from collections.abc import Iterator
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


OPEN_FACTS = {"concluded_by", "control_group", "cuda_result_number"}
"""Facts that are not written as literals beside their refusal."""


def facts_of(tree: ast.AST) -> Iterator[object]:
    """Names of facts in metadata: keywords of FleetError, and keys of dictionaries for OperationError."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("FleetError"), keywords=keywords):
                yield from (one.arg for one in keywords if one.arg not in (None, "retry_after_s"))
            case ast.Call(func=ast.Name("OperationError")) | ast.Assign(targets=[ast.Name("metadata")]):
                keys = [key for one in ast.walk(node) if isinstance(one, ast.Dict) for key in one.keys]
                yield from (key.value for key in keys if isinstance(key, ast.Constant))


def test_the_page_has_the_facts_of_the_metadata() -> None:
    sources = [one for room in ("coordinator", "worker") for one in PAGE.parents[1].glob(f"{room}/**/*.py")]
    known = {fact for source in sources for fact in facts_of(ast.parse(source.read_text()))}
    table = PAGE.read_text().partition("|---|---|\n")[2].partition("\n\n")[0]
    listed = {fact for row in table.splitlines() for fact in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == known | OPEN_FACTS


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
