"""`leasehold install` and `uninstall`, as far as they go without systemd. tests/deploy has the rest."""

import os
import pwd
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_EXITED, WORKLOAD_STATE_SUSPENDED, WorkloadSpec
from leasehold_client.cli import install as install_verbs
from leasehold_client.cli.install import install, uninstall
from leasehold_client.errors import LeaseholdError
from leasehold_client.installation import program, steps
from leasehold_client.installation.program import service_program, unit_template
from leasehold_client.installation.services import Service, settings_text, unit_text
from leasehold_client.installation.steps import Step, do_all
from leasehold_worker.commands.journal_file import JournalFile, keep_workload
from leasehold_worker.commands.journal_records import workload_record
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.workloads.workload import Workload

from tests.worker.unix_users import open_to_others

WORKER = Service("worker", "gpus")

JOIN = """
import sys
from pathlib import Path
from leasehold_client.installation import steps
from leasehold_client.installation.services import Service

Service.state_directory = Path(sys.argv[2])
steps._join(Service("worker", "nobody"), Path(sys.argv[1]), "the token\\n")
"""
"""In a process of its own, as `leasehold install` is: gRPC's threads of other tests survive no fork."""


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


OTHERS: Final = 65534
"""The group of another user."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has files that others can't change")


@needs_root
@pytest.mark.parametrize(
    ("mode", "gid", "told"),
    [
        (0o777, 0, "may change"),
        (0o775, OTHERS, "may change"),
        (0o700, 0, "may not enter"),
        (0o775, 0, ""),
        (0o755, OTHERS, ""),
    ],
)
def test_a_service_runs_what_root_alone_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, gid: int, told: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3", "leasehold"):
        (folder / name).touch(0o755)
        (folder / name).chmod(0o755)
    os.chown(folder, 0, gid)
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


def test_a_join_token_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "join")
    options = ["worker", "--join-file", str(tmp_path / "join"), "--dry-run"]
    done = CliRunner().invoke(install, options)
    assert done.exit_code == 2
    assert "is not a regular file" in done.output


def owner(path: Path) -> int:
    return path.stat().st_uid


@needs_root
def test_the_state_directory_of_a_daemon_is_no_link(tmp_path: Path) -> None:
    account = pwd.getpwnam("nobody")
    target, above = tmp_path / "etc", tmp_path / "leasehold"
    target.mkdir()
    steps.make_directory(above / "worker", 0o711, account)
    assert owner(above / "worker") == account.pw_uid
    steps.make_directory(above / "worker", 0o711, account)
    (above / "coordinator").symlink_to(target)
    with pytest.raises(NotADirectoryError):
        steps.make_directory(above / "coordinator", 0o700, account)
    (above / "coordinator").unlink()
    os.chown(above, account.pw_uid, 0)
    with pytest.raises(LeaseholdError, match=f"users other than root may change {above}"):
        steps.make_directory(above / "coordinator", 0o700, account)
    assert owner(target) == 0
    assert not (above / "coordinator").exists()


@needs_root
def test_a_file_of_roots_is_written_through_no_link(tmp_path: Path) -> None:
    settings, victim = tmp_path / "etc" / "worker.toml", tmp_path / "shadow"
    victim.write_text("kept")
    settings.parent.mkdir(0o755)
    (settings.parent / ".worker.toml.new").symlink_to(victim)
    steps.write(settings, "new")
    assert (settings.read_text(), victim.read_text()) == ("new", "kept")
    assert settings.stat().st_mode & 0o777 == 0o644
    settings.parent.chmod(0o777)
    with pytest.raises(LeaseholdError, match=f"users other than root may change {settings.parent}"):
        steps.write(settings, "newer")
    assert settings.read_text() == "new"


@needs_root
def test_a_join_has_neither_the_terminal_nor_the_variables_of_root(tmp_path: Path) -> None:
    program, told = tmp_path / "leasehold", tmp_path / "leasehold.told"
    program.write_text(f"#!/bin/sh\n(cat; env; cut -d ' ' -f 6 /proc/self/stat) >{told}\n")
    program.chmod(0o755)
    told.touch()
    told.chmod(0o666)
    open_to_others(tmp_path)
    subprocess.run(
        [sys.executable, "-c", JOIN, program, tmp_path / "state" / "worker"],
        env={**os.environ, "A_SECRET": "of root", "LEASEHOLD_OWN": "told"},
        check=True,
    )
    text = told.read_text()
    assert text.startswith("the token\n")
    assert "LEASEHOLD_OWN=told" in text
    assert "A_SECRET" not in text
    assert int(text.splitlines()[-1]) != os.getsid(0)


def test_settings_that_exist_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold_client.installation.services.SETTINGS_DIRECTORY", tmp_path)
    (tmp_path / "worker.toml").touch()
    with pytest.raises(LeaseholdError, match=r"worker\.toml exists, and is kept: leave out --run-as"):
        steps.install_steps(WORKER, Path("/p"), "", {"run_as": "a"}, None)
    planned = [step.text for step in steps.install_steps(WORKER, Path("/p"), "", {}, None)]
    assert not any("worker.toml" in text for text in planned)
    # A join that was refused ends an installation. The same command is then given again.
    (tmp_path / "worker.toml").write_text(settings_text(WORKER, {"run_as": "a"}))
    again = [step.text for step in steps.install_steps(WORKER, Path("/p"), "", {"run_as": "a"}, "token")]
    assert not any("worker.toml" in text for text in again)


def test_a_host_without_systemd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SYSTEMD", tmp_path / "nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LeaseholdError, match="does not run systemd"):
        steps.require_host()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LeaseholdError, match="only root"):
        steps.require_host()


@needs_root
def test_the_umask_of_root_closes_no_directory_of_a_daemon(tmp_path: Path) -> None:
    account, umask = pwd.getpwnam("nobody"), os.umask(0o077)
    settings, state = tmp_path / "etc" / "worker.toml", tmp_path / "lib" / "worker"
    planned = [
        Step("write", lambda: steps.write(settings, "")),
        Step("make", lambda: steps.make_directory(state, 0o711, account)),
    ]
    try:
        do_all(planned, lambda _: None)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(umask)
    for path, mode in ((settings.parent, 0o755), (state.parent, 0o755), (state, 0o711)):
        assert path.stat().st_mode & 0o777 == mode


def test_a_repeated_installation_keeps_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold_client.installation.services.UNIT_DIRECTORY", tmp_path)
    monkeypatch.setattr(program, "service_program", lambda: Path("/opt/leasehold/bin/leasehold"))
    arguments = ["worker", "--dry-run"]
    assert "\nUser=leasehold-worker\n" in CliRunner().invoke(install, arguments).output
    (tmp_path / WORKER.unit).write_text(unit_text(unit_template(WORKER.unit), Path("/p"), "gpus"))
    assert "\nUser=gpus\n" in CliRunner().invoke(install, arguments).output
    assert "\nUser=other\n" in CliRunner().invoke(install, [*arguments, "--user", "other"]).output


def test_a_purge_after_an_uninstallation_keeps_a_worker_whose_workloads_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_client.installation.services.UNIT_DIRECTORY", tmp_path)
    monkeypatch.setattr("leasehold_client.installation.services.STATE_DIRECTORY", tmp_path)
    monkeypatch.setattr(steps, "CGROUPS", (tmp_path,))
    WORKER.state_directory.mkdir()
    group = tmp_path / "system.slice" / WORKER.unit / "workload"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("4711\n")
    first = steps.uninstall_steps(WORKER, purge=True)[0]
    with pytest.raises(LeaseholdError, match="1 processes of workloads run on, such as 4711"):
        first.do()
    (group / "cgroup.procs").write_text("")
    first.do()


def test_a_purge_keeps_a_worker_with_workloads(tmp_path: Path) -> None:
    """Also one that does not run: a suspended process of ``exec`` is in no control group of the unit."""
    install_verbs._require_no_workloads(tmp_path)
    file = JournalFile(StateDirectory(tmp_path).journal_path)
    root = ProcessIdentity(Pid(1), 1)
    workload = Workload("w-1", "parked", WorkloadSpec(), root, tmp_path, datetime.now(UTC), None)
    workload.state = WORKLOAD_STATE_SUSPENDED
    file.commit(keep_workload(workload_record(workload, "boot")))
    with pytest.raises(LeaseholdError, match="1 workloads of the worker have not ended, such as w-1"):
        install_verbs._require_no_workloads(tmp_path)
    workload.state = WORKLOAD_STATE_EXITED
    file.commit(keep_workload(workload_record(workload, "boot")))
    install_verbs._require_no_workloads(tmp_path)
    file.close()
    StateDirectory(tmp_path).journal_path.write_text("damaged")
    with pytest.raises(LeaseholdError, match="was not read, so its workloads are unknown"):
        install_verbs._require_no_workloads(tmp_path)


def test_a_purge_keeps_a_coordinator_with_a_worker_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_client.installation.services.STATE_DIRECTORY", tmp_path)
    monkeypatch.setattr(install_verbs, "_carry_out", lambda steps, **_: do_all(steps[:1], lambda _: None))
    inner = tmp_path / "coordinator/.local/state/leasehold/worker"
    inner.mkdir(parents=True)
    arguments = ["coordinator", "--purge"]
    assert CliRunner().invoke(uninstall, arguments).exit_code == 0
    file = JournalFile(StateDirectory(inner).journal_path)
    root = ProcessIdentity(Pid(1), 1)
    workload = Workload("w-1", "parked", WorkloadSpec(), root, inner, datetime.now(UTC), None)
    workload.state = WORKLOAD_STATE_SUSPENDED
    file.commit(keep_workload(workload_record(workload, "boot")))
    file.close()
    refused = CliRunner().invoke(uninstall, arguments)
    assert refused.exit_code == 1
    assert "1 workloads of the worker have not ended, such as w-1" in refused.output
    assert StateDirectory(inner).journal_path.exists()


def test_a_purge_looks_where_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold_client.installation.services.SETTINGS_DIRECTORY", tmp_path)
    assert install_verbs._state_directory(WORKER) == WORKER.state_directory
    (tmp_path / "worker.toml").write_text('state_dir = "/srv/worker"')
    assert install_verbs._state_directory(WORKER) == Path("/srv/worker")
    (tmp_path / "worker.toml").write_text("state_dir")
    with pytest.raises(LeaseholdError, match="can't be read, so the worker's state directory is unknown"):
        install_verbs._state_directory(WORKER)


def test_a_token_that_is_no_text_is_no_traceback() -> None:
    done = CliRunner().invoke(
        install, ["worker", "--join-file", "-", "--dry-run"], input="token".encode("utf-16")
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output


def test_a_dry_run_changes_nothing() -> None:
    done = CliRunner().invoke(uninstall, ["worker", "--purge", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(("would ", "there is nothing to do"))


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_a_purge_of_nothing_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for directory in ("UNIT_DIRECTORY", "SETTINGS_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.setattr(f"leasehold_client.installation.services.{directory}", tmp_path / directory)
    monkeypatch.setattr(steps, "SETTINGS_DIRECTORY", tmp_path / "SETTINGS_DIRECTORY")
    monkeypatch.setattr(steps, "STATE_DIRECTORY", tmp_path / "STATE_DIRECTORY")
    done = CliRunner().invoke(uninstall, [name, "--purge", "--dry-run", "--user", "nobody-here"])
    assert (done.exit_code, done.output) == (0, "there is nothing to do\n")


def test_a_step_that_fails_is_named() -> None:
    done: list[str] = []

    def fail() -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(LeaseholdError, match="can't write it: Permission denied"):
        do_all([Step("begin", lambda: done.append("begin")), Step("write it", fail)], done.append)
    assert done == ["begin", "begin", "write it"]
