"""docs/errors.md tells of every reason, and of no other."""

import re
from pathlib import Path

from leasehold.v1.errors_pb2 import ErrorReason

PAGE = Path(__file__).resolve().parents[2] / "docs/errors.md"


def test_the_page_has_every_reason_in_the_order_of_the_enum() -> None:
    listed = re.findall(r"^\| `([A-Z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == [name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()[1:]]
