"""``leasehold support-bundle`` on a host with a coordinator, a worker and a workload."""

import json
import os
import pty
import socket
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleets import LEASEHOLD, Fleet, make_fleet
from tests.integration.mutual_tls import why_not

CANARY = "canary-that-nobody-may-find-8b2e"
SLEEPER = "import time; time.sleep(1000)"
LOG = f"""#!/bin/sh
cat << END
{{"line": 1}}
-----BEGIN PRIVATE KEY-----
{CANARY}
-----END PRIVATE KEY-----
joined by leasehold-join-{CANARY}
HF_TOKEN={CANARY}
pid 468 of ann (python serve.py {CANARY}) holds 576.0 MiB
the last line
END
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that stand before those of the host."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script(folder / "journalctl", LOG)
    script(folder / "systemctl", "#!/bin/sh\necho LoadState=loaded; echo ActiveState=active\n")
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def variables(fleet: Fleet, programs: Path) -> dict[str, str]:
    """The environment of the verb, with canaries."""
    folder = programs.parent / "settings"
    folder.mkdir(exist_ok=True)
    (folder / "worker.toml").write_text(
        f'state_dir = "{fleet.folder / "alpha"}"\npassword = "{CANARY}"\nlabels = {{a = "{CANARY}"}}\n'
    )
    (folder / "coordinator.toml").write_text(
        f'database = "{fleet.folder / "store.sqlite3"}"\nsecret = "{CANARY}"\n[oidc]\nissuer = "{CANARY}"\n'
    )
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LEASEHOLD_WORKER_CONFIG": str(folder / "worker.toml"),
        "LEASEHOLD_COORDINATOR_CONFIG": str(folder / "coordinator.toml"),
        "LEASEHOLD_SOCKET": str(fleet.folder / "alpha/worker.sock"),
        "PASSWORD": CANARY,
    }


def contents(archive: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            assert (entry.isfile(), entry.mode) == (True, 0o600)
            file = tar.extractfile(entry)
            assert file is not None
            found[entry.name.removeprefix("leasehold-support/")] = file.read()
    return found


def keys(folder: Path) -> Iterator[bytes]:
    """Each line of a key, a token or a certificate below a folder and in the state of the tests' user."""
    state = Path(os.environ["XDG_STATE_HOME"]) if "XDG_STATE_HOME" in os.environ else Path.home() / ".local"
    for root in (folder, state):
        for path in root.rglob("*"):
            if path.is_file() and path.suffix in (".token", ".key", ".pem", ".join"):
                yield from (line for line in path.read_bytes().splitlines() if len(line) > 30)


@pytest.mark.long
def test_no_secret_is_in_the_archive_and_the_list_is_its_content(fleet: Fleet, programs: Path) -> None:
    options = ["--name", "one", "--gpus", "1", "--env", f"PLAIN={CANARY}", "--env-secret", "TOKEN"]
    fleet.cli("run", *options, "--", sys.executable, "-c", SLEEPER, CANARY, TOKEN=CANARY)
    fleet.cli("label", "workload", "one", f"key={CANARY}")
    fleet.cli("annotate", "workload", "one", f"key={CANARY}")
    fleet.cli("suspend", "one", "--dry-run", code=1)
    file = programs.parent / "bundle.tar.gz"
    own = variables(fleet, programs)
    planned = fleet.cli("support-bundle", str(file), "--dry-run", code=0, **own).stdout
    assert not file.exists()
    done = fleet.cli("support-bundle", str(file), "--yes", code=0, **own).stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    found = contents(file)
    manifest = json.loads(found["manifest.json"])
    listed = [line.split()[0] for line in done.splitlines()[:-1] if "missing" not in line.split()[1:2]]
    assert listed == list(found)
    assert {"manifest.json", *manifest["members"]} == set(found)
    assert manifest["notes"] == {}
    assert [line.split()[0] for line in planned.splitlines()] == listed

    for name, content in found.items():
        assert CANARY.encode() not in content, name
        assert CANARY.encode().hex().encode() not in content, name
        assert not [line for line in keys(fleet.folder) if line in content], name
    assert CANARY not in done

    assert b"the last line" in found["log-worker.txt"]
    workload = json.loads(found["fleet/workloads.json"])["entries"][0]
    assert (workload["name"], workload["status"]["state"]) == ("one", "WORKLOAD_STATE_RUNNING")
    assert "spec" not in workload
    journal = json.loads(found["journal.json"])
    assert journal["commands_by_state"]["COMMAND_STATE_SUCCEEDED"] >= 1
    assert len(journal["workloads"][0]["gpu_uuids"]) == 1
    store = json.loads(found["store.json"])["tables"]
    assert store["workers"]["rows"] == 1
    assert store["events"]["newest"].startswith("20")
    assert json.loads(found["versions.json"])["packages"]["click"]
    assert json.loads(found["settings.json"])["worker.toml"]["settings"]["password"] == "(removed)"
    assert {check["name"] for check in json.loads(found["doctor.json"])["checks"]} > {"kernel", "coordinator"}
    assert json.loads(found["fleet/commands.json"])["entries"][0]["operation_kind"] == "run"
    (local,) = json.loads(found["leases.json"])["workloads"]
    assert "root_pid" in local["status"]
    fleet.cli("stop", "one")


@pytest.mark.long
def test_what_is_refused(fleet: Fleet, programs: Path) -> None:
    file = programs.parent / "bundle.tar.gz"
    own = variables(fleet, programs)
    refused = fleet.cli("support-bundle", str(file), code=2, **own)
    assert "no terminal" in refused.stderr
    assert "--yes" in refused.stderr
    file.write_text("mine")
    assert "is kept" in fleet.cli("support-bundle", str(file), "--yes", code=2, **own).stderr
    assert file.read_text() == "mine"
    nowhere = programs.parent / "none/bundle.tar.gz"
    refused = fleet.cli("support-bundle", str(nowhere), "--yes", code=2, **own)
    assert f"{nowhere.parent} is no directory; name another file" in refused.stderr
    assert not refused.stdout, "nothing is collected in vain"


@pytest.mark.long
@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_terminal_is_asked(fleet: Fleet, programs: Path, answer: str) -> None:
    file = programs.parent / "bundle.tar.gz"
    command = [*LEASEHOLD, "support-bundle", str(file)]
    environment = {**os.environ, **fleet.variables, **variables(fleet, programs)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environment)
    shown = b""
    while b"?" not in shown.rpartition(b"\n")[2]:
        shown += os.read(terminal, 4096)
    assert not file.exists(), "it is listed before it is written"
    assert b"versions.json" in shown
    os.write(terminal, answer.encode() + b"\n")
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:  # the other side is closed
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    assert file.exists() == (answer == "y")


@pytest.mark.long
def test_parts_that_hang_are_noted(fleet: Fleet, programs: Path) -> None:
    script(programs / "journalctl", "#!/bin/sh\nexec sleep 60\n")
    script(programs / "systemctl", "#!/bin/sh\ntrap '' TERM; sleep 60 & sleep 60\n")
    file = programs.parent / "bundle.tar.gz"
    own = variables(fleet, programs)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        own["LEASEHOLD_COORDINATOR"] = f"127.0.0.1:{mute.getsockname()[1]}"
        fleet.cli("support-bundle", str(file), "--yes", "--timeout", "10", code=0, **own)
    found = contents(file)
    notes = json.loads(found["manifest.json"])["notes"]
    for name in ("log-worker.txt", "log-coordinator.txt", "unit-worker.txt"):
        assert "did not end within 10 s" in notes[name]
    assert "fleet/workers.json" in notes
    assert {"journal.json", "store.json", "settings.json"} <= set(found)


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_what_the_role_forbids_is_noted(tmp_path: Path, programs: Path) -> None:
    with make_fleet(tmp_path, is_mutual=True) as fleet:
        fleet.start_worker("alpha")
        token = tmp_path / "bob.token"
        token.write_text(fleet.client.enrolment.create_join_token("user/bob").ticket)
        own = {
            **variables(fleet, programs),
            "XDG_CONFIG_HOME": str(tmp_path / "bob"),
            "LEASEHOLD_COORDINATOR": "",
            "LEASEHOLD_CREDENTIALS": "",
        }
        fleet.cli("login", "--token", str(token), code=0, **own)
        file = tmp_path / "bundle.tar.gz"
        fleet.cli("support-bundle", str(file), "--yes", code=0, **own)
        notes = json.loads(contents(file)["manifest.json"])["notes"]
        assert "user/bob" in notes["fleet/workers.json"], notes
        assert "fleet/events.json" in notes
