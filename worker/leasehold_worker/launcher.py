"""Starts a workload's program, outlives the worker, and keeps how the program ended.

Run as ``python -I -S launcher.py FOLDER BOOT_ID STATUS_FD DESCRIPTORS GROUP PROGRAM [ARGUMENT…]``, with the
program's own environment, working directory and output. DESCRIPTORS is how many it may have open, and GROUP
its control group, if any. Nothing but the standard library is imported: one of these lives as long as each
workload.

Into the folder it writes ``process``, who the program is, and ``exit``, how it ended. The first is made by a
link, which only one can make: a worker that gives up a start makes it first, and the program never runs.
"""

import contextlib
import json
import os
import resource
import sys
import time

PROCESS_FILE = "process"
EXIT_FILE = "exit"


def main() -> None:
    """Starts the program and waits for its end."""
    folder, boot_id, status_fd, descriptors, group, *arguments = sys.argv[1:]
    status = int(status_fd)
    os.set_inheritable(status, False)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), hard))
    go_read, go_write = os.pipe()
    error_read, error_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        become(arguments, group, go_read, error_write)
    os.close(go_read)
    os.close(error_write)
    facts = {
        "pid": pid,
        "start_time_ticks": start_time_ticks(pid),
        "launcher_pid": os.getpid(),
        "launcher_start_time_ticks": start_time_ticks(os.getpid()),
        "boot_id": boot_id,
    }
    fresh = write_file(folder, PROCESS_FILE, facts)
    try:
        os.link(fresh, os.path.join(folder, PROCESS_FILE))
    except FileExistsError:
        tell(status, {"error": "the worker has given up this start"})
        return  # the program's pipe closes, and it ends without having begun
    finally:
        os.unlink(fresh)
    sync_folder(folder)
    os.write(go_write, b"g")
    os.close(go_write)
    with os.fdopen(error_read, "rb") as errors:
        error = errors.read().decode(errors="replace")
    tell(status, {"error": error} if error else facts)
    _, wait_status = os.waitpid(pid, 0)
    outcome = {"returncode": os.waitstatus_to_exitcode(wait_status), "end_time": time.time(), "error": error}
    os.replace(write_file(folder, EXIT_FILE, outcome), os.path.join(folder, EXIT_FILE))
    sync_folder(folder)


def become(arguments: list[str], group: str, go_read: int, error_write: int) -> None:
    """Becomes the program once it may, at the head of a session of its own, within a control group if any."""
    os.setsid()
    if os.read(go_read, 1) == b"":
        os._exit(0)
    try:
        if group:
            with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
                file.write("0")
        os.execvp(arguments[0], arguments)  # noqa: S606 - what the workload's owner asked for
    except (OSError, ValueError) as error:
        os.write(error_write, str(error).encode())
    os._exit(127)


def start_time_ticks(pid: int) -> int:
    """Field 22 of proc(5)'s stat."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        text = file.read()
    return int(text[text.rindex(")") + 2 :].split()[19])


def write_file(folder: str, name: str, content: dict[str, object]) -> str:
    """Writes a file beside the one that it is to become, on disk before this returns."""
    path = os.path.join(folder, f"{name}.{os.getpid()}")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    return path


def sync_folder(folder: str) -> None:
    """Puts the folder's entries on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def tell(status: int, content: dict[str, object]) -> None:
    """Tells the worker how the start went, if it still listens."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, json.dumps(content).encode())
    os.close(status)


if __name__ == "__main__":
    main()
