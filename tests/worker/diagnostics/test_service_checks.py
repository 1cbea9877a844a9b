"""The checks of ``leasehold doctor --host``, on real files, sockets and processes."""

import datetime
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from leasehold.local.v1.local_service_pb2 import ListResponse
from leasehold_coordinator.access.authority import open_authority
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.diagnostics import service_checks
from leasehold_worker.diagnostics.checks import CHECKS, SERVICE_CHECKS
from leasehold_worker.diagnostics.examination import Examination, NotOkError
from leasehold_worker.diagnostics.installed_service import (
    InstalledService,
    MainProcess,
    main_process,
    user_of,
)
from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import Enrolment, read_enrolment, write_enrolment
from leasehold_worker.host import service_unit
from leasehold_worker.host.service_unit import ServiceUnit, parse_unit, read_unit
from leasehold_worker.planning.findings import NOT_CHECKED, REFUSED, WARNING
from leasehold_worker.timestamps import duration

from tests.certificates import issue
from tests.prefork import COMMAND_LINE, run

NAME = "leasehold-worker.service"
UNIT = ServiceUnit(
    load_state="loaded",
    file_state="enabled",
    active_state="active",
    is_outdated=False,
    main_pid=os.getpid(),
    user=str(os.geteuid()),
    control_group="",
    is_delegated=True,
    core_limit="0",
)
ALL = 2**41 - 1
SERVICE = InstalledService(UNIT, os.geteuid(), MainProcess(os.getpid(), ALL, "0"), ListResponse())


@pytest.fixture
def patient(tmp_path: Path) -> Examination:
    (tmp_path / "state").mkdir(mode=0o700)
    config = WorkerConfig(state_dir=tmp_path / "state", name="gpu-07")
    return Examination(config, None, None, None, False, None, "", SERVICE)  # type: ignore[arg-type]  # no driver


def with_unit(patient: Examination, **changes: object) -> Examination:
    unit = replace(UNIT, **changes)  # type: ignore[arg-type]  # fields by name
    return replace(patient, service=replace(SERVICE, unit=unit))


def finding(check: str, patient: Examination) -> tuple[int, str]:
    """The result and the detail of a check that is not ok."""
    with pytest.raises(NotOkError) as raised:
        SERVICE_CHECKS[check](patient)
    assert raised.value.result == NOT_CHECKED or str(raised.value).endswith("`"), "a command ends the finding"
    return raised.value.result, str(raised.value)


@pytest.mark.parametrize(
    ("changes", "result", "words"),
    [
        ({"load_state": "not-found"}, REFUSED, "run `leasehold install worker --user "),
        ({"load_state": "masked"}, REFUSED, f"run `systemctl unmask {NAME}"),
        ({"active_state": "failed"}, REFUSED, f"is failed; `journalctl -u {NAME}`"),
        ({"is_outdated": True}, WARNING, "`systemctl daemon-reload && systemctl restart"),
        ({"file_state": "disabled"}, WARNING, f"`systemctl enable {NAME}`"),
    ],
)
def test_the_unit(patient: Examination, changes: dict[str, object], result: int, words: str) -> None:
    assert service_checks.unit(patient).endswith("installed, enabled and active")
    found = finding("unit", with_unit(patient, **changes))
    assert found[0] == result
    assert words in found[1]


def test_without_systemd_nothing_of_the_unit_is_checked(patient: Examination) -> None:
    unknown = replace(patient, service=replace(SERVICE, unit="no systemd", main=None))
    for check in ("unit", "user", "capabilities", "cgroup_delegation", "core_dumps"):
        assert finding(check, unknown) == (NOT_CHECKED, "no systemd")
    silent = replace(patient, service=replace(SERVICE, unit="no systemd", leases="refused"))
    for check in ("socket", "clock"):
        assert finding(check, silent)[1].endswith(": start `leasehold worker`")


def test_the_id_of_the_units_user() -> None:
    assert user_of(replace(UNIT, user="")) == user_of(replace(UNIT, user="root")) == 0
    assert user_of(replace(UNIT, user="54321")) == 54_321
    for unknown in (replace(UNIT, user="no-such-user"), replace(UNIT, load_state="not-found"), "no systemd"):
        assert user_of(unknown) is None


def test_the_user(patient: Examination) -> None:
    assert service_checks.user(patient).endswith(f"who owns {patient.config.state_dir}")
    result, detail = finding("user", with_unit(patient, user="no-such-user"))
    assert (result, detail.split(":")[0]) == (
        REFUSED,
        f"{NAME} runs as no-such-user, and no such user exists",
    )
    assert "belongs to" in finding("user", with_unit(patient, user="54321"))[1]
    patient.config.state_dir.rmdir()
    assert "does not exist" in finding("user", patient)[1]


def test_the_capabilities_of_the_running_worker(patient: Examination) -> None:
    assert service_checks.capabilities(patient).endswith("has all 3")
    few = replace(patient, service=replace(SERVICE, main=MainProcess(os.getpid(), ALL & ~1, "0")))
    assert service_checks.capabilities(few).endswith("has all 3"), "a worker without run_as drops CAP_CHOWN"
    few = replace(few, config=msgspec.structs.replace(few.config, run_as="batch"))
    assert "lacks CAP_CHOWN;" in finding("capabilities", few)[1]
    lacking = replace(SERVICE, main=MainProcess(os.getpid(), ALL & ~(1 << 19), "0"))
    result, detail = finding("capabilities", replace(patient, service=lacking))
    assert result == REFUSED
    assert "lacks CAP_SYS_PTRACE;" in detail
    assert finding("capabilities", replace(patient, service=replace(SERVICE, main=None)))[0] == NOT_CHECKED


def test_the_process_of_the_worker_is_told_from_another_with_its_pid() -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    group = lines[0].split(":", 2)[-1]
    found = main_process(replace(UNIT, control_group=group))
    assert found is not None
    assert found.pid == os.getpid()
    effective = int(Path("/proc/self/status").read_text().split("CapEff:\t")[1].split()[0], 16)
    assert [found.has(number) for number in range(41)] == [bool(effective >> n & 1) for n in range(41)]
    assert main_process(replace(UNIT, control_group="/system.slice/another.service")) is None
    assert main_process(replace(UNIT, control_group=group, main_pid=0)) is None
    assert main_process(replace(UNIT, control_group="")) is None
    if group != "/":
        assert main_process(replace(UNIT, control_group=group[:-1])) is None, "a name that begins alike"


def test_the_socket(patient: Examination) -> None:
    path = patient.config.socket_path
    assert "does not exist" in finding("socket", patient)[1]
    path.write_text("")
    assert "is not a socket" in finding("socket", patient)[1]
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        assert "has mode 0666" in finding("socket", patient)[1]
        path.chmod(0o660)
        assert service_checks.local_socket(patient) == f"{path} answers"
        mute = replace(patient, service=replace(SERVICE, leases="no answer within 5 s"))
        assert f"does not answer at {path} (no answer within 5 s)" in finding("socket", mute)[1]


@pytest.mark.parametrize(
    ("left", "renew_ago", "result", "words"),
    [
        (15, 0, None, "worker/gpu-07 expires in 14 days"),
        (14, 1, None, "worker/gpu-07 expires in 13 days"),
        (13, 2, WARNING, "expires in 12 days, and its renewal has been due for 2 days;"),
        (
            -0.003,
            16,
            REFUSED,
            "expired 4 minutes ago: run `leasehold token create --worker gpu-07 --replace`",
        ),
    ],
)
def test_the_certificate(
    patient: Examination, tmp_path: Path, left: float, renew_ago: int, result: int | None, words: str
) -> None:
    assert service_checks.certificate(patient).startswith("none")
    holder = issue(open_authority(tmp_path), "worker/gpu-07", life=datetime.timedelta(days=left))
    enrolment = Enrolment(
        identity="worker/gpu-07",
        certificate=holder.chain.decode(),
        renew_s=time.time() - renew_ago * 86_400,
    )
    write_enrolment(patient.config.state_dir, enrolment)
    if result is None:
        assert words in service_checks.certificate(patient)
        return
    found = finding("certificate", patient)
    assert found[0] == result
    assert words in found[1]
    if result == REFUSED:
        assert f"runuser -u {UNIT.user} -- leasehold worker --join - --join-only; " in found[1]


def test_a_certificate_that_is_none(patient: Examination) -> None:
    path = patient.config.state_dir / "enrolment.json"
    path.write_text('{"identity": "worker/gpu-07", "certificate": "-"}')
    assert "is not a file of the worker's user with mode 0600" in finding("certificate", patient)[1]
    path.chmod(0o600)
    assert "is damaged" in finding("certificate", patient)[1]
    with pytest.raises(StartError, match=rf"belongs to user {os.geteuid()}, .*: if .*`chown 54321 {path}`"):
        read_enrolment(path.parent, 54321)


@pytest.mark.parametrize(
    ("limit", "result", "command"),
    [
        ("LEAST_BYTES", REFUSED, "du -xh"),
        ("LOW_BYTES", WARNING, "du -xh"),
        ("LEAST_INODES", REFUSED, "du -x --inodes"),
        ("LOW_INODES", WARNING, "du -x --inodes"),
    ],
)
def test_the_disk(
    patient: Examination, monkeypatch: pytest.MonkeyPatch, limit: str, result: int, command: str
) -> None:
    for name in ("LEAST_BYTES", "LOW_BYTES", "LEAST_INODES", "LOW_INODES"):
        monkeypatch.setattr(service_checks, name, 0)
    assert service_checks.disk(patient).count("free") == 2
    for name in (limit, limit.replace("LEAST", "LOW")):
        monkeypatch.setattr(service_checks, name, 2**60)
    found = finding("disk", patient)
    assert found[0] == result
    assert f"run `{command} {patient.config.state_dir}" in found[1]


@pytest.mark.parametrize(
    ("offset_s", "result", "words"),
    [
        (None, NOT_CHECKED, "has not been connected"),
        (0.0, None, "0.0 s"),
        (4.9, None, "4.9 s ahead of"),
        (5.1, WARNING, "5.1 s ahead of this host's"),
        (-3_600.0, WARNING, "3600.0 s behind this host's"),
    ],
)
def test_the_clock(patient: Examination, offset_s: float | None, result: int | None, words: str) -> None:
    leases = ListResponse(coordinator_clock_offset=None if offset_s is None else duration(offset_s))
    asked = replace(patient, service=replace(SERVICE, leases=leases))
    if result is None:
        assert words in service_checks.clock(asked)
        return
    found = finding("clock", asked)
    assert found[0] == result
    assert words in found[1]


@pytest.mark.parametrize(
    ("pattern", "limit", "words"),
    [
        ("core", "0", None),
        ("core", "unlimited", "limit unlimited, kernel.core_pattern core"),
        ("|/usr/lib/systemd/systemd-coredump %P", "0", None),
        ("|/usr/lib/systemd/systemd-coredump %P", "4096", "LimitCORE=0"),
        ("|/usr/share/apport/apport -p%p", "0", "/usr/share/apport/apport, whatever its limit"),
    ],
)
def test_core_dumps(
    patient: Examination,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
    limit: str,
    words: str | None,
) -> None:
    (tmp_path / "core_pattern").write_text(pattern + "\n")
    monkeypatch.setattr(service_checks, "CORE_PATTERN", tmp_path / "core_pattern")
    main = MainProcess(1, ALL, limit)
    for service in (
        replace(SERVICE, main=main),
        replace(SERVICE, main=None, unit=replace(UNIT, core_limit=limit)),
    ):
        examined = replace(patient, service=service)
        if words is None:
            assert service_checks.core_dumps(examined).startswith("none")
        else:
            result, detail = finding("core_dumps", examined)
            assert result == WARNING
            assert words in detail


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of control groups of version 2, for a worker in /worker."""
    monkeypatch.setattr("leasehold_worker.host.cgroups._CGROUP", tmp_path)
    group = tmp_path / "worker"
    group.mkdir()
    for folder in (tmp_path, group):
        (folder / "cgroup.controllers").write_text("cpu memory pids\n")
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (group / name).touch()
    return tmp_path


def test_the_delegation_of_control_groups(patient: Examination, groups: Path) -> None:
    delegated = with_unit(patient, control_group="/worker")
    assert service_checks.cgroup_delegation(delegated).endswith(str(groups / "worker"))
    assert "lacks Delegate=yes" in finding("cgroup_delegation", with_unit(patient, is_delegated=False))[1]
    assert finding("cgroup_delegation", with_unit(patient, control_group=""))[0] == NOT_CHECKED
    assert isinstance(delegated.service, InstalledService)
    other = replace(delegated, service=replace(delegated.service, uid=54_321))
    assert "not to the worker: run `systemctl restart" in finding("cgroup_delegation", other)[1]
    (groups / "worker/cgroup.controllers").write_text("cpu\n")
    assert "lacks memory, so" in finding("cgroup_delegation", delegated)[1]
    (groups / "cgroup.controllers").write_text("pids\n")
    assert "systemd.unified_cgroup_hierarchy=1" in finding("cgroup_delegation", delegated)[1]


def test_the_properties_of_a_unit(tmp_path: Path) -> None:
    file = tmp_path / "unit"
    file.touch()
    started_us = int(time.monotonic() * 1e6)
    shown = (
        f"LoadState=loaded\nMainPID=7\nUser=ann\nControlGroup=/a=b\nDelegate=yes\nFragmentPath={file}\n"
        f"ExecMainStartTimestampMonotonic={started_us + 1_000_000}\nNeedDaemonReload=no\n"
    )
    unit = parse_unit(shown)
    assert (unit.main_pid, unit.user, unit.control_group, unit.is_delegated) == (7, "ann", "/a=b", True)
    assert not unit.is_outdated
    os.utime(file, (time.time() + 10, time.time() + 10))
    assert parse_unit(shown).is_outdated
    assert parse_unit(shown.replace(f"FragmentPath={file}", f"DropInPaths=/none {file}")).is_outdated
    assert parse_unit(shown.replace(str(file), "").replace("Reload=no", "Reload=yes")).is_outdated
    assert not parse_unit("").is_outdated


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exec sleep 60", "systemctl does not answer"),
        ("echo no bus >&2; exit 1", "systemctl fails: no bus"),
    ],
)
def test_a_systemctl_that_hangs_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(service_unit, "SYSTEMD", tmp_path)
    found = read_unit(0.5)
    assert isinstance(found, str)
    assert words in found


@pytest.mark.skipif(Path("/run/systemd/system").exists(), reason="this host runs systemd")
def test_the_verb_on_a_host_without_systemd(tmp_path: Path) -> None:
    arguments = ["doctor", "--host", "--state-dir", str(tmp_path), "-o", "json", "--timeout", "5"]
    done = run(COMMAND_LINE, arguments, env=dict(os.environ), timeout=60)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert list(checks) == [*CHECKS, *SERVICE_CHECKS]
    assert checks["unit"]["result"] == "CHECK_RESULT_NOT_CHECKED"
    assert "does not run systemd" in checks["unit"]["detail"]
    assert checks["socket"]["result"] == "CHECK_RESULT_REFUSED"


def test_an_invalid_configuration_leaves_the_rest_unchecked(patient: Examination) -> None:
    invalid = replace(patient, config_error="colour is unknown")
    for check in ("user", "socket", "certificate", "disk"):
        assert finding(check, invalid) == (NOT_CHECKED, "the configuration is invalid")
