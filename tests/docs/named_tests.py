"""The tests that pages of the docs name, such as ``worker/test_x.py::test_y``."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def require_named_tests(text: str) -> None:
    """Fails unless the text names a test, and each test that it names exists."""
    named = re.findall(r"`([a-z_/0-9]+\.py)(?:::(test_\w+))?`", text)
    assert named, text
    for file, function in named:
        source = (TESTS / file).read_text()
        assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE) or not function, (
            file,
            function,
        )
