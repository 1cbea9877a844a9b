"""The shim of a workload: it starts or restores the program, outlives the worker, and records the exit.

``FOLDER BOOT_ID STATUS_FD DESCRIPTORS GROUP LIMITS USER ENVIRONMENT_FD WORKING_DIRECTORY PROGRAM
[ARGUMENT…]`` starts a program, which gets the shim's output. DESCRIPTORS limits its open files, GROUP is its
control group or empty, LIMITS and USER are the limits and the Unix user that it takes on
(:mod:`leasehold_worker.programs.user_change`), and ENVIRONMENT_FD holds its environment. The child enters the
working directory as that user, and only then the shim records the child: if that volume hangs, the worker
gives up the shim. One shim lives as long as each workload, so it imports little. Orphans of the program
become children of the shim, which ends after them.

``--restore FOLDER BOOT_ID STATUS_FD TIMEOUT_S GROUP CRIU PID`` has CRIU restore a program from an image
as a child of the shim, under this pid. Standard input holds the request for CRIU.

The shim keeps the worker's user, without capabilities. So programs of other users can neither signal nor
trace it, nor change its records.

The shim writes two files to the folder: ``process`` identifies the program, and ``exit`` says how it ended.
The shim takes the disk space of ``exit`` before the program starts, which may fill the disk.
link(2) creates ``process``, so only one process can. A worker that abandons a start creates it, and nothing
starts. CRIU stops a restored program until the shim has created the file, and kills the program otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

from leasehold_worker.programs.error_text import error_text
from leasehold_worker.programs.user_change import drop_capabilities, take_limits, take_on

TYPE_CHECKING = False  # importing typing would take more memory than the whole shim
if TYPE_CHECKING:
    from typing import NoReturn

PROCESS_FILE = "process"
EXIT_FILE = "exit"
RESERVED_FILE = "exit.reserved"
RESERVED_BYTES = 1024
RESTORE = "--restore"
GIVEN_UP = "the worker has given up this start"

# Numbers of CRIU's messages (leasehold_worker/criu/criu.proto), where there is no protobuf.
TYPE, SUCCESS, NOTIFICATION, NOTIFY, SCRIPT = 1, 2, 5, 6, 1
POST_RESTORE = b"post-restore"
GO_ON, FAIL = b"\x08\x06\x18\x01", b"\x08\x06\x18\x00"
PACKET_BYTES = 1 << 20
LOOK_INTERVAL_S = 0.5
"""Interval of checks whether CRIU is alive: processes that it restores hold its socket open."""

PR_SET_CHILD_SUBREAPER = 36


class RestoreError(Exception):
    """No process was restored, or it was ended again."""


def main() -> None:
    """Starts or restores a program, and waits for its end and that of its orphans."""
    adopt_orphans()
    if sys.argv[1] == RESTORE:
        restore()
    else:
        start()


def start() -> None:
    """Starts the program and waits for its end."""
    folder, boot_id, status_fd, descriptors, group, limits, user = sys.argv[1:8]
    environment_fd, directory, *arguments = sys.argv[8:]
    status, environment = int(status_fd), int(environment_fd)
    os.set_inheritable(status, False)
    os.set_inheritable(environment, False)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), hard))
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    error_read, error_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        os.close(ready_read)
        with os.fdopen(environment, "rb") as file:
            entries = file.read()
        pipes = (ready_write, go_read, error_write)
        become(arguments, group, limits, user, directory, variables(entries), pipes)
    for descriptor in (environment, go_read, ready_write, error_write):
        os.close(descriptor)
    if os.read(ready_read, 1) == b"":
        with os.fdopen(error_read, "rb") as errors:
            tell(status, {"error": errors.read().decode(errors="replace") or "its first process was ended"})
        return
    facts = describe(pid, boot_id)
    drop_capabilities()
    try:
        refusal = "" if claim(folder, facts) else GIVEN_UP
    except OSError as refused:
        refusal = f"its record can't be written ({error_text(refused)}): check the disk of {folder}"
    if refusal:
        tell(status, {"error": refusal})
        return  # the pipe closes, and the program ends before its exec
    os.write(go_write, b"g")
    os.close(go_write)
    with os.fdopen(error_read, "rb") as errors:
        error = errors.read().decode(errors="replace")
    tell(status, {"error": error} if error else facts)
    see_out(folder, pid, error)


def restore() -> None:
    """Has CRIU restore the program, and waits for its end."""
    folder, boot_id, status_fd, timeout_s, group, criu, pid = sys.argv[2:]
    status = int(status_fd)
    os.set_inheritable(status, False)
    with os.fdopen(os.dup(0), "rb") as file:
        request = file.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    restored: dict[str, object] = {}

    def accept() -> bool:
        restored.update(describe(int(pid), boot_id))
        accepted = claim(folder, restored)
        if not accepted:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            restored.clear()
        return accepted

    def child_ended(_number: int, _frame: object) -> None:
        # The process is a child of the shim, not of CRIU. So CRIU can't see its end and would wait forever.
        if not restored and has_ended(int(pid)):
            raise RestoreError("the process ended while it was being restored")

    signal.signal(signal.SIGTERM, give_up)
    signal.signal(signal.SIGCHLD, child_ended)
    try:
        lead_criu(criu, group, request, status, float(timeout_s), accept)
    except (RestoreError, OSError) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reason = (
            str(error) if isinstance(error, RestoreError) else f"criu can't be asked ({error_text(error)})"
        )
        end_children()
        if restored:
            keep_end(folder, -signal.SIGKILL, reason)
        tell(status, {"error": reason})
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tell(status, restored)
    drop_capabilities()
    close_inherited()  # descriptors of the image's directories, whose numbers CRIU got
    see_out(folder, int(pid), "")


def close_inherited() -> None:
    """Closes all descriptors but the three streams."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(int(name))


def give_up(_number: int, _frame: object) -> NoReturn:
    """Ends the restore: the worker has cancelled it."""
    raise RestoreError(GIVEN_UP)


def has_ended(pid: int) -> bool:
    """Whether a process is an ended child of the shim."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def lead_criu(
    criu: str,
    group: str,
    request: bytes,
    status: int,
    timeout_s: float,
    accept: Callable[[], bool],
) -> None:
    """Leads CRIU through a restore, with a timeout for each step.

    Raises:
        RestoreError: CRIU failed, or ``accept`` refused the restored process.
        OSError: CRIU could not be started, or has ended.
    """
    import socket  # late: only a restore needs it

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            ours.close()
            os.set_inheritable(theirs.fileno(), True)
            become_criu(criu, group, theirs.fileno())
        theirs.close()
        ours.send(request)
        accepted = False
        while True:
            wait_readable(ours.fileno(), pid, None if accepted else status, timeout_s)
            answer = fields(ours.recv(PACKET_BYTES))
            if number(answer, TYPE) != NOTIFY:
                break
            script = nested(fields(nested(answer, NOTIFICATION)), SCRIPT)
            if script == POST_RESTORE:
                accepted = accept()
                if not accepted:
                    ours.send(FAIL)
                    # CRIU kills the processes and cleans up.
                    wait_readable(ours.fileno(), pid, None, timeout_s)
                    raise RestoreError(GIVEN_UP)
            ours.send(GO_ON)
    if not accepted or not number(answer, SUCCESS):
        raise RestoreError("criu failed" if answer else "criu ended without an answer")


def wait_readable(criu: int, pid: int, status: int | None, timeout_s: float) -> None:
    """Waits for a message of CRIU, which has this pid.

    Raises:
        RestoreError: There was none in time, CRIU has ended, or the worker no longer reads ``status``.
    """
    poll = select.poll()
    poll.register(criu, select.POLLIN)
    if status is not None:
        poll.register(status, 0)  # POLLERR when the worker has ended
    deadline = time.monotonic() + timeout_s
    ended, pause_s = False, 0.0
    while not (ready := [descriptor for descriptor, _ in poll.poll(pause_s * 1000)]):
        if ended:
            raise RestoreError("criu ended without an answer")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise RestoreError(f"criu sent nothing for {timeout_s:g} s")
        ended = has_ended(pid)  # messages that CRIU sent before its end can be read now
        pause_s = 0.0 if ended else min(LOOK_INTERVAL_S, left_s)
    if criu not in ready:
        raise RestoreError(GIVEN_UP)


def become_criu(criu: str, group: str, connection: int) -> NoReturn:
    """Executes CRIU, in the control group of the future processes."""
    try:
        enter(group)
        os.execv(criu, [criu, "swrk", str(connection)])  # noqa: S606 - found by the worker
    except OSError as error:
        os.write(2, f"Error (launcher:0): {criu} can't be started: {error_text(error)}\n".encode())
    os._exit(127)


def fields(message: bytes) -> dict[int, int | bytes]:
    """The fields of a protobuf message that are numbers or have a length, by their number.

    Raises:
        RestoreError: The bytes are not a message, or have other fields.
    """
    found: dict[int, int | bytes] = {}
    at = 0
    try:
        while at < len(message):
            key, at = varint(message, at)
            found[key >> 3], at = varint(message, at)
            if key & 7 == 2:
                length = int(found[key >> 3])
                found[key >> 3], at = message[at : at + length], at + length
            elif key & 7 != 0:
                raise RestoreError("criu's answer can't be read")
    except IndexError:
        raise RestoreError("criu's answer is cut short") from None
    return found


def varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at a place of a protobuf message, and where it ends."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if message[at - 1] < 0x80:
            return value, at


def number(message: dict[int, int | bytes], field: int) -> int:
    """A field that is a number. 0: it is missing."""
    value = message.get(field)
    return value if isinstance(value, int) else 0


def nested(message: dict[int, int | bytes], field: int) -> bytes:
    """A field that is text or a message. Empty: it is missing."""
    value = message.get(field)
    return value if isinstance(value, bytes) else b""


def adopt_orphans() -> None:
    """Makes this process the parent of all orphans below it (a subreaper)."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kills all descendants: CRIU first, which is the oldest child."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def describe(pid: int, boot_id: str) -> dict[str, object]:
    """The identities of the program and of its parent, the shim."""
    return {
        "pid": pid,
        "start_time_ticks": start_time_ticks(pid),
        "launcher_pid": os.getpid(),
        "launcher_start_time_ticks": start_time_ticks(os.getpid()),
        "boot_id": boot_id,
    }


def claim(folder: str, facts: dict[str, object]) -> bool:
    """Records the program's identity. False: the worker was faster to abandon it.

    Raises:
        OSError: The disk refuses.
    """
    with open(os.path.join(folder, RESERVED_FILE), "w", encoding="utf-8") as file:
        file.write(" " * RESERVED_BYTES)
    fresh = write_file(folder, PROCESS_FILE, facts)
    try:
        os.link(fresh, os.path.join(folder, PROCESS_FILE))
    except FileExistsError:
        return False
    finally:
        os.unlink(fresh)
    sync_folder(folder)
    return True


def see_out(folder: str, pid: int, error: str) -> None:
    """Records how the program ends, and waits until no process of it is left."""
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            return
        if ended == pid:
            keep_end(folder, os.waitstatus_to_exitcode(status), error)


def keep_end(folder: str, returncode: int, error: str) -> None:
    """Records how the program ended, in the reserved space. A disk that refuses even so loses the record."""
    outcome = {"returncode": returncode, "end_time": time.time(), "error": error}
    reserved = os.path.join(folder, RESERVED_FILE)
    with contextlib.suppress(OSError):  # the orphans of the program still need the shim
        with open(reserved, "r+", encoding="utf-8") as file:
            file.write(json.dumps(outcome).ljust(RESERVED_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(reserved, os.path.join(folder, EXIT_FILE))
        sync_folder(folder)


def become(
    arguments: list[str],
    group: str,
    limits: str,
    user: str,
    directory: str,
    environment: dict[bytes, bytes],
    pipes: tuple[int, int, int],
) -> NoReturn:
    """Executes the program as its user once permitted, in a new session, within a control group if any.

    Args:
        arguments: The program and its arguments.
        group: The control group. Empty: the shim's.
        limits: The limits of the user. Empty: the shim's.
        user: The Unix user. Empty: the shim's.
        directory: The working directory, entered with the rights of the user.
        environment: The program's variables. None of them acts before the exec.
        pipes: Tells that all is ready, waits for the permission, and takes an error.
    """
    ready_write, go_read, error_write = pipes
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        enter(group)
        take_limits(limits)
        take_on(user)
        os.chdir(directory)
        os.write(ready_write, b"r")
        os.close(ready_write)
        if os.read(go_read, 1) == b"":
            os._exit(0)
        try:
            os.execvpe(arguments[0], arguments, environment)  # noqa: S606 - what the workload's owner asked for
        except OSError as error:  # without its file: the worker names the program
            raise OSError(error.errno, error.strerror) from error
    except (OSError, ValueError, MemoryError) as error:
        os.write(error_write, (error_text(error) or "no memory within its limits").encode())
    os._exit(127)


def variables(content: bytes) -> dict[bytes, bytes]:
    """The variables of a text in the form of /proc/PID/environ."""
    entries = content.split(b"\0")
    return {entry[:at]: entry[at + 1 :] for entry in entries if (at := entry.find(b"=")) > 0}


def enter(group: str) -> None:
    """Enters a control group, if there is one."""
    if group:
        with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write("0")


def start_time_ticks(pid: int) -> int:
    """Start time, field 22 of proc(5)'s stat."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        text = file.read()
    return int(text[text.rindex(")") + 2 :].split()[19])


def write_file(folder: str, name: str, content: dict[str, object]) -> str:
    """Writes a file atomically, on disk before this returns."""
    path = os.path.join(folder, f"{name}.{os.getpid()}")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    return path


def sync_folder(folder: str) -> None:
    """Writes the folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def tell(status: int, content: dict[str, object]) -> None:
    """Reports the start to the worker, if it still listens."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(status, "wb", 0) as pipe:
        pipe.write(json.dumps(content).encode())
