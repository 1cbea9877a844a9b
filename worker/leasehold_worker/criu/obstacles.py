"""Obstacles to an image: properties of processes that CRIU can't save. Read-only and blocking."""

import os
import socket
import stat
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.criu.dump import GHOST_BYTES
from leasehold_worker.criu.unix_sockets import unix_peers
from leasehold_worker.host.processes import ProcessIdentity, lineage

TELL_AT_MOST: Final = 8

_PROC: Final = Path("/proc")
_MEMORY_DEVICES: Final = 1
_PLAIN_DEVICES: Final = frozenset({3, 5, 7, 8, 9})
"""Minor numbers of null, zero, full, random and urandom."""

_GPU_DEVICES: Final = "/dev/nvidia"
_TERMINAL_MAJORS: Final = frozenset({4, 5, *range(136, 144)})
_LISTENING_OR_CLOSED: Final = frozenset({"07", "0A"})
"""TCP states of sockets without a peer (proc_net_tcp)."""

_ESTABLISHED: Final = "01"
_MAPPED: Final = "::ffff:"

_RESTORABLE: Final = ("eventfd", "eventpoll", "inotify", "signalfd", "timerfd", "pidfd")
"""Anonymous descriptors that CRIU can restore."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A descriptor of a process, and its target in /proc."""

    pid: int
    number: str
    target: str

    @property
    def path(self) -> Path:
        return _PROC / str(self.pid) / "fd" / self.number

    def __str__(self) -> str:
        return f"process {self.pid}, descriptor {self.number}:"


@dataclass(frozen=True, slots=True)
class _Connection:
    """A TCP connection as seen from one end: addresses with ports, and whether both directions are open."""

    local: tuple[str, int]
    remote: tuple[str, int]
    established: bool


def outside_connections(processes: Sequence[ProcessIdentity]) -> list[str]:
    """The TCP connections with only one end in the image. Works for stopped processes."""
    return list(_Descriptors(processes, suspended=True).connections())


def obstacles(processes: Sequence[ProcessIdentity], *, suspended: bool = True) -> list[str]:
    """The obstacles to an image of a workload, now.

    Args:
        processes: All of the workload; the first one is the root.
        suspended: Its members are CHECKPOINTED, so that the driver has closed the device files of GPUs. Else
            these files are ignored.

    Returns:
        Sentences with a remedy, at most 8. Empty: no obstacle is known.
    """
    of_descriptors = _Descriptors(processes, suspended=suspended).obstacles()
    found = dict.fromkeys([*_family(processes, suspended=suspended), *of_descriptors])
    told = list(found)
    more = len(told) - TELL_AT_MOST
    return [*told[:TELL_AT_MOST], f"and {more} more"] if more > 0 else told


def _family(processes: Sequence[ProcessIdentity], *, suspended: bool) -> Iterator[str]:
    """Checks that the processes are one tree, without a terminal, with capabilities that CRIU can have."""
    root = processes[0]
    grantable = _capabilities(os.getpid(), "CapBnd")
    for process in processes:
        line = dict(lineage(process.pid))
        if root not in line and process in line:
            yield (
                f"process {process.pid} is not a descendant of the first process {root.pid}, "
                "and an image holds no other: have the program start no daemons"
            )
        if process == root and line.get(root, root.pid) != root.pid:
            yield f"process {root.pid} is not a session leader: start it with leasehold run"
        fields = _read(process.pid, "stat").rpartition(")")[2].split()
        if len(fields) > 4 and fields[4] != "0":
            yield (
                f"process {process.pid} has a controlling terminal, which an image can't "
                "hold: start it with leasehold run, and have it open no terminal"
            )
        if _capabilities(process.pid, "CapPrm") & ~grantable:
            yield (
                f"process {process.pid} has capabilities that the worker gave up at its start, as run_as is "
                "set, so CRIU could not restore the process: choose cuda_suspend, keep_running or stop"
            )
        if suspended and _GPU_DEVICES in _read(process.pid, "maps"):
            yield f"process {process.pid} has GPU memory mapped: suspend it first"


def _capabilities(pid: int, name: str) -> int:
    """A capability set of a process, as a mask. No capabilities: the process has ended."""
    lines = (line for line in _read(pid, "status").splitlines() if line.startswith(f"{name}:"))
    return next((int(line.split()[1], 16) for line in lines), 0)


@final
class _Descriptors:
    """The open descriptors of a workload."""

    def __init__(self, processes: Sequence[ProcessIdentity], *, suspended: bool) -> None:
        self._suspended = suspended
        self._pids = [process.pid for process in processes]
        everything = [entry for pid in self._pids for entry in _open_files(pid)]
        self._open = [each for each in everything if suspended or not each.target.startswith(_GPU_DEVICES)]
        self._targets: defaultdict[str, set[int]] = defaultdict(set)
        for entry in self._open:
            self._targets[entry.target].add(_access(entry))
        self._connections: dict[int, dict[int, _Connection]] = {
            pid: _tcp_connections(pid) for pid in self._pids
        }
        try:
            self._peers = unix_peers()
        except OSError:
            self._peers = {}

    def obstacles(self) -> Iterator[str]:
        """The obstacles to an image, one sentence each."""
        for entry in self._open:
            kind, _, rest = entry.target.partition(":")
            if kind == "socket":
                yield from self._socket(entry, int(rest.strip("[]")))
            elif kind == "pipe":
                yield from self._pipe(entry)
            elif kind == "anon_inode":
                if not any(name in rest for name in _RESTORABLE):
                    yield (f"{entry} {rest} can't be part of an image: have the program run without it")
            else:
                yield from _file(entry)

    def connections(self) -> Iterator[str]:
        """The TCP connections that are obstacles, one sentence each."""
        for entry in self._open:
            kind, _, rest = entry.target.partition(":")
            if kind == "socket":
                yield from self._connection(entry, int(rest.strip("[]")))

    def _connection(self, entry: _Open, inode: int) -> Iterator[str]:
        known = self._connections[entry.pid]
        connection = known.get(inode)
        if connection is None:
            return
        other_way = _Connection(connection.remote, connection.local, established=True)
        inside = any(
            f"socket:[{other}]" in self._targets for other, each in known.items() if each == other_way
        )
        if not (connection.established and inside):
            host, port = connection.remote
            yield (
                f"{entry} TCP connection to {host} port {port}, which is not open at both "
                "ends within the workload: close it before the checkpoint"
            )

    def _socket(self, entry: _Open, inode: int) -> Iterator[str]:
        yield from self._connection(entry, inode)
        peer = self._peers.get(inode)
        other_end = f"socket:[{peer}]"
        if not peer or other_end in self._targets:
            return
        if any(own.target == other_end for own in _open_files(os.getpid())):
            way = "restore the workload first, and then choose stop" if self._suspended else "choose stop"
            yield (
                f"{entry} the program's stream to this worker, as of a checkpointable application: {way}, "
                "for which the application saves itself, or leave it at cuda_suspend"
            )
            return
        yield (
            f"{entry} Unix socket connected to a process outside the workload: close it before the checkpoint"
        )

    def _pipe(self, entry: _Open) -> Iterator[str]:
        whole = {os.O_RDONLY, os.O_WRONLY} <= self._targets[entry.target] or os.O_RDWR in self._targets[
            entry.target
        ]
        if not whole and _is_open_elsewhere(entry.target, set(self._pids)):
            yield f"{entry} pipe to a process outside the workload: use a file instead"


def _file(entry: _Open) -> Iterator[str]:
    try:
        facts = entry.path.stat()
    except OSError:
        return
    if stat.S_ISCHR(facts.st_mode):
        major, minor = os.major(facts.st_rdev), os.minor(facts.st_rdev)
        if entry.target.startswith("/dev/nvidia"):
            yield (f"{entry} {entry.target} is open: suspend the workload first, and use no NVML in it")
        elif major in _TERMINAL_MAJORS:
            yield f"{entry} {entry.target} is a terminal: start the workload with leasehold run"
        elif major != _MEMORY_DEVICES or minor not in _PLAIN_DEVICES:
            yield f"{entry} {entry.target} is a device that CRIU may not support: close it first"
    elif _is_large_ghost(facts) and not entry.target.startswith("/memfd:"):
        yield (
            f"{entry} {entry.target} is a deleted file of {size_text(facts.st_size)}, and an "
            f"image holds deleted files up to {size_text(GHOST_BYTES)}: don't delete it while "
            "it is open"
        )


def _is_large_ghost(facts: os.stat_result) -> bool:
    return stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and facts.st_size > GHOST_BYTES


def _open_files(pid: int) -> Iterator[_Open]:
    try:
        numbers = os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return
    for number in numbers:
        try:
            yield _Open(pid, number, os.readlink(_PROC / str(pid) / "fd" / number))
        except OSError:
            continue


def _access(entry: _Open) -> int:
    """Whether a descriptor is for reading, writing or both."""
    for line in _read(entry.pid, f"fdinfo/{entry.number}").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE
    return os.O_RDONLY


def _is_open_elsewhere(target: str, ours: set[int]) -> bool:
    pids = (int(name) for name in os.listdir(_PROC) if name.isdigit())
    return any(entry.target == target for pid in pids if pid not in ours for entry in _open_files(pid))


def _tcp_connections(pid: int) -> dict[int, _Connection]:
    """TCP connections in the network namespace of a process, by inode: a server's has one once accepted."""
    found: dict[int, _Connection] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in _read(pid, f"net/{name}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] not in _LISTENING_OR_CLOSED:
                found[int(fields[9])] = _Connection(
                    _address(fields[1], family), _address(fields[2], family), fields[3] == _ESTABLISHED
                )
    return found


def _address(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    """An address and port, from hexadecimal words in the host's byte order."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    host = socket.inet_ntop(family, b"".join(words))
    return host.removeprefix(_MAPPED), int(port, 16)  # IPv6 sockets have connections by IPv4, too


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
