"""Completion in real shells: bash and zsh on a terminal, and fish by its own command."""

import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from leasehold.v1.command_service_pb2 import ListCommandsResponse
from leasehold.v1.fleet_service_pb2 import ListWorkersResponse
from leasehold.v1.worker_pb2 import WORKER_STATE_CONNECTED, Worker
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_SUSPENDED
from leasehold.v1.workload_service_pb2 import ListWorkloadsResponse

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, workload
from tests.completion import PATIENT

TIMEOUT_S = 90
PROGRAM = (sys.executable, "-m", "leasehold_client")


@pytest.fixture
def named(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """A coordinator with two workers, a running workload, a suspended one, and one with a hostile name."""
    parked = workload("parked")
    parked.status.state = WORKLOAD_STATE_SUSPENDED
    listed = [workload("zeta-one"), parked, workload("$(touch /tmp/no)")]
    scripted.answers |= {
        "ListWorkers": lambda request, context: ListWorkersResponse(
            workers=[Worker(name="alpha", state=WORKER_STATE_CONNECTED), Worker(name="beta")]
        ),
        "ListWorkloads": lambda request, context: ListWorkloadsResponse(workloads=listed),
        "ListCommands": lambda request, context: ListCommandsResponse(),
    }
    return scripted


@pytest.fixture
def variables(named: ScriptedCoordinator, tmp_path: Path) -> dict[str, str]:
    """The environment of a shell, whose `leasehold` is the one under test."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "leasehold"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(PATIENT)} "$@"\n')
    program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LEASEHOLD_COORDINATOR": named.address,
        "TERM": "dumb",
    }


def completed(words: str, variables: dict[str, str], program: Sequence[str] = PATIENT) -> tuple[str, str]:
    """What the program answers a shell, and what it prints to standard error."""
    done = subprocess.run(
        program,
        env={
            **variables,
            "_LEASEHOLD_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "COMP_WORDBREAKS": " \t\n\"'@><=;|&(:",  # bash's own
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done
    return " ".join(line.partition(",")[2] for line in done.stdout.splitlines()).strip(), done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"_LEASEHOLD_COMPLETE": "bash_complete"},
        {"_LEASEHOLD_COMPLETE": "bash_complete", "COMP_WORDS": "leasehold s", "COMP_CWORD": "x"},
        {"_LEASEHOLD_COMPLETE": "nonsense"},
    ],
)
def test_the_variable_of_completions_without_words_is_refused(
    variables: dict[str, str], wrong: dict[str, str]
) -> None:
    done = subprocess.run(
        PATIENT,
        env={**variables, **wrong},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout) == (2, "")
    said = "leasehold: _LEASEHOLD_COMPLETE is for scripts of `leasehold completion`: unset it\n"
    assert done.stderr == said


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("leasehold stop ", "zeta-one parked"),
        ("leasehold stop zeta-one ", "parked"),
        ("leasehold suspend ", "zeta-one"),
        ("leasehold restore ", "parked"),
        ("leasehold logs z", "zeta-one"),
        ("leasehold describe worker ", "alpha beta"),
        ("leasehold describe checkpoint ", ""),
        ("leasehold get checkpoints z", "zeta-one"),
        ("leasehold get gpus b", "beta/0"),
        ("leasehold remap zeta-one --to alpha/0,alp", "alpha/0,alpha/0 alpha/0,alpha/1"),
        ("leasehold cordon b", "beta beta/0"),
        ("leasehold wait zeta-one --for state=S", "SUSPENDED SLEEPING STOPPED"),
        ("leasehold wait zeta-one --for=state=S", "SUSPENDED SLEEPING STOPPED"),  # after bash's last "="
        ("leasehold remap zeta-one --to=alpha/0,alp", "alpha/0,alpha/0 alpha/0,alpha/1"),
        ("leasehold restore parked --preempt z", "zeta-one"),
        ("leasehold run --preempt=a,z", "a,zeta-one"),
        ("leasehold get workl", "workloads workload"),
        ("leasehold context use ", ""),
        ("leasehold completion ", "bash zsh fish"),
        ("leasehold run -f jo", "jo"),  # of a file, which the shell completes
    ],
)
def test_names_are_completed_where_a_verb_takes_them(
    variables: dict[str, str], words: str, names: str
) -> None:
    assert completed(words, variables) == (names, "")


@pytest.mark.long
def test_names_are_kept_for_some_seconds(
    named: ScriptedCoordinator, variables: dict[str, str], tmp_path: Path
) -> None:
    for _ in range(3):
        assert completed("leasehold logs z", variables) == ("zeta-one", "")
    (file,) = (tmp_path / "cache/leasehold").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    asked = len(named.requests)
    assert asked == 4
    file.write_text("{")
    assert completed("leasehold logs z", variables) == ("zeta-one", "")
    assert len(named.requests) == 2 * asked, "a damaged file is not used"


@pytest.mark.long
@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "nowhere.invalid:7400", "unix:/nowhere/socket", "nonsense"]
)
def test_a_coordinator_that_is_away_completes_nothing_and_says_nothing(
    variables: dict[str, str], address: str
) -> None:
    variables["LEASEHOLD_COORDINATOR"] = address
    assert completed("leasehold stop ", variables, PROGRAM) == ("", "")
    assert completed("leasehold sto", variables, PROGRAM) == ("stop", "")


@pytest.mark.long
def test_a_coordinator_that_hangs_is_given_up(named: ScriptedCoordinator, variables: dict[str, str]) -> None:
    named.answers["ListWorkers"] = lambda request, context: time.sleep(30)
    assert completed("leasehold stop ", variables, PROGRAM) == ("", "")


def test_a_home_that_can_not_be_written_is_no_error(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert completed("leasehold logs z", variables) == ("zeta-one", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(leasehold: CommandLine, shell: str) -> None:
    done = leasehold("completion", shell)
    assert (done.code, done.stderr) == (0, "")
    assert "_LEASEHOLD_COMPLETE" in done.stdout


def typed(command: list[str], setup: str, line: str, wanted: str, variables: dict[str, str]) -> str:
    """Types a line with a Tab in an interactive shell, and returns what the terminal shows.

    The shell gets SIGKILL once the terminal shows the wanted text, or after a time.
    """
    process, terminal = pty.fork()
    if not process:
        os.execvpe(command[0], command, variables)
    shown = b""
    try:
        os.write(terminal, f"{setup}; echo up$((1+1))\n".encode())
        for text, awaited in ((None, "up2"), (line, wanted)):
            if text is not None:
                shown = b""
                os.write(terminal, text.encode())
            deadline = time.monotonic() + TIMEOUT_S
            while awaited not in shown.decode(errors="replace") and time.monotonic() < deadline:
                if select.select([terminal], [], [], 0.5)[0]:
                    shown += os.read(terminal, 65_536)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
    return shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("leasehold logs zet", "leasehold logs zeta-one"),
        ("leasehold wait zeta-one --for=state=SU", "leasehold wait zeta-one --for=state=SUSPENDED"),
        ('leasehold wait zeta-one --for "state=SU', 'leasehold wait zeta-one --for "state=SUSPENDED"'),
        ("leasehold wait zeta-one --for='state=SU", "leasehold wait zeta-one --for='state=SUSPENDED'"),
        ('leasehold wait zeta-one "--for=state=SU', 'leasehold wait zeta-one "--for=state=SUSPENDED"'),
    ],
)
def test_bash_completes_a_name(variables: dict[str, str], line: str, wanted: str) -> None:
    setup = 'eval "$(leasehold completion bash)"'
    assert wanted in typed(["bash", "--norc", "-i"], setup, f"{line}\t", wanted, variables)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed (.ci/packages)")
def test_zsh_completes_a_name(variables: dict[str, str]) -> None:
    setup = 'autoload -U compinit && compinit -u -D && eval "$(leasehold completion zsh)"'
    shown = typed(["zsh", "-f", "-i"], setup, "leasehold logs zet\t", "zeta-one", variables)
    assert "zeta-one" in shown


@pytest.fixture
def fish() -> list[str]:
    """The words of a fish that completes."""
    if not shutil.which("fish"):
        pytest.skip("fish is not installed (.ci/packages)")
    return ["fish", "--no-config", "-c"]


@pytest.mark.long
def test_fish_completes_a_name_with_its_state(fish: list[str], variables: dict[str, str]) -> None:
    script = 'leasehold completion fish | source; complete -C "leasehold logs zet"'
    done = subprocess.run([*fish, script], env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.split() == ["zeta-one", "RUNNING"], done
