"""Every link between the pages leads to a file and a heading, and every module that a page names exists."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
MODULE = re.compile(r"leasehold_(?:worker|coordinator|client|simgpu)(?:[./][A-Za-z_]\w*)+")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
TRACKED = SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for name in TRACKED
    for page in ([ROOT / name] if name.endswith(".md") else (ROOT / name).rglob("*.md"))
)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(module: str) -> bool:
    """Whether a dotted name or a path is a module, a package, or a name that a module defines."""
    package, *parts = re.sub(r"\.py$", "", module).replace("/", ".").split(".")
    place = ROOT / package.removeprefix("leasehold_") / package
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    source = place if place.is_file() else place / "__init__.py"
    return not parts or (len(parts) == 1 and bool(re.search(rf"\b{parts[0]}\b", source.read_text())))


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_a_file_and_a_heading(name: str) -> None:
    page = ROOT / name
    for file, heading in LINK.findall(page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not heading or heading in anchors(target), f"{file}#{heading}"


@pytest.mark.parametrize("name", PAGES)
def test_named_modules_exist(name: str) -> None:
    named = set(MODULE.findall((ROOT / name).read_text()))
    assert not {module for module in named if not exists(module)}


def test_named_helpers_of_tests_exist() -> None:
    named = re.findall(r"`([a-z_/]+\.py)`", (ROOT / "tests/README.md").read_text())
    assert named
    assert not [name for name in named if name != "crash_points.py" and not (ROOT / "tests" / name).is_file()]
