"""A `criu` that speaks as the real one does, and does little: `fake_criu.py swrk FD`.

What it says and in which order was recorded from CRIU 4.2.1. FAKE_CRIU names what goes wrong. A dump stops
the process, writes two files, and at the end kills it or lets it go on; a restore makes one that sleeps.
"""

import ctypes
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from leasehold_worker.criu import criu_pb2
from leasehold_worker.criu.criu_pb2 import CriuRequest, CriuRequestType, CriuResponse

SCENARIO = os.environ.get("FAKE_CRIU", "")
SAID_EVEN_AFTER_SUCCESS = "Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self\n"
PAGES = b"page" * 1000
CLONE3, CLONE_PARENT = 435, 0x8000


class Conversation:
    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self._peer = struct.unpack("iii", credentials)[0]

    def receive(self) -> CriuRequest:
        packet = self._socket.recv(1 << 20)
        if not packet:
            sys.exit(1)
        return CriuRequest.FromString(packet)

    def answer(self, kind: CriuRequestType.ValueType, **facts: object) -> None:
        message = CriuResponse(type=kind, **facts)  # type: ignore[arg-type]
        self._socket.send(message.SerializeToString())

    def notify(self, script: str, pid: int | None = None) -> bool:
        self.answer(
            criu_pb2.CRIU_REQUEST_TYPE_NOTIFY,
            success=True,
            notify=criu_pb2.CriuNotification(script=script, pid=pid),
        )
        reply = self.receive()
        assert reply.type == criu_pb2.CRIU_REQUEST_TYPE_NOTIFY
        return reply.notify_success

    def path(self, descriptor: int) -> Path:
        return Path(f"/proc/{self._peer}/fd/{descriptor}")


def dump(criu: Conversation, request: CriuRequest) -> None:
    options = request.opts
    log = criu.path(options.work_dir_fd) / options.log_file
    log.write_text(f"(00.01) {SAID_EVEN_AFTER_SUCCESS}")

    def end(success: bool) -> None:
        if not success:
            os.kill(options.pid, signal.SIGCONT)
        criu.answer(
            request.type,
            success=success,
            dump=criu_pb2.CriuDumped(restored=False),
            cr_errmsg=SAID_EVEN_AFTER_SUCCESS,
        )

    os.kill(options.pid, signal.SIGSTOP)
    if not criu.notify("pre-dump"):
        return end(False)
    images = criu.path(options.images_dir_fd)
    (images / "pages-1.img").write_bytes(PAGES)
    if SCENARIO == "dump-fails":
        with log.open("a") as file:
            file.write("(00.02) Error (criu/sk-inet.c:191): inet: Connected TCP socket\n")
            file.write("(00.03) Error (criu/cr-dump.c:2128): Dumping FAILED.\n")
        return end(False)
    if SCENARIO == "dump-crashes":
        os.kill(options.pid, signal.SIGCONT)
        os._exit(139)
    if SCENARIO == "dump-hangs":
        os.kill(options.pid, signal.SIGCONT)
        signal.pause()
    if SCENARIO == "dump-writes":  # until it can't any more
        with (images / "pages-2.img").open("ab") as pages:
            while True:
                try:
                    pages.write(PAGES)
                    pages.flush()
                except OSError:
                    return end(False)
                time.sleep(0.001)
    criu.notify("query-ext-files")
    (images / "inventory.img").write_bytes(b"inventory")
    if not criu.notify("post-dump"):
        return end(False)
    if SCENARIO == "dump-stays":
        return end(False)
    os.kill(options.pid, signal.SIGKILL)
    (criu.path(options.work_dir_fd) / "stats-dump").write_bytes(b"stats")
    return end(True)


def clone_sibling(pid: int) -> int:
    """A child of our parent with this pid. 0 in it."""
    pids = (ctypes.c_int32 * 1)(pid)
    arguments = struct.pack("=11Q", CLONE_PARENT, 0, 0, 0, 0, 0, 0, 0, ctypes.addressof(pids), 1, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(CLONE3, ctypes.c_char_p(arguments), len(arguments)))


def restore(criu: Conversation, request: CriuRequest) -> None:
    options = request.opts
    log = criu.path(options.work_dir_fd) / options.log_file
    log.write_text(f"(00.01) {SAID_EVEN_AFTER_SUCCESS}")
    assert options.rst_sibling
    criu.notify("pre-restore")
    pid = int((criu.path(options.images_dir_fd) / "pid").read_text())
    if SCENARIO == "restore-fails":
        with log.open("a") as file:
            file.write(f"(00.02) Error (criu/cr-restore.c:1513): Can't fork for {pid}: File exists\n")
        return criu.answer(
            request.type, success=False, restore=criu_pb2.CriuRestored(pid=-1), cr_errmsg="misleading"
        )
    if SCENARIO == "restore-crashes":
        os._exit(139)
    if SCENARIO == "restore-hangs":
        signal.pause()
    go_read, go_write = os.pipe()
    ready_read, ready_write = os.pipe()
    if clone_sibling(pid) == 0:
        os.setsid()
        os.write(ready_write, b"r")
        if SCENARIO == "restored-dies":
            os._exit(1)
        os.close(go_write)
        if SCENARIO == "restore-killed":
            signal.pause()  # half restored, and with all that CRIU had open
        if os.read(go_read, 1):
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(1)
    if SCENARIO == "restored-dies":
        signal.pause()
    if SCENARIO == "restore-killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if not criu.notify("post-restore", pid):
        os.kill(pid, signal.SIGKILL)
        return criu.answer(request.type, success=False, restore=criu_pb2.CriuRestored(pid=pid))
    if SCENARIO == "restore-fails-late":
        os.kill(pid, signal.SIGKILL)
        return criu.answer(request.type, success=False, restore=criu_pb2.CriuRestored(pid=pid))
    os.read(ready_read, 1)
    criu.notify("pre-resume")
    os.write(go_write, b"g")
    criu.notify("post-resume")
    return criu.answer(
        request.type,
        success=True,
        restore=criu_pb2.CriuRestored(pid=pid),
        cr_errmsg=SAID_EVEN_AFTER_SUCCESS,
    )


def main() -> None:
    assert sys.argv[1] == "swrk"
    if SCENARIO == "silent":
        signal.pause()
    criu = Conversation(int(sys.argv[2]))
    request = criu.receive()
    if request.type == criu_pb2.CRIU_REQUEST_TYPE_VERSION:
        major, minor, sublevel = (3, 17, 1) if SCENARIO == "old" else (4, 2, 1)
        version = criu_pb2.CriuVersion(major_number=major, minor_number=minor, sublevel=sublevel)
        criu.answer(request.type, success=True, version=version)
    elif request.type == criu_pb2.CRIU_REQUEST_TYPE_CHECK:
        if SCENARIO == "check-fails":
            sys.stderr.write("(00.01) Error (criu/cr-check.c:93): Kernel lacks what is needed\n")
        criu.answer(request.type, success=SCENARIO != "check-fails", cr_errmsg=SAID_EVEN_AFTER_SUCCESS)
    elif request.type == criu_pb2.CRIU_REQUEST_TYPE_DUMP:
        dump(criu, request)
    elif request.type == criu_pb2.CRIU_REQUEST_TYPE_RESTORE:
        restore(criu, request)


if __name__ == "__main__":
    main()
