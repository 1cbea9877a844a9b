"""A coordinator that can't start says why in one line."""

import logging
import signal
import sys
from pathlib import Path

import click
import pytest
from leasehold.v1.worker_pb2 import HostFacts
from leasehold_coordinator.log_format import LogFormatter
from leasehold_coordinator.server.cli import command
from leasehold_coordinator.server.config import LOG_LEVELS, CoordinatorConfig

from tests.coordinator.conftest import CoordinatorProcess, run_coordinator
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--listen", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "is not HOST:PORT"),
        (["--listen", "[::1:7400"], "is not HOST:PORT"),
        (["--listen", "192.0.2.1:7400"], "can't listen on 192.0.2.1:7400"),
        (["--database", "/proc/no/store.sqlite3"], "can't be used: its directory does not exist"),
        (["--database", "postgres://host/name"], "no installed package serves the scheme of this URL"),
        (["--database", "postgresql://host/name"], "the Python module psycopg"),
        (["--socket", ""], "--socket is empty: give a value, or leave it out"),
        (["--load-interval", "0"], "give 0.05 to 3600 seconds"),
        (["--config", "/no/such/file.toml"], "can't be read: No such file"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], match: str) -> None:
    arguments = ["--database", str(tmp_path / "store.sqlite3"), *options, "--log-level", "error"]
    done = run_coordinator(*arguments)
    assert done.returncode == 2
    assert match in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('lissten = "127.0.0.1:0"\n')
    done = run_coordinator("--config", str(file))
    assert done.returncode == 2
    assert "lissten" in done.stderr


def test_a_port_in_use(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    options = ["--listen", coordinator.address, "--database", str(tmp_path / "other.sqlite3")]
    done = run_coordinator(*options)
    assert done.returncode == 2
    assert "the port is in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("address", "worker_address", "told"),
    [
        ("127.0.0.1:0", "127.0.0.1:0", ["no other host can join"]),
        (
            "127.0.0.1:0",
            "0.0.0.0:0",
            [
                "other hosts need",
                "a worker: `leasehold token create --coordinator unix:{socket} --worker NAME` here,",
            ],
        ),
        (
            "0.0.0.0:0",
            "127.0.0.1:0",
            [
                "other hosts need",
                "a person: `leasehold token create --coordinator unix:{socket} --user NAME` here,",
            ],
        ),
    ],
    ids=["loopback", "workers", "clients"],
)
def test_tokens_are_advised_for_listeners_that_ask_for_certificates(
    tmp_path: Path, address: str, worker_address: str, told: list[str]
) -> None:
    started = CoordinatorProcess(tmp_path, address, worker_address)
    started.options += ["--join-listen", "127.0.0.1:0", "--state-dir", str(tmp_path)]
    started.start()
    try:
        until(lambda: (tmp_path / "store.sqlite3").exists())
        started.process.send_signal(signal.SIGTERM)
        assert started.process.stdout is not None
        lines = started.process.stdout.read().splitlines()
    finally:
        started.end(signal.SIGTERM)
    assert len(lines) == len(told), lines
    told = [match.format(socket=tmp_path / "store.sock") for match in told]
    assert all(match in line for match, line in zip(told, lines, strict=True)), lines


def test_only_clients_of_another_socket_than_the_default_need_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not CoordinatorConfig().socket_option
    assert not CoordinatorConfig(socket="/run/leasehold/coordinator/coordinator.sock").socket_option
    other = CoordinatorConfig(state_dir=str(tmp_path / "a b"))
    assert other.socket_option == f"--coordinator 'unix:{tmp_path}/a b/coordinator.sock'"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert other.socket_option


def _no_home() -> Path:
    raise RuntimeError


def test_the_log_has_nothing_that_a_terminal_obeys() -> None:
    formatter = LogFormatter()
    hostile = "\x1b]0;owned\x07\nroot: all is well\x9b2J\u202e"
    try:
        raise ValueError(hostile)
    except ValueError:
        record = logging.LogRecord("x", logging.INFO, "", 1, "user %s", (hostile,), sys.exc_info())
    lines = formatter.format(record).split("\n")
    assert all(line.isprintable() for line in lines)
    assert "user \\x1b]0;owned\\x07\\nroot: all is well\\x9b2J\\u202e" in lines[0]
    assert lines[1].startswith("Traceback")


@pytest.mark.long
def test_a_hostile_host_name_is_escaped_in_the_log(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    hello = make_hello(boot_id="boot-2", host=HostFacts(hostname="\x1b[2Jhost"))
    coordinator.connect(hello).wait_ended()
    until(lambda: "refused worker" in coordinator.log())
    assert "\x1b" not in coordinator.log()


def test_the_option_takes_the_log_levels_of_the_settings() -> None:
    (choice,) = (option.type for option in command.params if option.name == "log_level")
    assert isinstance(choice, click.Choice)
    assert tuple(choice.choices) == LOG_LEVELS
