"""Times and numbers of options."""

import click
import pytest
from leasehold_client.cli.parameter_types import Number, Seconds

from tests.client.conftest import CommandLine


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30.0), ("0.5", 0.5), ("90s", 90.0), ("2m", 120.0), ("1h", 3600.0), ("7d", 604_800.0)],
)
def test_a_time_may_have_a_unit(text: str, seconds: float) -> None:
    assert Seconds(0, 604_800).convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x", "'x' is not a time: write seconds, such as 30, or 90s, 2m, 1h or 7d"),
        ("", "is not a time"),
        ("m", "is not a time"),
        ("nan", "is not a time"),
        ("8d", "8d is not in the range from 1m to 7d"),
        ("inf", "is not in the range"),
        ("-1", "is not in the range"),
    ],
)
def test_a_wrong_time_is_refused_in_words(text: str, match: str) -> None:
    with pytest.raises(click.BadParameter, match=match):
        Seconds(60, 604_800).convert(text, None, None)


@pytest.mark.parametrize("text", ["1.5", "x", "", "0", "11", "9" * 5000])
def test_a_wrong_number_is_refused_in_words(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a whole number|is not in the range from 1 to 10"):
        Number(1, 10).convert(text, None, None)


def test_no_option_shows_a_range_in_symbols() -> None:
    from leasehold_client import main

    for name in ("run", "suspend", "exec", "wait", "token"):
        command = main.leasehold.get_command(click.Context(main.leasehold), name)
        assert command is not None
        text = command.get_help(click.Context(command))
        assert "<=" not in text
        assert ">=" not in text
        assert " INTEGER" not in text


@pytest.mark.parametrize(
    "line",
    [
        ["run", "--name", "", "--", "true"],
        ["exec", "--name", "", "--", "true"],
        ["adopt", "--worker", "alpha", "--pid", "1", "--name", ""],
        ["login", "--token", "-", "--name", ""],
        ["login", "--token", "-", "--context", ""],
        ["get", "workloads", "--columns", ""],
        ["get", "workloads", "-l", ""],
        ["get", "workloads", "--filter", ""],
        ["get", "workloads", "--sort-by", ""],
        ["get", "events", ""],
        ["events", "--worker", ""],
        ["events", ""],
        ["stop", "one", ""],
        ["run", "--worker", "", "--", "true"],
        ["run", "-f", "", "--", "true"],
        ["run", "--preempt", "", "--", "true"],
        ["cordon", "alpha/0", "--reason", ""],
        ["events", "--filter", ""],
        ["suspend", "-l", ""],
        ["suspend", "--filter", ""],
        ["cordon", "--reason", "x", "-l", ""],
        ["whoami", "--context", ""],
        ["local", "release", ""],
        ["local", "leases", "--socket", ""],
        ["exec", "--socket", "", "--", "true"],
        ["top", "--coordinator", ""],
        ["top", "--as", ""],
        ["web", "--as", ""],
        ["support-bundle", "--coordinator", "", "--dry-run", "bundle.tar.gz"],
        ["support-bundle", ""],
        ["context", "export", "prometheus", ""],
    ],
    ids=" ".join,
)
def test_a_value_that_is_empty_is_refused(bare_leasehold: CommandLine, line: list[str]) -> None:
    """As "$NAME" is without the variable: a search for nothing would find all."""
    done = bare_leasehold(*line)
    assert (done.code, done.stdout) == (125 if line[0] == "exec" else 2, "")
    assert "the value is empty: give one" in done.stderr


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (["cordon", "alpha/0", "--reason", ""], "give one"),
        (["local", "release", ""], "give one"),
        (["login", "--token", ""], "give one"),
        (["login", "--token", "-", "--name", ""], "give one, or leave it out"),
        (["events", "--filter", ""], "give one, or leave it out"),
    ],
    ids=" ".join,
)
def test_only_an_optional_value_may_be_left_out(
    bare_leasehold: CommandLine, line: list[str], remedy: str
) -> None:
    assert bare_leasehold(*line).stderr.partition("the value is empty: ")[2].startswith(f"{remedy}: see ")


@pytest.mark.parametrize(
    "line",
    [
        ["exec", "--gpus", "many", "--", "true"],
        ["exec", "--evict", "bogus", "--", "true"],
        ["exec", "--yield-grace", "5", "--", "true"],
        ["exec", "--hooks", "/no/such/file", "--", "true"],
        ["exec"],
        ["run", "--attach", "--evict", "bogus", "--", "true"],
        ["run", "--gpus", "many", "--attach", "--", "true"],
        ["run", "--attach"],
        ["run", "--attach", "-f", "/no/such/job.toml", "--", "true"],
        ["run", "--attach", "--nmae", "one", "--", "true"],
    ],
    ids=" ".join,
)
def test_a_usage_error_has_no_code_of_a_program(bare_leasehold: CommandLine, line: list[str]) -> None:
    assert bare_leasehold(*line).code == 125
    assert bare_leasehold(*[one for one in line if one != "--attach"]).code == (
        125 if line[0] == "exec" else 2
    )


def test_an_option_of_the_program_is_none_of_run(bare_leasehold: CommandLine) -> None:
    assert bare_leasehold("run", "--gpus", "many", "--", "prog", "--attach").code == 2


@pytest.mark.parametrize(
    "line",
    [
        ["stop", "-l", "team=vision", "--selector", "tier=dev", "--yes"],
        ["stop", "--filter", "a", "--filter", "b"],
        ["get", "workloads", "-l", "a=b", "-l", "c=d"],
        ["suspend", "--worker", "alpha", "--worker", "beta"],
        ["cordon", "--reason", "x", "-l", "a=b", "-l", "c=d"],
        ["events", "--worker", "alpha", "--worker", "beta"],
        ["restore", "one", "--to", "alpha/0", "--to", "alpha/1"],
        ["remap", "one", "--to", "alpha/0", "--to", "alpha/1"],
        ["run", "--worker", "alpha", "--worker", "beta", "--", "true"],
        ["run", "--preempt", "one", "--preempt", "two", "--", "true"],
        ["adopt", "--worker", "alpha", "--worker", "beta", "--pid", "1"],
        ["wait", "one", "--for", "ended", "--for=state=SUSPENDED"],
        ["release", "--hold", "c-1", "--hold", "c-2"],
        ["token", "create", "--user", "ann", "--user", "bob"],
    ],
    ids=" ".join,
)
def test_an_option_that_selects_objects_is_given_once(bare_leasehold: CommandLine, line: list[str]) -> None:
    """The last one counted alone: `stop -l team=vision -l tier=dev` stopped tier=dev of every team."""
    done = bare_leasehold(*line)
    assert (done.code, done.stdout) == (2, "")
    assert "is given more than once: give it once" in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["exec", "--name", "caf\udce9", "--", "true"], 125),
        (["run", "--gpu-name", "caf\udce9", "--", "true"], 2),
    ],
)
def test_an_argument_that_is_no_text_is_refused(
    bare_leasehold: CommandLine, line: list[str], code: int
) -> None:
    done = bare_leasehold(*line)
    assert (done.code, done.stdout) == (code, "")
    assert "is not valid UTF-8: write text" in done.stderr
