"""docs/architecture.md has a row for each sub-package of import-linter's layers, from the top down."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()


def rows(heading: str) -> list[str]:
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_the_tables_are_the_layers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        (package,) = contract["containers"]
        room = package.removeprefix("leasehold_")
        layers = [re.split(r" [|:] ", layer) for layer in contract["layers"]]
        depth = {name: number for number, names in enumerate(layers) for name in names}
        listed = rows(room.capitalize())
        assert {*listed} == {name for name in depth if (ROOT / room / package / name).is_dir()}
        assert listed == sorted(listed, key=depth.__getitem__)
