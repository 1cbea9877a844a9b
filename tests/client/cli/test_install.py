"""`leasehold install` and `uninstall`, as far as they go without systemd. tests/deploy has the rest."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from leasehold_client.cli.install import install, uninstall
from leasehold_client.errors import LeaseholdError
from leasehold_client.installation import program, steps
from leasehold_client.installation.program import service_program, unit_template
from leasehold_client.installation.services import Service, settings_text, unit_text
from leasehold_client.installation.steps import Step, do_all

WORKER = Service("worker", "gpus")


def test_the_unit_has_the_program_and_the_user() -> None:
    unit = unit_text(unit_template(WORKER.unit), Path("/srv/venv/bin/leasehold"), "gpus")
    assert "\nExecStart=/srv/venv/bin/leasehold worker\n" in unit
    assert "\nUser=gpus\n" in unit
    assert "/opt/leasehold" not in unit


def test_settings_are_quoted() -> None:
    text = settings_text(WORKER, {"run_as": 'a "b" \\'})
    assert text.splitlines()[1:] == [
        'state_dir = "/var/lib/leasehold/worker"',
        'socket = "/run/leasehold/worker/worker.sock"',
        'run_as = "a \\"b\\" \\\\"',
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a program that others can't change")
@pytest.mark.parametrize(("mode", "told"), [(0o777, "may change"), (0o700, "may not enter"), (0o755, "")])
def test_a_service_runs_what_root_alone_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, told: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3", "leasehold"):
        (folder / name).touch(0o755)
        (folder / name).chmod(0o755)
    folder.chmod(mode)
    checked = program._check
    monkeypatch.setattr(sys, "executable", str(folder / "python3"))
    monkeypatch.setattr(program, "_check", lambda part: part.is_relative_to(folder) and checked(part))
    if not told:
        assert service_program() == folder / "leasehold"
        return
    with pytest.raises(LeaseholdError, match=f"{told}.*/opt/leasehold"):
        service_program()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["worker", "--user", "root"], "'root' is no user for a daemon"),
        (["worker", "--user", "a b"], "'a b' is no user for a daemon"),
        (["worker", "--run-as", ""], "--run-as '' is no value"),
        (["worker", "--join-file", "/nowhere"], "/nowhere can't be read: No such file"),
        (["coordinator", "--worker-listen", "a\nb"], r"--worker-listen 'a\nb' is no value"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(install, [*arguments, "--dry-run"])
    assert done.exit_code == 2
    assert told in done.output


def test_settings_that_exist_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold_client.installation.services.SETTINGS_DIRECTORY", tmp_path)
    (tmp_path / "worker.toml").touch()
    with pytest.raises(LeaseholdError, match=r"worker\.toml exists, and is kept: leave out --run-as"):
        steps.install_steps(WORKER, Path("/p"), "", {"run_as": "a"}, None)
    planned = [step.text for step in steps.install_steps(WORKER, Path("/p"), "", {}, None)]
    assert not any("worker.toml" in text for text in planned)


def test_a_host_without_systemd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SYSTEMD", tmp_path / "nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LeaseholdError, match="does not run systemd"):
        steps.require_host()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LeaseholdError, match="only root"):
        steps.require_host()


def test_a_dry_run_changes_nothing() -> None:
    done = CliRunner().invoke(uninstall, ["worker", "--purge", "--dry-run"])
    assert done.exit_code == 0, done.output


def test_a_step_that_fails_is_named() -> None:
    done: list[str] = []

    def fail() -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(LeaseholdError, match="can't write it: Permission denied"):
        do_all([Step("begin", lambda: done.append("begin")), Step("write it", fail)], done.append)
    assert done == ["begin", "begin", "write it"]
