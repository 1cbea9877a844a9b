"""docs/troubleshooting.md has each state that needs a person, and names the tests of each procedure."""

import re
from pathlib import Path

import pytest

from tests.docs.named_tests import require_named_tests

PAGE = (Path(__file__).resolve().parents[2] / "docs/troubleshooting.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^### (.*)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))


@pytest.mark.parametrize("title", SECTIONS)
def test_a_procedure_says_what_to_do_and_names_its_tests(title: str) -> None:
    text = SECTIONS[title].partition("\n## ")[0]
    assert "* **Do:**" in text
    require_named_tests(text.partition("\nTests:")[2])


def test_every_state_that_needs_a_person_has_a_procedure() -> None:
    states = set(re.findall(r"[A-Z]{4,}(?:_[A-Z]+)*", " ".join(SECTIONS)))
    assert {"WEDGED", "UNKNOWN", "HOOK_FAILED", "FAILED", "LOST", "UNCONFIRMED", "UNHEALTHY"} <= states
