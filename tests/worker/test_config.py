"""Where settings come from, and what is said of wrong ones."""

from pathlib import Path

import pytest
from leasehold_worker.config import load_config
from leasehold_worker.errors import StartError


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('coordinator = "a:1"\nname = "from-file"\n[labels]\nrack = "7"\n')
    config = load_config(file, coordinator="b:2", name=None)
    assert (config.coordinator, config.name, config.labels) == ("b:2", "from-file", {"rack": "7"})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("coordinator = 5", "Expected `str`, got `int`"),
        ('coordinater = "a:1"', "coordinater"),
        ("= nonsense", "not valid"),
        ('coordinator = "nowhere"', "HOST:PORT"),
        ('coordinator = "host:99999"', "HOST:PORT"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(StartError, match=match):
        load_config(file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't be read: No such file"):
        load_config(tmp_path / "none.toml")
