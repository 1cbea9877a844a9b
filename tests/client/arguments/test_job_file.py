"""Job files: what they may say, and what is refused."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from leasehold_client.arguments.job_file import read_job_file
from leasehold_client.config import FILE_LIMIT_BYTES
from leasehold_client.errors import UsageError

TOML = """
name = "job"
gpus = 2
cpu = 1.5
command = ["python", "train.py"]

[env]
WORD = "a=b"

[[hooks]]
name = "note"
signal = {signal_number = 10}
"""
GIVEN = {
    "name": "job",
    "gpus": 2,
    "cpu": 1.5,
    "command": ["python", "train.py"],
    "env": {"WORD": "a=b"},
    "hooks": [{"name": "note", "signal": {"signal_number": 10}}],
}
JSON = (
    '{"name": "job", "gpus": 2, "cpu": 1.5, "command": ["python", "train.py"], "env": {"WORD": "a=b"},'
    ' "hooks": [{"name": "note", "signal": {"signal_number": 10}}]}'
)
YAML = """
name: job
gpus: 2
cpu: 1.5
command: [python, train.py]
env: {WORD: a=b}
hooks:
- name: note
  signal: {signal_number: 10}
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(("suffix", "text"), [("toml", TOML), ("job", TOML), ("json", JSON), ("yaml", YAML)])
def test_the_given_keys_are_returned(tmp_path: Path, suffix: str, text: str, encoding: str) -> None:
    file = tmp_path / f"job.{suffix}"
    file.write_text(text, encoding=encoding)
    assert read_job_file(str(file)) == GIVEN


def test_standard_input_is_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TOML.encode())))
    assert read_job_file("-") == GIVEN
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"#" * (FILE_LIMIT_BYTES + 1))))
    with pytest.raises(UsageError, match="on standard input exceeds the limit"):
        read_job_file("-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpsu = 1", r"job.toml: unknown key 'gpsu' \(did you mean 'gpus'\?\): the keys are command, name, "),
        ("zzz = 1", "unknown key 'zzz': the keys are"),
        ('gpus = "two"', "job.toml: gpus: expected a whole number, got text"),
        ("command = 'sleep 5'", "command: expected a list, got text"),
        ("command = [1]", r"command\[0\]: expected text, got a whole number"),
        ("env = {A = 1}", "job.toml: env.A: expected text, got a whole number: put it into quotes"),
        ("labels = {B = 'b', A = [1]}", "labels.A: expected text, got a list: put it into quotes"),
        ("annotations = {A = 1979-05-27}", "annotations.A: expected text, got another value"),
        ("name = 'a'\nname = 'b'", "job.toml is malformed: "),
        ('env = {"A=B" = "1"}', "env: invalid name 'A=B': leave out '='"),
        ('labels = {"=" = "1"}', "labels: invalid name '='"),
        ("cpu = true", "cpu: expected .*, got true or false"),
        ("allow_foreign = 1", "allow_foreign: expected true or false"),
        ("gpus = [", "job.toml is malformed: "),
        ("gpus = " + "9" * 5000, "is malformed: a number has too many digits$"),
        ("command = " + "[" * 5000, "is malformed: its tables or lists are nested too deeply$"),
        ("a = '\x00'", "is malformed: "),
        ("\udcff", "is malformed: it is not text in UTF-8$"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=message):
        read_job_file(str(file))


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (
            "json",
            '{"name": "a", "env": {"A": "1", "A": "2"}}',
            "malformed: the key 'A' occurs twice in one table",
        ),
        ("json", '{"cpu": NaN}', "malformed: NaN is not JSON: write a number"),
        ("json", '{"env": {"A": null}}', "env.A: expected text, got another value"),
        ("yaml", "name: a\nenv:\n  A: 1\n", "job.yaml: env.A: expected text, got a whole number"),
        (
            "yaml",
            "name: a\ngpus: 1\nname: b\n",
            "malformed: line 3: the key 'name' occurs twice in one table",
        ),
        (
            "yaml",
            "env:\n  A: x\n  yes: x\n",
            "malformed: line 3: the key yes is not text: put it into quotes",
        ),
        ("yaml", "1: x\n", "malformed: line 1: the key 1 is not text: put it into quotes"),
        ("yaml", "? [a]\n: x\n", "malformed: line 1: the key of a list or table is not text"),
        ("yaml", "hooks:\n- {name: a, name: b}\n", "malformed: line 2: the key 'name' occurs twice"),
        ("yaml", "hooks: &a [*a]\n", r"hooks\[0\]: expected a table, got a list"),
        ("yaml", "a: b: c", "malformed: line 1, column 5: mapping values are not allowed"),
        (
            "yaml",
            "a: 'b",
            "malformed: line 1, column 6: while scanning a quoted scalar: found",
        ),
        ("yaml", "\x80", "malformed: "),
    ],
)
def test_keys_are_texts_and_occur_once(tmp_path: Path, suffix: str, text: str, message: str) -> None:
    file = tmp_path / f"job.{suffix}"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_job_file(str(file))


def test_a_table_of_yaml_takes_the_entries_of_another(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("labels: &both {a: x}\nannotations:\n  <<: *both\n  b: y\n")
    assert read_job_file(str(file)) == {"labels": {"a": "x"}, "annotations": {"a": "x", "b": "y"}}


def test_aliases_of_yaml_are_checked_once(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    levels = [f"- &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 30)]
    file.write_text("\n".join(["hooks:", "- &l0 [x]", *levels]))
    with pytest.raises(UsageError, match=r"hooks\[0\]: expected a table, got a list"):
        read_job_file(str(file))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("none", "No such file"),
        (".", "Is a directory|not a regular"),
        ("pipe", "not a regular"),
    ):
        with pytest.raises(UsageError, match=why):
            read_job_file(str(tmp_path / name))


def test_yaml_bombs_and_depth_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="is malformed"):
        read_job_file(str(file))
