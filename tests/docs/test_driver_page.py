"""docs/driver.md tells of every hazard, and the tests that it names are there."""

import re
from pathlib import Path

from tests.docs.named_tests import require_named_tests

ROOT = Path(__file__).resolve().parents[2]
HAZARDS = 31
"""How many hazards the page has."""


def hazards() -> dict[int, str]:
    """The text of each hazard by its number."""
    page = (ROOT / "docs/driver.md").read_text()
    section = page.partition("## Hazards, and what the worker does")[2].partition("\n## ")[0]
    parts = re.split(r"^(\d+)\. ", section, flags=re.MULTILINE)[1:]
    return {int(number): text for number, text in zip(parts[::2], parts[1::2], strict=True)}


def test_every_hazard_has_its_number() -> None:
    assert list(hazards()) == list(range(1, HAZARDS + 1))


def test_every_hazard_names_tests_that_exist() -> None:
    for text in hazards().values():
        require_named_tests(text)
