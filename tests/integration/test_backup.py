"""The disk of a coordinator is lost, and restored from a backup while workers and workloads run on."""

import errno
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_RUNNING, WORKLOAD_STATE_SUSPENDED
from leasehold_coordinator.access.private_files import open_directory
from leasehold_coordinator.access.secret_vault import open_vault
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server import backup as backups
from leasehold_coordinator.server.backup import STATE_FILES, TEMPORARY, _naming, _state_files
from leasehold_coordinator.server.transport import open_state
from leasehold_coordinator.storage.backup_archive import describe, unpack, write_archive

from tests.integration.fleets import TIMEOUT_S, Fleet, make_fleet
from tests.integration.test_enrolment import join, set_directories
from tests.prefork import COMMAND_LINE, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, with the directories of daemons and verbs in it."""
    set_directories(tmp_path, monkeypatch)
    return tmp_path


def lose_disk(fleet: Fleet) -> None:
    """Kills the coordinator, and removes all its files."""
    fleet.kill_coordinator()
    shutil.rmtree(fleet.folder / "XDG_STATE_HOME" / "leasehold")
    for path in fleet.folder.glob("store.*"):
        path.unlink()


def back_up(fleet: Fleet, verb: str) -> str:
    """Creates or restores a backup, and returns what the verb printed."""
    database = str(fleet.folder / "store.sqlite3")
    return fleet.cli("backup", verb, "--database", database, str(fleet.folder / "backup.tar.gz")).stdout


@pytest.fixture
def fleet(folder: Path, is_mutual: bool) -> Iterator[Fleet]:
    """A coordinator with a state directory of its own."""
    with make_fleet(folder, is_mutual=is_mutual) as started:
        yield started


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backup of a coordinator that has stopped."""
    folder = tmp_path_factory.mktemp("backup")
    with pytest.MonkeyPatch.context() as patch:
        set_directories(folder, patch)
        with make_fleet(folder) as started:
            back_up(started, "create")
    return folder / "backup.tar.gz"


@pytest.mark.long
def test_what_was_done_since_the_backup_is_found(fleet: Fleet) -> None:
    fleet.start_worker("alpha")
    fleet.run_counter("before")
    fleet.run_counter("parked")
    assert "the store up to commit " in back_up(fleet, "create")
    fleet.run_counter("after")
    fleet.cli("suspend", "parked")
    lose_disk(fleet)
    assert "start the coordinator with --store-restored" in back_up(fleet, "restore")
    fleet.options = ("--store-restored",)
    fleet.start_coordinator()
    expected = {
        "before": WORKLOAD_STATE_RUNNING,
        "parked": WORKLOAD_STATE_SUSPENDED,
        "after": WORKLOAD_STATE_RUNNING,
    }
    # The worker is connected before its reports are stored.
    fleet.wait(lambda: {one.name: one.status.state for one in fleet.client.workloads()} == expected)
    fleet.cli("restore", "parked")
    for name in expected:
        fleet.wait_counting(name)
        fleet.cli("stop", name)
    fleet.cli("audit", "verify")


@pytest.mark.long
def test_a_worker_that_joined_since_the_backup_comes_back(folder: Path) -> None:
    with make_fleet(folder, "--listen", "0.0.0.0:0", "--worker-listen", "0.0.0.0:0") as fleet:
        port = fleet.worker_address.rpartition(":")[2]
        fleet.address = f"unix:{folder / 'store.sock'}"
        back_up(fleet, "create")
        join(fleet, "gpu-01")
        lose_disk(fleet)
        back_up(fleet, "restore")
        fleet.address = "0.0.0.0:0"
        fleet.options = ("--listen", "0.0.0.0:0", "--worker-listen", f"0.0.0.0:{port}", "--store-restored")
        fleet.start_coordinator()
        fleet.address = f"unix:{folder / 'store.sock'}"
        fleet.wait(lambda: fleet.worker_state("gpu-01") == "WORKER_STATE_CONNECTED")


@pytest.mark.long
def test_a_worker_that_joined_comes_back_to_a_coordinator_without_its_store(folder: Path) -> None:
    listen = ("--listen", "0.0.0.0:0", "--worker-listen")
    with make_fleet(folder, *listen, "0.0.0.0:0") as fleet:
        port = fleet.worker_address.rpartition(":")[2]
        fleet.address = f"unix:{folder / 'store.sock'}"
        join(fleet, "gpu-01")
        fleet.kill_coordinator()
        (folder / "store.sqlite3").rename(folder / "away.sqlite3")
        fleet.address = "0.0.0.0:0"
        fleet.options = (*listen, f"0.0.0.0:{port}", "--store-restored")
        with pytest.raises(AssertionError, match="is missing or empty"):
            fleet.start_coordinator()
        fleet.kill_coordinator()
        for path in folder.glob("store.sqlite3*"):
            path.rename(folder / f"away-{path.name}")
        fleet.start_coordinator()
        fleet.address = f"unix:{folder / 'store.sock'}"
        fleet.wait(lambda: fleet.worker_state("gpu-01") == "WORKER_STATE_CONNECTED")


@pytest.mark.long
def test_a_workload_that_was_suspended_since_the_backup_survives_a_restore_beside_its_worker(
    folder: Path,
) -> None:
    """Coordinator and worker have the default layout: the worker's directory is in the coordinator's."""
    state = folder / "XDG_STATE_HOME" / "leasehold"
    state.mkdir(mode=0o700)
    archive, database = str(folder / "backup.tar.gz"), str(state / "store.sqlite3")
    with make_fleet(state) as fleet:
        fleet.start_worker("worker", settings='stop_workloads = "leave"\n')
        fleet.run_counter("parked", worker="worker")
        fleet.cli("backup", "create", "--database", database, archive)
        fleet.cli("suspend", "parked")
        fleet.kill_coordinator()
        for name in STATE_FILES:
            (state / name).unlink(missing_ok=True)
        for path in state.glob("store.*"):
            path.unlink()
        fleet.cli("backup", "restore", "--database", database, archive)
        fleet.end("worker", signal.SIGTERM)
        fleet.options = ("--store-restored",)
        fleet.start_coordinator()
        fleet.start_worker("worker", settings='stop_workloads = "stop"\n')
        fleet.wait(
            lambda: [one.status.state for one in fleet.client.workloads()] == [WORKLOAD_STATE_SUSPENDED]
        )
        fleet.cli("restore", "parked")
        fleet.wait_counting("parked")


WORKER_FILES = (
    *("worker_id", "epoch", "last_journal", "lock", "starts", "enrolment.json", "keys/images.key"),
    *("journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm", "journal.sqlite3-seal"),
)


def add_others(state: Path) -> dict[str, bytes]:
    """Adds the files of a worker and of others to a state directory, and returns all by name."""
    names = [f"{worker}/{name}" for worker in ("worker", "gpu-01") for name in WORKER_FILES]
    names += [
        "other.sqlite3",
        "own.sqlite3-tables-0014",
        "audit.json",
        "0123.web-sessions",
        "keys/others.key",
    ]
    for name in names:
        (state / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / name).write_bytes(name.encode())
    return {name: (state / name).read_bytes() for name in names}


def test_a_backup_has_each_file_of_a_coordinator_and_no_other(tmp_path: Path) -> None:
    state = tmp_path / "state"
    authorities, _ = open_state(state)
    authorities.add()
    open_vault(state)
    made = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert made == set(STATE_FILES)
    add_others(state)
    assert _state_files(state) == {name: state / name for name in STATE_FILES}
    archive = tmp_path / "backup.tar.gz"
    backups.create(state, "postgresql://host/store", archive)
    with tarfile.open(archive) as tar:
        assert set(tar.getnames()) == {"manifest.json", *STATE_FILES}


def test_a_running_coordinator_has_no_file_that_a_backup_should_have(fleet: Fleet) -> None:
    state = fleet.folder / "XDG_STATE_HOME" / "leasehold"
    made = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert made == set(STATE_FILES) - {"ca-next.key"}


def test_a_restore_leaves_the_files_of_others(backup: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    open_directory(state)
    others = add_others(state)
    manifest, left_out = backups.restore(backup, state, str(state / "own.sqlite3"))
    assert left_out == []
    assert {name: (state / name).read_bytes() for name in others} == others
    assert {*_state_files(state)} == manifest.files.keys() - {backups.STORE}
    assert (state / "own.sqlite3").stat().st_size == manifest.files[backups.STORE].size_bytes


def test_a_restore_leaves_out_other_files_of_an_archive(backup: Path, tmp_path: Path) -> None:
    archive, state = tmp_path / "backup.tar.gz", tmp_path / "state"
    found = add_others(tmp_path / "others")
    others = {name: content for name, content in found.items() if name.count("/") < 2}
    add_members(backup, archive, others)
    done = run(
        COMMAND_LINE,
        ["backup", "restore", "--state-dir", str(state), str(archive)],
        env=dict(os.environ),
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    first = ", ".join(sorted(others)[:8])
    assert done.stderr == (
        "leasehold backup: a backup has only the store, the keys, the certificates and the tokens, so these "
        f"files of the archive were not restored: {first} and {len(others) - 8} more; copy files that the "
        "settings name by hand\n"
    )
    restored = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert restored == {*STATE_FILES, backups.STORE} - {"ca-next.key"}
    assert f"{len(restored)} files of " in done.stdout


def add_members(backup: Path, archive: Path, contents: dict[str, bytes]) -> None:
    """Writes a backup anew, with further files."""
    folder = archive.parent / "unpacked"
    folder.mkdir()
    manifest = unpack(backup, folder)
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    sources = {name: folder / name for name in (*manifest.files, *contents)}
    files = {name: describe(path, 0o600) for name, path in sources.items()}
    with archive.open("wb") as file:
        write_archive(file, msgspec.structs.replace(manifest, files=files), sources)


@pytest.mark.parametrize("name", [*STATE_FILES, "own.sqlite3", "own.sqlite3-seal"])
def test_a_restore_overwrites_no_file_of_a_coordinator(backup: Path, tmp_path: Path, name: str) -> None:
    state = tmp_path / "state"
    open_directory(state)
    (state / name).parent.mkdir(exist_ok=True)
    (state / name).symlink_to("nowhere")
    with pytest.raises(StartError, match=f"overwrites nothing: {state / name}; stop the coordinator"):
        backups.restore(backup, state, str(state / "own.sqlite3"))
    assert [path for path in state.rglob("*") if not path.is_dir()] == [state / name]


@pytest.mark.parametrize("name", ["ca.key", "ca-next.key", "keys/requests.key"])
def test_a_backup_without_a_file_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    state, archive = tmp_path / "state", tmp_path / "backup.tar.gz"
    open_state(state)
    open_vault(state)
    (state / name).unlink(missing_ok=True)
    (state / name).symlink_to(tmp_path / "other.key")
    (tmp_path / "other.key").write_bytes(b"key")
    with pytest.raises(StartError, match=f"{state / name} is not a regular file"):
        backups.create(state, "postgresql://host/store", archive)
    assert not archive.exists()


@pytest.mark.parametrize(("is_link", "mode"), [(True, 0o700), (False, 0o777)])
def test_no_key_is_restored_into_a_directory_of_others(
    backup: Path, tmp_path: Path, is_link: bool, mode: int
) -> None:
    state, keys = tmp_path / "state", tmp_path / "state" / "keys"
    open_directory(state)
    place = tmp_path / "elsewhere" if is_link else keys
    place.mkdir()
    place.chmod(mode)
    if is_link:
        keys.symlink_to(place)
    with pytest.raises(StartError, match=rf"{keys} is not a directory|other users may change {keys}"):
        backups.restore(backup, state, str(state / "own.sqlite3"))
    assert [path for path in (*state.rglob("*"), *place.iterdir()) if path != keys] == []


def test_files_of_the_settings_in_the_state_directory_are_told(tmp_path: Path) -> None:
    state, settings = tmp_path / "state", tmp_path / "state" / "coordinator.toml"
    open_state(state)
    named = {
        "tls_certificate": tmp_path / "server.pem",
        "tls_key": state / "tls" / "server.key",
        "tls_client_ca": state / "ca.pem",  # is in the backup
        "audit_file": state / "audit.jsonl",
    }
    lines = [f'{name} = "{path}"' for name, path in named.items()]
    settings.write_text("\n".join([*lines, f'state_dir = "{state}"', 'database = "postgresql://host/store"']))
    archive = str(tmp_path / "backup.tar.gz")
    command = ["backup", "create", "--config", str(settings), archive]
    done = run(COMMAND_LINE, command, env=dict(os.environ), timeout=TIMEOUT_S)
    assert done.returncode == 0
    assert done.stderr == (
        "leasehold backup: the backup lacks these files of the settings in the state directory: "
        f"--config {settings}, tls_key {named['tls_key']}, audit_file {named['audit_file']}; copy these "
        "files by hand, and the numbered older files of an audit_file\n"
    )


def test_an_error_of_a_temporary_file_names_the_archive(fleet: Fleet, tmp_path: Path) -> None:
    archive = tmp_path / "none" / "backup.tar.gz"
    match = rf"{archive}: No such file or directory: check the directory"
    fleet.refuse("backup", "create", str(archive), code=1, match=match)
    temporary, key = str(archive.parent / f"{TEMPORARY}x" / "archive"), "/state/ca.key"
    full = "No space left on device"
    for names, told in (
        ((), str(archive)),
        ((temporary,), str(archive)),
        ((key, None, temporary), str(archive)),
        ((key,), key),
    ):
        assert _naming(archive, OSError(errno.ENOSPC, full, *names)).filename == told
    assert str(_naming(archive, OSError("unexpected end of data"))) == "unexpected end of data"


def test_a_directory_without_files_of_a_coordinator_is_no_state_directory(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    for _ in range(2):
        with pytest.raises(StartError, match=f"{wrong} has no files of a coordinator: .* with --state-dir"):
            backups.create(wrong, str(wrong / "coordinator.sqlite3"), tmp_path / "c.tgz")
        wrong.mkdir(exist_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


def test_an_archive_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartError, match=r"pipe can't be used: it is not a regular file"):
        backups.restore(tmp_path / "pipe", tmp_path / "state", str(tmp_path / "state/coordinator.sqlite3"))
    assert not (tmp_path / "state").exists()


def test_settings_that_are_wrong_are_a_usage_error(fleet: Fleet, tmp_path: Path) -> None:
    settings = tmp_path / "coordinator.toml"
    settings.write_text('lissten = "127.0.0.1:0"\n')
    archive = str(tmp_path / "backup.tar.gz")
    fleet.refuse("backup", "create", "--config", str(settings), archive, code=2, match="lissten")
    fleet.refuse("backup", "create", "--state-dir", "", archive, code=2, match="is empty")


@pytest.mark.long
def test_nothing_is_overwritten(fleet: Fleet) -> None:
    back_up(fleet, "create")
    database, archive = str(fleet.folder / "store.sqlite3"), str(fleet.folder / "backup.tar.gz")
    match = "backup.tar.gz exists: choose another name"
    fleet.refuse("backup", "create", "--database", database, archive, code=1, match=match)
    match = (
        "a coordinator's files exist, and a restore overwrites nothing: .*/ca.pem, .*; stop the coordinator"
    )
    fleet.refuse("backup", "restore", "--database", database, archive, code=1, match=match)
    empty = str(fleet.folder / "empty")
    match = "overwrites nothing: [^,]*store.sqlite3, "
    fleet.refuse(
        *("backup", "restore", "--state-dir", empty, "--database", database, archive), code=1, match=match
    )


def test_a_backup_is_not_written_into_the_state_directory(fleet: Fleet) -> None:
    state = fleet.folder / "XDG_STATE_HOME" / "leasehold"
    match = "backup.tar.gz would be in the state directory"
    archive = str(state / "backup.tar.gz")
    fleet.refuse("backup", "create", archive, code=1, match=match)


def test_an_output_that_nobody_takes_is_no_failure_of_the_backup(backup: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    restore = (
        f"{shlex.join([sys.executable, '-c', COMMAND_LINE])} backup restore --state-dir {state} {backup}"
    )
    for output, code, said in (
        ("| true", 0, ""),
        ("> /dev/full", 1, "leasehold: can't write the output: No space left on device\n"),
    ):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; (sleep 0.2; {restore}) {output}"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert (done.returncode, done.stderr) == (code, said)
        assert (state / "ca.pem").exists()
        shutil.rmtree(state)


def test_a_backup_is_restored_into_a_private_directory(backup: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    for mode in (0o777, 0o755):
        state.mkdir(exist_ok=True)
        state.chmod(mode)
        done = run(
            COMMAND_LINE,
            ["backup", "restore", "--state-dir", str(state), str(backup)],
            env=dict(os.environ),
            timeout=TIMEOUT_S,
        )
        if mode == 0o777:
            assert done.returncode == 1
            assert f"other users may change {state}" in done.stderr
            assert list(state.iterdir()) == []
    assert done.returncode == 0, done.stderr
    assert state.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_during_a_restore_is_told_with_its_directory(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(backups, "unpack", unpack)
    state = tmp_path / "new" / "state"
    with pytest.raises(OSError, match="No space left") as error:
        backups.restore(backup, state, str(state / "store.sqlite3"))
    assert error.value.filename == str(state)
    assert not state.parent.exists()


def change_checksum(archive: Path) -> None:
    """Changes a bit of the checksum at the end."""
    data = bytearray(archive.read_bytes())
    data[-8] ^= 1
    archive.write_bytes(data)


def cut_off(archive: Path) -> None:
    """Removes the end of the file."""
    os.truncate(archive, archive.stat().st_size - 100)


def rewrite(archive: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> None:
    """Writes the members of an archive anew, each with another name or content."""
    with tarfile.open(archive) as old:
        members = [(member.name, old.extractfile(member)) for member in old]
        contents = [(name, file.read()) for name, file in members if file is not None]
    with tarfile.open(archive, "w:gz") as new:
        for pair in contents:
            name, content = change(*pair)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))


def replace_in(member: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replaces bytes in a member of an archive."""
    return lambda archive: rewrite(
        archive, lambda name, data: (name, data.replace(old, new) if name == member else data)
    )


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (change_checksum, "can't be used: CRC check failed"),
        (cut_off, "can't be used: its end is missing"),
        (
            lambda archive: archive.write_text("text"),
            "can't be used: it is no archive of `leasehold backup create`",
        ),
        (replace_in("ca.pem", b"BEGIN", b"BEGUN"), "ca.pem has another content"),
        (replace_in("manifest.json", b'"ca.pem"', b'"ca.pen"'), "which its manifest does not list"),
        (replace_in("manifest.json", b'"ca.pem"', b'"../ca.pem"'), "is not a name of a file"),
        (replace_in("manifest.json", b'"format": 1', b'"format": 2'), "format 2, and this release reads 1"),
        (replace_in("manifest.json", b'"migration": "', b'"migration": "9'), "install leasehold"),
    ],
    ids=["bit", "end", "text", "content", "name", "path", "format", "release"],
)
def test_a_damaged_or_newer_backup_is_refused_and_leaves_nothing(
    backup: Path, tmp_path: Path, damage: Callable[[Path], None], match: str
) -> None:
    archive = tmp_path / "backup.tar.gz"
    archive.write_bytes(backup.read_bytes())
    damage(archive)
    state = tmp_path / "new" / "state"
    done = run(
        COMMAND_LINE,
        ["backup", "restore", "--state-dir", str(state), str(archive)],
        env=dict(os.environ),
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert re.search(match, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not state.parent.exists()
