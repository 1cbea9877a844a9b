"""Whose a worker's directories may be, and what other users can do there."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2
from leasehold.v1.operation_pb2 import RunOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_worker.agent import daemon
from leasehold_worker.errors import StartError
from leasehold_worker.files import private_directories
from leasehold_worker.files.private_directories import PASSABLE, open_private, require_private
from leasehold_worker.files.state_directory import open_state_directory
from leasehold_worker.local_api.unix_socket import LocalSocket

from tests.worker.conftest import WorkerProcess
from tests.worker.dead_volumes import dead_volume
from tests.worker.scripted_coordinator import ScriptedCoordinator
from tests.worker.unix_users import open_to_others

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root only can give files to another user")


def test_a_missing_directory_is_made_for_the_worker_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "state"
    open_private(path, "state directory")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@as_root
@pytest.mark.parametrize("which", ["state", "state/workloads", "."])
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, which: str) -> None:
    (tmp_path / "state" / "workloads").mkdir(parents=True)
    os.chown(tmp_path / which, NOBODY, NOBODY)
    with pytest.raises(StartError, match=f"belongs to user id {NOBODY}, and the worker runs as 0"):
        open_private(tmp_path / "state", "state directory")


@as_root
@pytest.mark.parametrize("link", ["state", "state/lock", "state/journal.sqlite3"])
def test_a_link_of_somebody_else_is_not_followed(tmp_path: Path, link: str) -> None:
    victim = tmp_path / "victim"
    if link == "state":
        victim.mkdir()
    else:
        (tmp_path / "state").mkdir()
    (tmp_path / link).symlink_to(victim)
    os.lchown(tmp_path / link, NOBODY, NOBODY)
    with pytest.raises(StartError, match=f"belongs to user id {NOBODY}"):
        open_private(tmp_path / "state", "state directory")
    assert not victim.exists() or not list(victim.iterdir())


def test_a_directory_that_everybody_can_rename_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "state").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(StartError, match="every user can write to"):
        open_private(shared / "state", "state directory")
    with pytest.raises(StartError, match="every user can write to"):
        LocalSocket(shared / "worker.sock", "")
    shared.chmod(0o1777)  # as /tmp
    open_private(shared / "state", "state directory")
    require_private(shared / "state", "state directory")


def test_what_was_open_to_others_is_closed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "workloads").mkdir(parents=True, mode=0o755)
    (state / "journal.sqlite3").touch(0o644)
    open_private(state, "state directory", PASSABLE)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.iterdir())}
    assert found == {"state": 0o711, "workloads": 0o700, "journal.sqlite3": 0o600}


def test_a_second_start_closes_nothing_and_the_folders_of_users_stay_open(tmp_path: Path) -> None:
    """Running programs of other Unix users pass through their parent."""
    state = tmp_path / "state"
    (state / "users").mkdir(parents=True)
    (state / "users").chmod(PASSABLE)

    def modes() -> list[int]:
        return [stat.S_IMODE(path.stat().st_mode) for path in (state, state / "users")]

    with open_state_directory(state, PASSABLE):
        assert modes() == [PASSABLE, PASSABLE]
        with pytest.raises(StartError, match="another worker"), open_state_directory(state):
            pass
        assert modes() == [PASSABLE, PASSABLE]


@pytest.mark.parametrize(
    ("name", "content"), [("epoch", b"many"), ("epoch", b""), ("worker_id", b"\xff"), ("worker_id", b"")]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    with open_state_directory(tmp_path / "state") as state:
        (tmp_path / "state" / name).write_bytes(content)
        with pytest.raises(StartError, match=f"{name} is damaged"):
            state.last_epoch() if name == "epoch" else state.worker_id()


def test_other_users_read_nothing_of_a_worker_and_programs_keep_their_umask(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    start_worker(None)
    session = coordinator.next_session()
    spec = WorkloadSpec(arguments=["sh", "-c", f"umask > {tmp_path}/umask; exec sleep 1000"])
    outcome = session.run("c1", "w1", run=RunOperation(name="one", spec=spec))
    assert outcome.state == command_pb2.COMMAND_STATE_SUCCEEDED
    (state,) = (path.parent for path in tmp_path.glob("**/journal.sqlite3"))
    assert stat.S_IMODE(state.stat().st_mode) == 0o711
    for path in state.iterdir():
        if not path.is_socket():
            assert not path.stat().st_mode & 0o077, path
    while not (said := (tmp_path / "umask").read_text() if (tmp_path / "umask").exists() else ""):
        pass
    assert int(said, 8) == private_directories.STARTED_WITH


@pytest.mark.long
def test_only_the_worker_enters_a_state_directory_without_socket_and_users(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """With run_as, or with the socket in it, other users pass through to what is theirs."""
    config = tmp_path / "worker.toml"
    open_to_others(tmp_path)
    config.write_text('[run_as]\n"user/alice" = "2001:2001"\n')
    for options, mode in (({}, 0o700), ({"config": str(config)}, 0o711)):
        worker = start_worker(None, f"state-{mode}", socket=str(tmp_path / "worker.sock"), **options)
        coordinator.next_session()
        assert stat.S_IMODE((tmp_path / f"state-{mode}").stat().st_mode) == mode
        assert worker.stop() == 0


def test_an_image_directory_that_does_not_answer_is_told_at_the_start(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with (
        dead_volume(volume),
        pytest.raises(StartError, match="check its volume"),
    ):
        daemon._require_image_directory(volume / "images", within_s=0.2)


def test_an_image_directory_that_is_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.touch()
    with pytest.raises(StartError, match=r"images is not a directory: .* the setting image_dir$"):
        daemon._require_image_directory(path)
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    daemon._require_image_directory(tmp_path / "link")  # the volume may be mounted later


def test_an_image_directory_that_refuses_the_worker_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a volume whose server lets root in later. Root passes the modes of directories."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "stat", refuse)
    daemon._require_image_directory(tmp_path / "images", within_s=5)
    assert "can't be checked: Permission denied" in caplog.text


@as_root
def test_an_image_directory_of_another_user_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(StartError, match="image directory"):
        daemon._require_image_directory(path)


@pytest.mark.parametrize("root", ["/", "//", "/proc/.."])
def test_the_root_directory_is_refused_before_any_change(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the root directory would be changed")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StartError, match="is the root directory: choose another"):
        open_private(Path(root), "state directory")
