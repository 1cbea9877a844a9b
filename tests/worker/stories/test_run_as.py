"""Workloads run as the Unix users of their owners, on a worker that is not root."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trio
import trio.testing
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.hook_pb2 import HOOK_PHASE_BEFORE_SUSPEND, CommandHook, Hook, HookCredential
from leasehold.v1.operation_pb2 import (
    AdoptOperation,
    ReleaseOperation,
    RemapOperation,
    RestoreOperation,
    RunOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.worker.v1.session_pb2 import CommandUpdate
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.hooks.credentials import read_token
from leasehold_worker.hooks.http_call import call
from leasehold_worker.host.accounts import account_of, numbered_account
from leasehold_worker.host.capabilities import NEEDED
from leasehold_worker.host.process_files import read_status
from leasehold_worker.host.process_readings import USER_READERS
from leasehold_worker.programs.output_bounds import remove_folders
from leasehold_worker.programs.user_files import UserFileError, connect_as, read_as

from tests.worker.counters import counter_run, counters, counts, read_output, wait_counting
from tests.worker.dead_volumes import dead_volume
from tests.worker.operations.test_handler import move
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session, make_command
from tests.worker.stories.test_membership import wait_until
from tests.worker.unix_users import (
    ALICE_UID,
    BOB_UID,
    CAPABILITIES,
    RUN_AS,
    WORKER_UID,
    UserWorker,
    as_user,
    needs_root,
    open_to_others,
    user_worker,
)

pytestmark = needs_root


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> SimulatedHost:
    folder = tmp_path_factory.mktemp("host")
    return SimulatedHost.create(folder / "host", gpus=4, chip="H100", timing=Timing.instant())


@pytest.fixture(scope="module")
def worker(shared_host: SimulatedHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserWorker]:
    """One worker for all tests, each of which has workloads of its own."""
    coordinator = ScriptedCoordinator()
    try:
        with user_worker(shared_host, coordinator, tmp_path_factory.mktemp("worker")) as started:
            yield started
    finally:
        coordinator.stop()


def run_for(
    owner: str, session: Session, command_id: str, workload_id: str, **operation: object
) -> CommandUpdate:
    """Sends a command for an owner, and waits for its outcome."""
    command = make_command(command_id, workload_id, **operation)
    command.owner = owner
    session.send(command)
    return session.outcome(command_id)


def succeeded(update: CommandUpdate) -> CommandUpdate:
    assert update.state == command_pb2.COMMAND_STATE_SUCCEEDED, update
    return update


def test_the_life_of_a_workload_of_another_user(worker: UserWorker, shared_host: SimulatedHost) -> None:
    session = worker.session
    succeeded(run_for("user/alice", session, "life-c1", "life", run=counter_run("life")))
    wait_counting(session, "life")
    (process,) = counters(shared_host)
    account = account_of(process.pid)
    assert account is not None
    assert (account.uid, account.gid) == (ALICE_UID, ALICE_UID)
    folder = worker.state / "users/life"
    assert folder.stat().st_uid == ALICE_UID
    assert os.readlink(f"/proc/{process.pid}/cwd") == str(folder)
    succeeded(session.run("life-c2", "life", suspend=SuspendOperation()))
    worker.restart()
    session = worker.session
    succeeded(session.run("life-c3", "life", restore=RestoreOperation()))
    wait_counting(session, "life")
    there = move("life", shared_host.gpus[0].uuid, shared_host.gpus[2].uuid)
    succeeded(session.run("life-c4", "life", remap=RemapOperation(moves=[there])))
    text = wait_counting(session, "life", shared_host.gpus[2].uuid)
    found = counts(text)
    assert found == list(range(found[0], found[0] + len(found)))
    succeeded(session.run("life-c5", "life", stop=StopOperation()))
    assert counters(shared_host) == []
    assert counts(read_output(session, "life"))


def shell(script: str, **fields: object) -> RunOperation:
    """A program without a GPU."""
    spec = workload_pb2.WorkloadSpec(arguments=["/bin/sh", "-c", script], **fields)  # type: ignore[arg-type]
    return RunOperation(name="shell", spec=spec)


def test_a_program_has_the_environment_of_its_user_and_nothing_of_the_worker(worker: UserWorker) -> None:
    session = worker.session
    script = "env; id -u; cat worker-file; ls ..; grep ^Cap /proc/self/status; grep NoNew /proc/self/status"
    environment = {"PYTHONPATH": "/of/the/spec", "LD_LIBRARY_PATH": "/of/the/spec"}
    succeeded(run_for("user/alice", session, "env-c1", "env", run=shell(script, environment=environment)))
    session.wait(
        lambda frame: (
            frame.workload_event.workload.workload_id == "env"
            and frame.workload_event.workload.status.HasField("exit")
        )
    )
    said = read_output(session, "env")
    lines = said.splitlines()
    assert {"HOME=/", "USER=2001", "LOGNAME=2001", "SHELL=/bin/sh", str(ALICE_UID)} <= set(lines)
    assert {f"{name}=/of/the/spec" for name in environment} <= set(lines)
    assert not [line for line in lines if line.startswith("XDG_")]
    assert "Permission denied" in said  # the list of the other users' folders
    assert [line.split()[1] for line in lines if line.startswith(("CapEff", "CapPrm", "CapAmb"))] == [
        "0" * 16
    ] * 3
    assert "NoNewPrivs:\t1" in lines


LIMITS = """
* hard nproc 3000
* soft nofile 4000   # a group counts more
@:2001 - nofile 400
:2001 soft nofile 300
* - sigpending unlimited
* hard nofile lots
"""
SHOW_LIMITS = "grep -E 'processes|open files|core file' /proc/self/limits | tr -s ' '"


def test_a_program_and_its_hooks_have_the_limits_of_their_user(worker: UserWorker) -> None:
    session = worker.session
    hook = Hook(
        name="tell",
        phase=HOOK_PHASE_BEFORE_SUSPEND,
        command=CommandHook(arguments=["/bin/sh", "-c", f"{SHOW_LIMITS}; exit 3"]),
    )
    run = counter_run("limits")
    run.spec.hooks.append(hook)
    files = worker.limits / "limits.conf"
    files.write_text(LIMITS)
    try:
        done = succeeded(run_for("user/alice", session, "limits-c1", "limits", run=run))
        (warning,) = done.result.warnings
        assert warning.startswith("user 2001 has the limit sigpending ")
        wait_counting(session, "limits")
        failed = session.run("limits-c2", "limits", suspend=SuspendOperation())
        command = run_for("user/alice", session, "limits-c3", "shown", run=shell(SHOW_LIMITS))
        succeeded(command)
        wait_until(lambda: "open files" in read_output(session, "shown"), "the script has written")
        for said in (failed.error.message, read_output(session, "shown")):
            assert "Max open files 300 400 files" in said
            assert re.search(r"Max processes \d+ 3000 processes", said)
    finally:
        files.unlink()
    assert worker.log.read_text().count("limits.conf: line 7 is invalid") == 1
    succeeded(run_for("user/alice", session, "limits-c4", "usual", run=shell(SHOW_LIMITS)))
    wait_until(lambda: "open files" in read_output(session, "usual"), "the script has written")
    assert "Max open files 1024 " in read_output(session, "usual"), "the worker itself has more"
    succeeded(session.run("limits-c5", "limits", stop=StopOperation()))


def test_who_has_no_unix_user_starts_nothing(worker: UserWorker) -> None:
    session = worker.session
    for number, owner in enumerate(("user/carol", "local/root", "")):
        refused = run_for(owner, session, f"no-c{number}", f"no-w{number}", run=shell("exit"))
        assert refused.state == command_pb2.COMMAND_STATE_REJECTED
        assert refused.error.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
        assert not (worker.state / "workloads" / f"no-w{number}").exists()


def test_files_of_a_workload_lead_the_worker_nowhere(worker: UserWorker, tmp_path: Path) -> None:
    """The output can't be replaced, and the folder is emptied by its user: links and others' files stay."""
    session = worker.session
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    os.chown(outside, WORKER_UID, WORKER_UID)
    script = (
        f"ln -s {outside} link; ln -s /etc/passwd passwd; mkfifo pipe; mkdir closed; touch closed/file;"
        "chmod 0 closed; echo said;"
        "rm -f ../../workloads/files/output.log; mv ../files ../w2; ln -s / ../w3; exec sleep 1000"
    )
    succeeded(run_for("user/alice", session, "files-c1", "files", run=shell(script)))
    wait_until(lambda: "w3" in read_output(session, "files"), "the script is at its end")
    said = read_output(session, "files")
    assert said.startswith("said\n")
    assert said.count("Permission denied") >= 3
    succeeded(session.run("files-c2", "files", stop=StopOperation()))
    alice = numbered_account(ALICE_UID, ALICE_UID)
    folder = worker.state / "users/files"

    async def empty() -> None:
        await remove_folders(worker.state / "workloads/files", folder, alice)

    assert alice.uid == folder.stat().st_uid
    trio.run(empty)
    assert not folder.exists()
    assert (outside / "kept").read_text() == "kept"


def test_a_command_hook_and_its_credentials_are_those_of_the_workload(worker: UserWorker) -> None:
    session = worker.session
    script = "id -u; pwd; grep ^CapEff /proc/self/status; exit 3"
    hook = Hook(
        name="tell",
        phase=HOOK_PHASE_BEFORE_SUSPEND,
        command=CommandHook(arguments=["/bin/sh", "-c", script]),
    )
    run = counter_run("hook")
    run.spec.hooks.append(hook)
    succeeded(run_for("user/alice", session, "hook-c1", "hook", run=run))
    wait_counting(session, "hook")
    failed = session.run("hook-c2", "hook", suspend=SuspendOperation())
    assert failed.error.reason == errors_pb2.ERROR_REASON_HOOK_FAILED
    folder = worker.state / "users/hook"
    assert f"{ALICE_UID}\n{folder}\nCapEff:" in failed.error.message
    assert "0000000000000000" in failed.error.message


def test_a_program_can_not_close_its_output_to_the_worker(worker: UserWorker) -> None:
    """Nobody could read it or bound its size: a worker without root has no CAP_DAC_OVERRIDE."""
    session = worker.session
    script = "chmod 0 /proc/$$/fd/1; echo said; echo more >> /dev/stdout; exec sleep 1000"
    succeeded(run_for("user/alice", session, "closed-c1", "closed", run=shell(script)))
    wait_until(lambda: "more" in read_output(session, "closed"), "the script has written")
    said = read_output(session, "closed")
    assert "Operation not permitted" in said
    assert said.endswith("said\nmore\n")
    succeeded(session.run("closed-c2", "closed", stop=StopOperation()))


@pytest.mark.long
def test_a_file_system_that_hangs_in_a_working_directory_delays_nobody_else(worker: UserWorker) -> None:
    session = worker.session
    hook = Hook(name="tell", phase=HOOK_PHASE_BEFORE_SUSPEND, command=CommandHook(arguments=["/bin/true"]))
    hook.timeout.FromMilliseconds(1500)
    run = counter_run("hung")
    run.spec.hooks.append(hook)
    succeeded(run_for("user/alice", session, "hung-c1", "hung", run=run))
    wait_counting(session, "hung")
    succeeded(run_for("user/bob", session, "hung-c2", "other", run=shell("echo said; exec sleep 1000")))
    wait_until(lambda: "said" in read_output(session, "other"), "the other program has written")
    folder = worker.state / "users/hung"
    with dead_volume(folder, ",allow_other"):  # as fusermount does for the folder's owner
        session.send(make_command("hung-c3", "hung", suspend=SuspendOperation()))
        failed = session.outcome("hung-c3")
        assert failed.error.reason == errors_pb2.ERROR_REASON_HOOK_FAILED
        assert read_output(session, "other") == "said\n"
    succeeded(session.run("hung-c4", "hung", stop=StopOperation()))
    succeeded(session.run("hung-c5", "other", stop=StopOperation()))


async def test_files_that_hang_for_one_user_delay_no_other_user(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    alice, bob = (numbered_account(uid, uid) for uid in (ALICE_UID, BOB_UID))
    (tmp_path / "token").write_text("of-bob")
    (tmp_path / "token").chmod(0o644)
    with dead_volume(tmp_path / "dead", ",allow_other"):
        async with trio.open_nursery() as nursery:

            async def hang() -> None:
                with pytest.raises(UserFileError, match="no answer within"):
                    await read_as(alice, str(tmp_path / "dead/file"), 100, 15)

            for _ in range(USER_READERS + 1):
                nursery.start_soon(hang)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(14):
                assert await read_as(bob, str(tmp_path / "token"), 100, 14) == b"of-bob"
            nursery.cancel_scope.cancel()


async def test_a_file_is_read_with_the_rights_of_its_user(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    alice = numbered_account(ALICE_UID, ALICE_UID)
    secret = tmp_path / "secret"
    secret.write_text("of-root")
    secret.chmod(0o600)
    with pytest.raises(UserFileError, match="Permission denied"):
        await read_as(alice, str(secret), 100, 30)
    os.chown(secret, ALICE_UID, ALICE_UID)
    assert await read_as(alice, str(secret), 100, 30) == b"of-root"
    assert await read_token(HookCredential(file=str(secret)), {}, alice) == "of-root"
    os.mkfifo(tmp_path / "pipe", 0o666)
    with pytest.raises(UserFileError, match="not a regular file"):
        await read_as(alice, str(tmp_path / "pipe"), 100, 30)


async def test_a_read_that_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match="no answer within"):
        await read_as(numbered_account(ALICE_UID, ALICE_UID), str(tmp_path), 100, 0.0)


def capabilities_of(pid: int) -> set[int]:
    """The effective capabilities of a process, by their numbers."""
    mask = int(read_status(pid)["CapEff"], 16)
    return {number for number in range(64) if mask >> number & 1}


@contextmanager
def bobs_counter(
    worker: UserWorker, host: SimulatedHost, tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of bob's on a GPU, which nobody leases."""
    open_to_others(tmp_path)
    variables = {**worker.variables, "CUDA_VISIBLE_DEVICES": host.gpus[3].uuid}
    command = [*as_user(BOB_UID), *counter_run("any").spec.arguments]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd="/")
    try:
        wait_until(lambda: b"count=2" in (tmp_path / "output").read_bytes(), "it counts")
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)


@pytest.fixture
def counter_of_bob(
    worker: UserWorker, shared_host: SimulatedHost, tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with bobs_counter(worker, shared_host, tmp_path) as process:
        yield process


def test_hooks_of_an_adoption_are_for_processes_of_the_owner(
    worker: UserWorker, counter_of_bob: subprocess.Popen[bytes]
) -> None:
    """Alice's hooks would act for her upon bob's process. Without them, she may have it adopted."""
    session = worker.session
    command = CommandHook(arguments=["true"])
    hooked = AdoptOperation(
        name="bobs",
        pid=counter_of_bob.pid,
        hooks=[Hook(name="tell", phase=HOOK_PHASE_BEFORE_SUSPEND, command=command)],
    )
    refused = run_for("user/alice", session, "adopt-c1", "adopt-1", adopt=hooked)
    assert refused.error.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
    assert "maps user/alice to another user" in refused.error.message
    plain = AdoptOperation(name="bobs", pid=counter_of_bob.pid)
    succeeded(run_for("user/alice", session, "adopt-c2", "adopt-2", adopt=plain))
    succeeded(session.run("adopt-c3", "adopt-2", release=ReleaseOperation()))
    succeeded(run_for("user/bob", session, "adopt-c4", "adopt-3", adopt=hooked))
    succeeded(session.run("adopt-c5", "adopt-3", suspend=SuspendOperation()))
    succeeded(session.run("adopt-c6", "adopt-3", restore=RestoreOperation()))
    succeeded(session.run("adopt-c7", "adopt-3", release=ReleaseOperation()))


@pytest.fixture
def returning() -> Iterator[subprocess.Popen[bytes]]:
    """A process of root's that is the user 2001 now, and may become root again."""
    become = "import os, sys, time; os.seteuid(2001); print(flush=True); time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", become], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate(timeout=30)


@pytest.fixture
def of_root() -> Iterator[subprocess.Popen[bytes]]:
    """A process of root's."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait(timeout=30)


@pytest.mark.long
def test_an_adoption_is_of_processes_of_the_owners_user_or_of_named_ones(
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    of_root: subprocess.Popen[bytes],
    returning: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    """A worker that is root could suspend and stop everybody's processes, for each operator."""
    (tmp_path / "worker").mkdir()
    mapped = RUN_AS.partition("\n")[2]
    with (
        user_worker(host, coordinator, tmp_path / "worker", mapped, uid=0) as started,
        bobs_counter(started, host, tmp_path) as counter,
    ):
        session, config = started.session, tmp_path / "worker/worker.toml"
        plain = AdoptOperation(name="bobs", pid=counter.pid)

        def refuse(owner: str, command_id: str, match: str, pid: int = plain.pid) -> None:
            refused = run_for(owner, session, command_id, command_id, adopt=AdoptOperation(pid=pid))
            assert refused.error.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
            assert re.search(match, refused.error.message)

        refuse("user/alice", "own-c1", "only processes of 2001, the Unix user of user/alice may.*adopt_users")
        refuse("user/carol", "own-c2", "run_as names no Unix user for user/carol")
        refuse("user/alice", "own-c0", "can run as root, and only processes of 2001", pid=returning.pid)
        refuse("user/bob", "own-c3", "runs as root, and only processes of 2002", pid=of_root.pid)
        succeeded(run_for("user/bob", session, "own-c4", "own-w", adopt=plain))
        succeeded(session.run("own-c5", "own-w", release=ReleaseOperation()))
        config.write_text(RUN_AS)
        started.restart()
        session = started.session
        refuse("user/alice", "own-c6", r"runs as root, .* of \*", pid=of_root.pid)
        succeeded(run_for("user/alice", session, "own-c7", "own-v", adopt=plain))
        succeeded(session.run("own-c8", "own-v", release=ReleaseOperation()))


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


@pytest.mark.long
def test_a_worker_drops_what_it_does_not_need(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    given = (*CAPABILITIES, "dac_override", "sys_admin", "net_raw")
    with user_worker(host, coordinator, tmp_path, capabilities=given) as worker:
        assert capabilities_of(worker.process.pid) == NEEDED


@pytest.mark.long
@pytest.mark.parametrize("missing", CAPABILITIES)
def test_each_capability_is_needed(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path, missing: str
) -> None:
    """Without one of them, an operation is refused or fails, and says why."""
    given = tuple(name for name in CAPABILITIES if name != missing)
    with user_worker(host, coordinator, tmp_path, capabilities=given) as worker:
        session = worker.session
        started = run_for("user/alice", session, "c1", "w1", run=counter_run("w1"))
        if missing in ("setuid", "setgid", "chown"):
            assert started.error.reason == errors_pb2.ERROR_REASON_SPAWN_FAILED
            assert "not permitted" in started.error.message
            return
        succeeded(started)
        wait_counting(session, "w1")
        if missing == "sys_ptrace":
            refused = session.run("c2", "w1", suspend=SuspendOperation())
            assert refused.error.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
        else:
            failed = session.run("c2", "w1", stop=StopOperation())
            assert failed.error.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
        for process in counters(host):
            os.kill(process.pid, signal.SIGKILL)


def test_a_child_is_closed_to_its_user_until_its_exec() -> None:
    """It has the memory of the worker, whose environment may hold secrets."""
    code = "from leasehold_worker.programs.user_change import take_on; take_on('2001:2001:2001'); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        wait_until(
            lambda: (user := account_of(child.pid)) is not None and user.uid == ALICE_UID, "it is alice's"
        )
        look = [*as_user(ALICE_UID), "cat", f"/proc/{child.pid}/environ"]
        seen = subprocess.run(look, capture_output=True, text=True, check=False)
        child.communicate(b"\n")
    assert child.returncode == 0
    assert "Permission denied" in seen.stderr


async def test_a_request_of_a_hook_is_a_connection_of_its_user() -> None:
    """The kernel says whose it is, in the table of all connections."""
    alice = numbered_account(ALICE_UID, ALICE_UID)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with await connect_as(alice, "127.0.0.1", port, 30) as connection:
            own = connection.getsockname()[1]
            table = (await trio.Path("/proc/net/tcp").read_text()).splitlines()[1:]
            rows = [line.split() for line in table]
            # Another process of the host may have the port for another peer.
            ends = [f"0100007F:{number:04X}" for number in (own, port)]
            assert [row[7] for row in rows if row[1:3] == ends] == [str(ALICE_UID)]
    with pytest.raises(UserFileError, match="refused"):
        await connect_as(alice, "127.0.0.1", port, 30)


async def test_a_hook_calls_a_server_as_its_user() -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/health"
        with trio.fail_after(30):
            answer = await call("GET", url, account=numbered_account(ALICE_UID, ALICE_UID))
        thread.join()
    assert (answer.status, answer.body) == (200, b"{}")


@pytest.mark.long
def test_a_lost_journal_and_a_volume_on_the_folder_of_a_program_keep_no_worker_from_its_start(
    worker: UserWorker,
) -> None:
    succeeded(run_for("user/alice", worker.session, "stray-c1", "stray", run=shell("exec sleep 1000")))
    worker.process.kill()
    worker.process.wait(timeout=30)
    for path in worker.state.glob("journal.sqlite3*"):
        path.unlink()
    with dead_volume(
        worker.state / "users/stray", f",user_id={ALICE_UID}"
    ):  # refuses all others, as fusermount's
        worker.start()
        session = worker.session
        assert [each.user for each in session.hello.workloads if each.workload_id == "stray"] == [
            str(ALICE_UID)
        ]
        succeeded(session.run("stray-c2", "stray", stop=StopOperation()))
