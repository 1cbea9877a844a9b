"""The folders of the tests mirror the sub-packages of the client."""

from pathlib import Path

import leasehold_client

SOURCES = Path(leasehold_client.__file__).parent
TESTS = Path(__file__).resolve().parents[1]


def test_each_test_file_of_a_sub_package_names_a_module() -> None:
    folders = [TESTS, *(TESTS / path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists())]
    strays = [
        str(test.relative_to(TESTS))
        for folder in folders
        for test in folder.glob("test_*.py")
        if not (SOURCES / folder.relative_to(TESTS) / f"{test.stem.removeprefix('test_')}.py").exists()
    ]
    assert not strays, "move them to stories, or name them by their module"
