"""``leasehold login``, before it reaches a coordinator."""

from pathlib import Path

import pytest

from tests.client.conftest import CommandLine
from tests.settings_files import make_unreadable


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_join_token_in_no_regular_file_is_refused_at_once(
    leasehold: CommandLine, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "token"
    make_unreadable(file, kind)
    done = leasehold("login", "--token", str(file))
    assert done.code == 2
    assert f"{file} is not a regular file: write the join token into one, or use `--token -`" in done.stderr
