"""``leasehold login``, before it reaches a coordinator."""

from pathlib import Path

import pytest
from leasehold_client.cli.verb import warn_of_settings
from leasehold_client.config import config_path
from leasehold_client.contexts import Context, Contexts, locked_contexts

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


@pytest.mark.parametrize("name", ["-", "two words", "x" * 65, "line\nbreak"])
def test_a_context_that_no_verb_could_name_is_refused(
    leasehold: CommandLine, tmp_path: Path, name: str
) -> None:
    done = leasehold("login", "--token", str(tmp_path / "token"), f"--context={name}")
    assert done.code == 2
    assert "is no name of a context: write up to 64 letters" in done.stderr


BOTH = "LEASEHOLD_COORDINATOR and LEASEHOLD_CONTEXT"


@pytest.mark.parametrize(
    ("current", "variables", "chosen", "hiding"),
    [
        ("alice", {}, "", ""),
        ("alice", {"LEASEHOLD_CONTEXT": "alice"}, "", ""),
        ("alice", {"LEASEHOLD_CONTEXT": "alice", "LEASEHOLD_COORDINATOR": "host:1"}, "", ""),
        ("alice", {"LEASEHOLD_CONTEXT": "", "LEASEHOLD_COORDINATOR": ""}, "", ""),
        (
            "alice",
            {"LEASEHOLD_CONTEXT": "alice", "LEASEHOLD_COORDINATOR": "unix:/x"},
            "the coordinator unix:/x",
            "LEASEHOLD_COORDINATOR",
        ),
        ("alice", {"LEASEHOLD_CONTEXT": "bob"}, "the context bob", "LEASEHOLD_CONTEXT"),
        ("alice", {"LEASEHOLD_COORDINATOR": "unix:/x"}, "the coordinator unix:/x", "LEASEHOLD_COORDINATOR"),
        (
            "alice",
            {"LEASEHOLD_CONTEXT": "bob", "LEASEHOLD_COORDINATOR": "unix:/x"},
            "the coordinator unix:/x",
            BOTH,
        ),
        ("alice", {"LEASEHOLD_CONTEXT": "bob", "LEASEHOLD_COORDINATOR": "host:1"}, "the context bob", BOTH),
        ("", {}, "", ""),
        ("", {"LEASEHOLD_CONTEXT": "bob"}, "the context bob", "LEASEHOLD_CONTEXT"),
        ("", {"LEASEHOLD_COORDINATOR": "host:1"}, "", ""),
        (
            "",
            {"LEASEHOLD_CONTEXT": "bob", "LEASEHOLD_COORDINATOR": "host:1"},
            "the context bob",
            "LEASEHOLD_CONTEXT",
        ),
        ("", {"LEASEHOLD_CONTEXT": "bob", "LEASEHOLD_COORDINATOR": "unix:/x"}, "", ""),
    ],
)
def test_variables_that_hide_the_current_context_are_told(
    current: str,
    variables: dict[str, str],
    chosen: str,
    hiding: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("LEASEHOLD_CONTEXT", "LEASEHOLD_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warn_of_settings(current)
    used = "the current context" if current else "no context"
    told = f"leasehold: the environment chooses {chosen}: unset {hiding} to use {used}\n" if hiding else ""
    assert capsys.readouterr().err == told


def test_a_coordinator_of_the_file_that_a_context_hides_is_told(
    bare_leasehold: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_path()
    for content, told in (("coordinator = 'host:1'", "the coordinator host:1 in "), ("x = 1", "")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        warn_of_settings("")
        assert capsys.readouterr().err == ""
        warn_of_settings("alice")
        warning = capsys.readouterr().err
        assert told in warning
        assert bool(told) == bool(warning)


def test_the_verbs_of_contexts_tell_a_variable_that_chooses_another(
    bare_leasehold: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked_contexts() as keep:
        keep(Contexts("alice", {"alice": Context("alice", "user/alice", "host:1")}))
    monkeypatch.setenv("LEASEHOLD_CONTEXT", "bob")
    told = "leasehold: the environment chooses the context bob: unset LEASEHOLD_CONTEXT to use"
    for output in ("table", "json"):
        listed = bare_leasehold("context", "list", "-o", output)
        assert (listed.code, listed.stderr) == (0, f"{told} the current context\n")
    left = bare_leasehold("context", "use", "-")
    assert (left.code, left.stdout, left.stderr) == (0, "no context is current\n", f"{told} no context\n")


def test_the_deletion_of_the_current_context_says_so(bare_leasehold: CommandLine) -> None:
    known = {name: Context(name, f"user/{name}", "host:1") for name in ("alice", "bob")}
    with locked_contexts() as keep:
        keep(Contexts("alice", known))
    assert bare_leasehold("context", "delete", "bob").stdout == "bob: deleted\n"
    assert (
        bare_leasehold("context", "delete", "alice").stdout == "alice: deleted; no context is current now\n"
    )
