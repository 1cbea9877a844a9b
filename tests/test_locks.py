"""The locks of the extras: complete, hashed, and with the pins that the tests run with."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
WANTED = {
    **{
        name: PROJECT["project"]["dependencies"] + extra
        for name, extra in EXTRAS.items()
        if name != "dev" and extra
    },
    "build": PROJECT["build-system"]["requires"],
}
"""What each lock is for."""


def pins(path: Path) -> dict[str, set[str]]:
    """The hashes of each pin of a lock. Markers differ: a lock has those of its own extra."""
    entries = re.split(r"\n(?=\S)", path.read_text().strip())
    found: dict[str, set[str]] = {}
    for entry in entries:
        pin, *hashes = re.split(r"\s*\\?\s*--hash=", entry)
        assert hashes, f"{pin} has no hash"
        assert "==" in pin, f"{pin} is no pin"
        found[pin.partition(";")[0].strip()] = {line.strip() for line in hashes}
    return found


def closure(wanted: list[str]) -> set[str]:
    """The distributions that requirements need here, with those that these need."""
    found: set[str] = set()
    left = [Requirement(text) for text in wanted]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in found:
            found.add(name)
            left += [Requirement(text) for text in requires(name) or []]
    return found


@pytest.mark.parametrize("name", WANTED)
def test_a_lock_has_the_pins_of_the_tests(name: str) -> None:
    tested = pins(ROOT / "requirements.txt")
    for pin, hashes in pins(ROOT / f"requirements/{name}.txt").items():
        assert pin in tested, "run make lock"
        assert hashes == tested[pin], pin


@pytest.mark.parametrize("name", WANTED)
def test_a_lock_is_complete(name: str) -> None:
    locked = {canonicalize_name(pin.partition("==")[0]) for pin in pins(ROOT / f"requirements/{name}.txt")}
    assert closure(WANTED[name]) <= locked


def test_the_lock_of_the_bill_of_materials_is_complete() -> None:
    (wanted,) = PROJECT["dependency-groups"]["sbom"]
    locked = {canonicalize_name(pin.partition("==")[0]) for pin in pins(ROOT / "requirements/sbom.txt")}
    assert canonicalize_name(Requirement(wanted).name) in locked


def test_each_lock_has_a_purpose_and_is_made_by_make_lock() -> None:
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == {*WANTED, "sbom"}
    extras = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras is not None
    assert {*extras[1].split(), "build"} == set(WANTED)


def test_the_page_of_dependencies_has_each_distribution_of_each_extra() -> None:
    page = (ROOT / "docs/dependencies.md").read_text()
    columns = r"(?: (yes)? ?\|)" * 5
    rows = re.findall(rf"^\| ([\w-]+) \| [\d.]+ \|{columns}", page, re.MULTILINE)
    for place, extra in enumerate(("worker", "coordinator", "client", "web", "tracing"), 1):
        told = {canonicalize_name(row[0]) for row in rows if row[place]}
        lock = (ROOT / f"requirements/{extra}.txt").read_text()
        here = re.findall(r"^([\w.-]+)==\S+(?: ; (.*?))? *\\$", lock, re.MULTILINE)
        needed = {canonicalize_name(name) for name, marker in here if not marker or Marker(marker).evaluate()}
        assert told == needed
