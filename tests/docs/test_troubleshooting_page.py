"""docs/troubleshooting.md has each state that needs a person, with its reasons, and names the tests."""

import re
from pathlib import Path

import pytest

from tests.docs.named_tests import require_named_tests
from tests.docs.test_links import anchors

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^### (.*)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))


@pytest.mark.parametrize("title", SECTIONS)
def test_a_procedure_says_what_to_do_and_names_its_tests(title: str) -> None:
    text = SECTIONS[title].partition("\n## ")[0]
    assert "* **Do:**" in text
    require_named_tests(text.partition("\nTests:")[2])


def test_every_state_that_needs_a_person_has_a_procedure() -> None:
    states = set(re.findall(r"[A-Z]{4,}(?:_[A-Z]+)*", " ".join(SECTIONS)))
    assert {"WEDGED", "UNKNOWN", "HOOK_FAILED", "FAILED", "LOST", "UNCONFIRMED", "UNHEALTHY"} <= states


def test_a_procedure_names_the_reasons_that_link_to_it() -> None:
    table = (DOCS / "errors.md").read_text()
    linked = {
        (reason, anchor)
        for reason, row in re.findall(r"^\| `([A-Z_]+)` (.*)$", table, re.MULTILINE)
        for anchor in re.findall(r"\(troubleshooting\.md#([\w-]+)\)", row)
    }
    named = {
        (reason, re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
        for title, text in SECTIONS.items()
        for line in re.findall(r"^\* \*\*Reasons:\*\* (.*)$", text, re.MULTILINE)
        for reason in re.findall(r"`([A-Z_]+)`", line)
    }
    assert named == linked
    assert {anchor for _, anchor in named} <= anchors(DOCS / "troubleshooting.md")


def test_no_two_procedures_have_one_title() -> None:
    assert len(SECTIONS) == PAGE.count("\n### ")
