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


def test_every_setting_can_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(
        """
        coordinator = "10.0.0.5:7400"
        state_dir = "/var/lib/leasehold/worker"
        name = "alpha"
        log_level = "debug"
        driver_call_floor_s = 12.5
        proof_timeout_s = 3
        host_memory_reserve_bytes = 0
        [labels]
        rack = "r12"
        """
    )
    config = load_config(file)
    assert config.state_dir == Path("/var/lib/leasehold/worker")
    assert (config.driver_call_floor_s, config.proof_timeout_s) == (12.5, 3.0)
    assert (config.host_memory_reserve_bytes, config.labels) == (0, {"rack": "r12"})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("state_dir = 5", "not a path"),
        ("driver_call_floor_s = 0", "greater than 0"),
        ("proof_timeout_s = -1", "greater than 0"),
        ("proof_timeout_s = inf", "greater than 0"),
        ("host_memory_reserve_bytes = -1", "0 or more"),
    ],
)
def test_a_setting_out_of_range_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(StartError, match=match):
        load_config(file)
