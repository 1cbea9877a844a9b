"""C files of simgpu call only files of their own layer and of lower layers, and never in a circle."""

from __future__ import annotations

import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from leasehold_simgpu.libraries import LAYERS, SOURCES


def symbols(tmp_path: Path, source: Path) -> tuple[set[str], set[str]]:
    """The global symbols that a C file defines, and those that it needs from elsewhere."""
    compiled = tmp_path / f"{source.stem}.o"
    flags = ("-std=gnu11", "-D_GNU_SOURCE", "-fPIC", "-pthread", "-I", str(SOURCES))
    subprocess.run(["cc", *flags, "-c", "-o", str(compiled), str(source)], check=True)
    listed = subprocess.run(["nm", str(compiled)], capture_output=True, text=True, check=True).stdout
    kinds = re.findall(r"([A-Z]) (\w+)$", listed, re.MULTILINE)
    return {name for kind, name in kinds if kind != "U"}, {name for kind, name in kinds if kind == "U"}


@pytest.mark.long
@pytest.mark.parametrize("library", LAYERS)
def test_no_call_points_up_and_none_goes_round(tmp_path: Path, library: str) -> None:
    layers = LAYERS[library]
    files = {
        str(source.relative_to(SOURCES)): symbols(tmp_path, source)
        for layer in layers
        for source in (SOURCES / layer).glob("*.c")
    }
    definer = {name: file for file, (defined, _) in files.items() for name in defined}
    called = {
        file: {definer[name] for name in needed & definer.keys()} for file, (_, needed) in files.items()
    }

    upward = [
        f"{caller} calls {callee}"
        for caller, callees in called.items()
        for callee in callees
        if layers.index(caller.split("/")[0]) < layers.index(callee.split("/")[0])
    ]
    assert upward == []
    TopologicalSorter(called).prepare()  # raises CycleError, which names the files of a circle


@pytest.mark.parametrize("library", LAYERS)
def test_no_include_points_up(library: str) -> None:
    layers = ("api", *LAYERS[library])
    upward = [
        f"{layer}/{source.name} includes {included}"
        for layer in layers
        for source in (SOURCES / layer).glob("*.[ch]")
        for included in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE)
        if included.split("/")[0] not in layers[: layers.index(layer) + 1]
    ]
    assert upward == []
