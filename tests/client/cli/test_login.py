"""``leasehold login``, before it reaches a coordinator."""

from pathlib import Path

import pytest
from leasehold_client.cli.verb import warn_of_variables

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


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, ""),
        ({"LEASEHOLD_CONTEXT": "alice"}, ""),
        ({"LEASEHOLD_CONTEXT": "", "LEASEHOLD_COORDINATOR": ""}, ""),
        (
            {"LEASEHOLD_CONTEXT": "alice", "LEASEHOLD_COORDINATOR": "unix:/x"},
            "LEASEHOLD_COORDINATOR is set, so verbs use no",
        ),
        ({"LEASEHOLD_CONTEXT": "bob"}, "LEASEHOLD_CONTEXT names another context"),
        (
            {"LEASEHOLD_COORDINATOR": "unix:/x"},
            "LEASEHOLD_COORDINATOR is set, so verbs use no",
        ),
    ],
)
def test_a_variable_that_hides_the_current_context_is_told(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LEASEHOLD_CONTEXT", "LEASEHOLD_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warn_of_variables("alice")
    error = capsys.readouterr().err
    assert told in error
    assert bool(told) == bool(error)
