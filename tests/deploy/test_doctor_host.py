"""``leasehold doctor --host`` on an installed worker under a real systemd: each finding, and its command."""

import datetime
import json
import time
from pathlib import Path

import msgspec
import pytest
from leasehold_coordinator.access.authority import open_authority
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.files.enrolment_file import Enrolment

from tests.certificates import issue
from tests.deploy.systemd_host import SystemdHost, drop_in, needs_systemd, systemd_host
from tests.deploy.test_installation import LISTEN, main_pid, wait_for
from tests.integration.test_support_bundle import contents
from tests.worker.unix_users import is_readable, share

pytestmark = [
    needs_systemd,
    pytest.mark.skipif(not is_readable(), reason="other users can't read this checkout"),
    pytest.mark.long,
]

UNIT = "leasehold-worker.service"
STATE = "/var/lib/leasehold/worker"
SOCKET = "/run/leasehold/worker/worker.sock"
PIPE = Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")


class Installed:
    """A host with a coordinator and a worker."""

    def __init__(self, host: SystemdHost, tmp_path: Path) -> None:
        self.host = host
        simulated = SimulatedHost.create(tmp_path / "gpus", gpus=1, timing=Timing.instant())
        self.gpus = share(simulated, tmp_path / "share")
        variables = "\n".join(f'Environment="{name}={value}"' for name, value in self.gpus.items())
        host.run("leasehold", "install", "coordinator", *LISTEN)
        drop_in(host, UNIT, f"[Service]\n{variables}\n", "gpus")
        token = host.run("leasehold", "token", "create", "--worker", "gpu-01")
        options = ("--join-file", "-", "--run-as", "same-name")
        host.run("leasehold", "install", "worker", *options, text=token, env=self.gpus)

    def findings(self, *, succeeds: bool = True, user: str = "root") -> dict[str, tuple[str, str]]:
        command = ["leasehold", "doctor", "--host", "--timeout", "5", "-o", "json"]
        shown = self.host.run(
            "runuser", "-u", user, "--", *command, env={**self.gpus, "HOME": "/"}, succeeds=succeeds
        )
        checks = json.loads(shown)["checks"]
        return {one["name"]: (one["result"].removeprefix("CHECK_RESULT_"), one["detail"]) for one in checks}

    def mended(self, name: str, result: str, words: str, text: str | None = None) -> None:
        """Checks one finding, runs the command at its end, and sees that the check passes."""
        found = self.findings(succeeds=result != "REFUSED")[name]
        assert found[0] == result, found
        assert words in found[1]
        assert found[1].endswith("`"), "the command ends the finding"
        self.host.run("sh", "-c", found[1].split("`")[-2], text=text, env=self.gpus)
        wait_for(lambda: self.findings_now()[name][0] == "PASSED", name)

    def findings_now(self) -> dict[str, tuple[str, str]]:
        try:
            return self.findings()
        except AssertionError:
            return self.findings(succeeds=False)


@pytest.mark.minutes
@pytest.mark.timeout(400)
def test_each_finding_has_the_command_that_mends_it(tmp_path: Path) -> None:
    with systemd_host(tmp_path) as host:
        installed = Installed(host, tmp_path)
        wait_for(lambda: installed.findings_now()["clock"][0] == "PASSED", "the worker is connected")
        no_limits = nothing_wrong(installed)
        bundle(installed, tmp_path)
        unit_and_user(installed)
        socket(installed)
        process(installed, has_limits=not no_limits)
        disk_and_certificate(installed, tmp_path)


def nothing_wrong(installed: Installed) -> bool:
    """The service of a fresh installation. Returns whether this kernel has no limits of version 2 to give."""
    for user in ("root", "leasehold-worker"):
        found = installed.findings(user=user)
        wrong = {name for name, (result, _) in found.items() if result not in ("PASSED", "NOT_CHECKED")}
        assert found["state_directory"][0] == found["coordinator"][0] == "PASSED", found
        assert found["capabilities"][1].endswith("has all 5")
        assert "the certificate of worker/gpu-01 expires in 29 days" in found["certificate"][1]
        assert "inodes" in found["disk"][1]
        expected = {"core_dumps"} if PIPE else set()
        service = {"unit", "user", "capabilities", "socket", "certificate", "disk", "clock"}
        assert wrong & service == set(), found
        assert wrong & {"core_dumps"} == expected, found
    result, detail = found["cgroup_delegation"]
    assert result == "PASSED" or "systemd.unified_cgroup_hierarchy=1" in detail
    nobody = installed.findings(succeeds=False, user="nobody")
    assert nobody["certificate"][0] == "NOT_CHECKED"
    assert nobody["unit"][0] == "PASSED"
    return result != "PASSED"


def bundle(installed: Installed, tmp_path: Path) -> None:
    """root's archive of both services, with the real journal, and with no trace in their directories."""
    before = installed.host.run("find", "/var/lib/leasehold", "-printf", "%p %u %m\n").splitlines()
    file = tmp_path / "bundle.tar.gz"
    installed.host.run("leasehold", "support-bundle", str(file), "--yes", env=installed.gpus)
    text = {name: content.decode() for name, content in contents(file).items()}
    assert json.loads(text["manifest.json"])["notes"] == {}
    assert "ActiveState=active" in text["unit-worker.txt"]
    assert "LimitCORE=0\n" in text["unit-coordinator.txt"]
    assert "worker gpu-01 (worker-" in text["log-worker.txt"]
    assert "listening on" in text["log-coordinator.txt"]
    assert "certificate" in text["doctor.json"]
    assert json.loads(text["fleet/workers.json"])["entries"][0]["name"] == "gpu-01"
    after = installed.host.run("find", "/var/lib/leasehold", "-printf", "%p %u %m\n").splitlines()
    assert set(after) - set(before) == set()


def unit_and_user(installed: Installed) -> None:
    host = installed.host
    host.run("systemctl", "disable", "--quiet", UNIT)
    installed.mended("unit", "WARNING", "does not start at boot")
    host.run("touch", f"/etc/systemd/system/{UNIT}")
    installed.mended("unit", "WARNING", "was changed after its start")
    host.run("sh", "-c", f"echo '# later' >> /etc/systemd/system/{UNIT} && systemctl daemon-reload")
    installed.mended("unit", "WARNING", "was changed after its start")
    host.run("systemctl", "stop", UNIT)
    found = installed.findings(succeeds=False)
    assert found["capabilities"] == (
        "NOT_CHECKED",
        f"the worker does not run: run `systemctl restart {UNIT}`",
    )
    assert found["clock"][0] == "NOT_CHECKED"
    installed.mended("unit", "REFUSED", "is inactive")
    host.run("sh", "-c", f"systemctl stop {UNIT}; rm /etc/systemd/system/{UNIT}; systemctl daemon-reload")
    installed.mended("unit", "REFUSED", "is not installed")
    host.run("sh", "-c", f"chown root: {STATE} {STATE}/journal.sqlite3*")
    installed.mended("user", "REFUSED", "belongs to root")


def socket(installed: Installed) -> None:
    host = installed.host
    host.run("chmod", "0600", SOCKET)
    installed.mended("socket", "REFUSED", "has mode 0600")
    host.run("rm", SOCKET)
    installed.mended("socket", "REFUSED", "does not exist")
    host.run("sh", "-c", f"rm {SOCKET} && touch {SOCKET}")
    installed.mended("socket", "REFUSED", "is not a socket")
    host.run("kill", "-STOP", str(main_pid(host)))
    began = time.monotonic()
    found = installed.findings(succeeds=False)["socket"]
    assert time.monotonic() - began < 60
    assert found[0] == "REFUSED"
    assert "does not answer" in found[1]
    host.run("kill", "-CONT", str(main_pid(host)))


def process(installed: Installed, *, has_limits: bool) -> None:
    host = installed.host
    restart = f"systemctl daemon-reload && systemctl restart {UNIT}"
    text = "[Service]\nAmbientCapabilities=\nAmbientCapabilities=CAP_KILL\nLimitCORE=infinity\nDelegate=no\n"
    drop_in(host, UNIT, text, "broken")
    host.run("sh", "-c", restart)
    found = installed.findings(succeeds=False)
    assert found["capabilities"][0] == "REFUSED"
    assert "lacks CAP_CHOWN, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE" in found["capabilities"][1]
    assert found["cgroup_delegation"][0] == "WARNING"
    assert "lacks Delegate=yes" in found["cgroup_delegation"][1]
    if PIPE:  # the setting is of the whole machine
        assert "`sysctl -w kernel.core_pattern=core`" in found["core_dumps"][1]
    else:
        drop_in(host, UNIT, "[Service]\nLimitCORE=infinity\n", "broken")
        host.run("sh", "-c", restart)
        installed.mended("core_dumps", "WARNING", "may write core dumps (limit unlimited")
    host.run("rm", f"/etc/systemd/system/{UNIT}.d/broken.conf")
    host.run("leasehold", "install", "worker", env=installed.gpus)
    found = installed.findings()
    assert found["capabilities"][0] == "PASSED"
    assert (found["cgroup_delegation"][0] == "PASSED") == has_limits


def disk_and_certificate(installed: Installed, tmp_path: Path) -> None:
    host = installed.host
    host.run("mkdir", f"{STATE}/images")
    host.run("mount", "-t", "tmpfs", "-o", "size=32m,nr_inodes=90000", "tmpfs", f"{STATE}/images")
    found = installed.findings(succeeds=False)["disk"]
    assert found[0] == "REFUSED"
    assert f"{STATE}/images has 32 MiB of 32 MiB free, less than 64 MiB" in found[1]
    host.run("sh", "-c", found[1].split("`")[-2])
    host.run("sh", "-c", f"umount {STATE}/images && rmdir {STATE}/images")

    path = f"{STATE}/enrolment.json"
    enrolment = msgspec.json.decode(host.run("cat", path), type=Enrolment)
    holder = issue(open_authority(tmp_path), "worker/gpu-01", life=datetime.timedelta(minutes=-5))
    expired = msgspec.structs.replace(enrolment, certificate=holder.chain.decode())
    host.run("sh", "-c", f"cat > {path}", text=msgspec.json.encode(expired).decode())
    host.run("systemctl", "restart", UNIT)
    ticket = host.run("leasehold", "token", "create", "--worker", "gpu-01", "--replace")
    installed.mended("certificate", "REFUSED", "leasehold token create --worker gpu-01 --replace", ticket)
    wait_for(lambda: "CONNECTED" in host.run("leasehold", "get", "workers"), "the worker is connected")
