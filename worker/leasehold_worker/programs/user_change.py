"""The change of a process to a workload's Unix user, right before it executes a program.

The shim and other children of the worker call this between fork and exec. The module imports little, because
one shim lives as long as each workload.
"""

import ctypes
import errno
import os
import resource
import warnings  # noqa: F401 - os.execvpe imports it, and the user may not be permitted to read Python's files

from leasehold_worker.programs.error_text import error_text

OOM_SCORE = "/proc/self/oom_score_adj"
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
KEYCTL_JOIN_SESSION_KEYRING = 1
KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}
"""Number of the system call keyctl(2), which the C library lacks."""


def take_limits(limits: str) -> None:
    """Takes the limits of another user than the worker's, before the change to it.

    The kernel's preference for the worker goes too: a negative nice value or OOM score becomes 0.

    Args:
        limits: ``RESOURCE:SOFT:HARD,…``, -1 for unlimited. Empty: all stays, as for the worker's own user.

    Raises:
        OSError: A limit can't be set. The process must not execute anything.
    """
    if not limits:
        return
    for limit in limits.split(","):
        number, soft, hard = map(int, limit.split(":"))
        try:
            resource.setrlimit(number, (soft, hard))
        except (OSError, ValueError) as error:
            raise OSError(
                f"the limit {number} of setrlimit(2) can't be {soft}:{hard}: {error_text(error)}"
            ) from error
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with open(OOM_SCORE, encoding="ascii") as file:
        score = int(file.read())
    if score < 0:
        with open(OOM_SCORE, "w", encoding="ascii") as file:
            file.write("0")


def take_on(user: str) -> None:
    """Changes to a Unix user for good, and verifies the change by the kernel's own report.

    Args:
        user: ``UID:GID:GROUP,GROUP``. Empty: the worker's own user, which only loses its capabilities,
            unless it is root.

    Raises:
        OSError: The user can't be taken on. The process must not execute anything.
    """
    if not user:
        if os.geteuid() != 0:
            drop_capabilities()
        return
    uid, gid, groups = parse(user)
    if 0 in (uid, gid, *groups):
        raise OSError("a program never becomes root, nor a member of root's group")
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # A change between two users that are not root clears no capability (capabilities(7)).
    drop_capabilities()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs can't be set")
    leave_session_keyring()
    # Until its exec, this process has the worker's memory, which the user must not read whatever
    # fs.suid_dumpable says.
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the process can't be closed to its user")
    require(uid, gid, groups)


def parse(user: str) -> tuple[int, int, list[int]]:
    """The ids of a user, its group and its supplementary groups."""
    uid, gid, groups = user.split(":")
    return int(uid), int(gid), [int(group) for group in groups.split(",") if group]


def drop_capabilities() -> None:
    """Gives up all capabilities. Ambient ones of a worker without root would pass exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "the worker's capabilities can't be dropped")
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)  # empty already, as the permitted set is


def leave_session_keyring() -> None:
    """Begins an empty session keyring. Whoever inherits the worker's can read the keys in it (keyrings(7)).

    Raises:
        OSError: The process still has the worker's keyring.
    """
    machine = os.uname().machine
    if machine not in KEYCTL:
        raise OSError(errno.ENOSYS, f"the number of keyctl(2) on {machine} is unknown")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(KEYCTL[machine], KEYCTL_JOIN_SESSION_KEYRING, None) < 0:
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EPERM):  # no keyrings here; or a container forbids them to all
            raise OSError(number, "the worker's session keyring can't be left")


def require(uid: int, gid: int, groups: list[int]) -> None:
    """Compares the kernel's report of this process with what was intended.

    Raises:
        OSError: The process has another user, another group, or a capability.
    """
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        lines = (line.split(":", 1) for line in file if ":" in line)
        facts = {name: value.split() for name, value in lines}
    wanted = {
        "Uid": [str(uid)] * 4,
        "Gid": [str(gid)] * 4,
        **{name: ["0" * 16] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")},
        "NoNewPrivs": ["1"],
    }
    for name, value in wanted.items():
        if facts.get(name) != value:
            raise OSError(
                f"the kernel reports {name} {' '.join(facts.get(name, []))}, and not {' '.join(value)}"
            )
    found = {int(group) for group in facts.get("Groups", [])}
    if found != set(groups):
        raise OSError(f"the kernel reports the groups {sorted(found)}, and not {groups}")
