"""Each verb has examples in its help, and each example is a line that the command line takes."""

import shlex
from collections.abc import Iterator

import click
import pytest
from leasehold_client import main, plugins


def verbs(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The verbs below a command, with their words."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from verbs(found, (*path, name))


VERBS = {
    " ".join(path): command
    for name in main.VERBS
    for path, command in verbs(main.leasehold.get_command(click.Context(main.leasehold), name), (name,))  # type: ignore[arg-type]  # each name of VERBS is a command
}


def lines(command: click.Command) -> list[str]:
    """The examples of a verb."""
    return [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_that_parse(verb: str) -> None:
    command = VERBS[verb]
    assert lines(command), "add epilog=examples(…)"
    for line in lines(command):
        shown = line.partition('eval "$(')[2].partition(')"')[0] or line
        words = shlex.split(shown.partition(" > ")[0].rpartition(" | ")[2], comments=True)
        if "$(leasehold" in line:
            words = words[:3]
        assert words[: len(verb.split()) + 1] == ["leasehold", *verb.split()], line
        if "job.toml" in words:
            continue  # a job file is read while the options are parsed
        command.make_context(verb, words[len(verb.split()) + 1 :])


def test_the_id_of_a_hold_is_that_of_its_command() -> None:
    words = [shlex.split(line) for command in VERBS.values() for line in lines(command) if "--hold " in line]
    assert words
    assert all(line[line.index("--hold") + 1].startswith("c-") for line in words)


@pytest.mark.parametrize("name", plugins.PLUGINS)
def test_the_verbs_of_other_packages_have_examples(name: str) -> None:
    command = main.leasehold.get_command(click.Context(main.leasehold), name)
    assert command is not None
    assert any(line.startswith(f"leasehold {name}") for line in lines(command))


def test_the_sections_of_the_help_have_each_verb_once() -> None:
    listed = [name for names in main.SECTIONS.values() for name in names.split()]
    assert sorted(listed) == sorted([*main.VERBS, *plugins.PLUGINS])


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("workers", "get workers"),
        ("wl", "get workloads"),
        ("gpu-s", "get gpus"),
        ("wrokers", "get workers"),
        ("evnts", "events"),
        ("drian", "cordon"),
        ("stpo", "stop"),
        ("suspnd", "suspend"),
        ("kill", "stop"),
        ("ls", "get workloads"),
        ("resume", "restore"),
        ("help", "--help"),
        ("Workloads", "get workloads"),
    ],
)
def test_a_mistyped_verb_suggests_another(word: str, suggestion: str) -> None:
    with pytest.raises(
        click.UsageError, match=f"No such command '{word}': did you mean `leasehold {suggestion}`"
    ):
        main.leasehold.make_context("leasehold", [word]).command.invoke(
            main.leasehold.make_context("leasehold", [word])
        )


@pytest.mark.parametrize("word", ["sup", "foo", "quota", "apple", "rename"])
def test_a_word_that_is_like_none_suggests_nothing(word: str) -> None:
    with pytest.raises(click.UsageError, match=f"No such command '{word}'$"):
        main.leasehold.make_context("leasehold", [word]).command.invoke(
            main.leasehold.make_context("leasehold", [word])
        )


def test_suggestions_are_subcommands() -> None:
    for meant in main.MEANT.values():
        assert meant.split()[0] in {*main.VERBS, "--help"}
