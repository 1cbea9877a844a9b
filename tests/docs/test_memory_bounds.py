"""The bounds that docs/performance.md gives for the memory of both sides are those of the code."""

import pkgutil
import re
from importlib import import_module
from pathlib import Path

import leasehold_coordinator
import leasehold_worker
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
ROOMS = {"coordinator": leasehold_coordinator, "worker": leasehold_worker}
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}
ROW = re.compile(r"^\| .+ \| ([\d,]+) ?(|KiB|MiB) \| `([\w.]+)\.(\w+)` \|$", re.MULTILINE)


def rows(room: str) -> list[tuple[int, str, str]]:
    """The bounds of a room as the page has them: number, module and constant."""
    section = PAGE.read_text().split(f"### What the {room} keeps\n", 1)[1].split("\n#", 1)[0]
    found = [
        (int(n.replace(",", "")) * UNITS[unit], module, name)
        for n, unit, module, name in ROW.findall(section)
    ]
    assert len(found) == section.count("\n| ") - 1, "a row has another form"
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_the_bounds_of_a_room_are_its_constants(room: str) -> None:
    package = ROOMS[room]
    modules = [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for number, module, name in rows(room):
        (path,) = (one for one in modules if one.endswith(f".{module}"))
        assert (name, getattr(import_module(path), name)) == (name, number)
