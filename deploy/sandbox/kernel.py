"""Wrappers of system calls that Python does not have. They raise `OSError`."""

import ctypes
import errno
import itertools
import os
import platform
import signal
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_MOUNT_SETATTR = 442  # the same number on every architecture, as of all calls since Linux 5.1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move to new namespaces (`CLONE_NEW*`)."""
    _check(_libc.unshare(flags), "unshare")


def become_alone_in_user_namespace(other_namespaces: int, inner_id: int) -> None:
    """Enter a new user namespace in which our user and group are `inner_id`, the only ones.

    We get all capabilities in it and in `other_namespaces`, which are made with it; none outside.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | other_namespaces)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")  # what the kernel asks for before it takes a gid_map
    (own / "uid_map").write_text(f"{inner_id} {uid} 1")
    (own / "gid_map").write_text(f"{inner_id} {gid} 1")


def fork_into_process_namespace() -> int:
    """Fork a child that is process 1 of a new namespace. It can be called repeatedly.

    Our process namespace must belong to our user namespace, with its /proc mounted.
    """
    unshare(CLONE_NEWPID)  # applies to future children, not to us
    child = os.fork()
    if child:
        own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(own, CLONE_NEWPID), "setns")
        finally:
            os.close(own)
    return child


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = (text.encode() or None for text in (source, target, kind))
    _check(
        _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None),
        f"mount {source} on {target}",
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def make_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only, without set-user-id programs or devices."""
    wanted = _MountAttributes(set=_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE,
        ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)),
    )  # fmt: skip
    _check(result, f"mount_setattr {target}")


def change_root(new_root: str) -> None:
    """Make a mount the root of our mount namespace, and unmount the old root."""
    os.chdir(new_root)
    # The old root is stacked under the new one at the same place, and unmounted from there.
    _check(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _prctl(what: str, option: int, *arguments: int) -> None:
    filled = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *filled), what)


def die_with_parent() -> None:
    """Be killed when the parent ends."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)


def set_dumpable(dumpable: bool) -> None:
    """Set whether our /proc entries belong to our user or to root."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, int(dumpable))


def give_up_privileges() -> None:
    """Programs executed from here on get no capability, whatever their files say.

    What this process holds goes when it executes one, as it is not user 0 of its namespace.
    """
    _prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in itertools.count():
        try:
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break  # the kernel has no more
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls(instructions: bytes) -> None:
    """Put a seccomp filter on this process and all it starts, for good.

    `instructions`: of 8 bytes each (`struct sock_filter`).
    """
    program = _Program(len(instructions) // 8, instructions)
    _check(
        _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
        "PR_SET_SECCOMP",
    )
