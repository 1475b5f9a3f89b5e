"""The file tree of a session's programs.

    /usr /bin /lib … and the folders of `read_only`   the machine's, read-only
    /etc                                               some lines of our own, and the linker's cache
    /dev                                               null, zero, full, random, urandom, shm
    /work /tmp /dev/shm                                the session's, in memory, of limited size
    /proc /run                                         each call mounts its own over ours

Programs cannot open any other file of the machine.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import kernel
from limits import Limits

USER_ID = 1000  # that programs see themselves as
WORK = "/work"
OWN_FOLDERS = ("", "dev", "etc", "proc", "run", "tmp", "work")  # of the root, none the machine's
PROGRAM = "/run/program"  # the code of a call, see `call.py`
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_SETTINGS = {
    "passwd": f"sandbox:x:{USER_ID}:{USER_ID}::{WORK}:/bin/sh\n",
    "group": f"sandbox:x:{USER_ID}:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_WRITABLE = {"work": WORK, "tmp": "/tmp", "shm": "/dev/shm"}
_BUILDING_SITE = "/tmp"  # any folder that is there: it is covered in our own namespace only


def move_in(limits: Limits, read_only: Sequence[str]) -> None:
    """Make the tree and change the root of this process to it.

    `read_only`: further folders of the machine to mount. Needs a new user and mount namespace.
    Raises OSError.
    """
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    # Files in memory: the kernel holds their size and number, and nothing is left of them when the
    # namespace ends, however it ends. Folders and links count among the files, and so do ours.
    kernel.mount(
        "tmpfs", _BUILDING_SITE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
        f"size={limits.disk_mib}m,nr_inodes={limits.files + 100},mode=0755",
    )  # fmt: skip
    root = Path(_BUILDING_SITE, "root")
    root.mkdir()
    kernel.mount(str(root), str(root), flags=kernel.MS_BIND)
    for folder in (*_SYSTEM, *read_only):
        _show(folder, root)
    _settings(root)
    (root / "dev").mkdir()
    for name in _DEVICES:
        (root / "dev" / name).touch()
    for name, place in _DEVICE_LINKS.items():
        (root / "dev" / name).symlink_to(f"/proc/self/{place}")
    for name in ("proc", "run"):
        (root / name).mkdir()
    for name, place in _WRITABLE.items():
        (root / place.lstrip("/")).mkdir()
        Path(_BUILDING_SITE, name).mkdir()
    kernel.make_read_only(str(root))
    # After the rest is read-only and without devices, which these are not to be.
    for name, place in _WRITABLE.items():
        kernel.mount(f"{_BUILDING_SITE}/{name}", f"{root}{place}", flags=kernel.MS_BIND)
    for name in _DEVICES:
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", flags=kernel.MS_BIND)
    # The kernel gives a call its own only where a whole one is mounted already: the session's.
    kernel.mount(
        "proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    )
    kernel.change_root(str(root))


def put_files(files: dict[str, str]) -> None:
    """Write texts below `/work`. No program of the session may run before: links are followed.

    Raises OSError, and ValueError for a path outside of `/work`.
    """
    for name, text in files.items():
        parts = Path(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ValueError(f"{name!r} is no path below {WORK}")
        path = Path(WORK, *parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _show(path: str, root: Path) -> None:
    """Mount a file, folder or link of the machine at the same place under `root`."""
    source, target = Path(path), root / path.lstrip("/")
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
    elif source.is_dir():
        target.mkdir(parents=True)
        kernel.mount(path, str(target), flags=kernel.MS_BIND | kernel.MS_REC)
    elif source.exists():
        target.touch()
        kernel.mount(path, str(target), flags=kernel.MS_BIND)


def _settings(root: Path) -> None:
    (root / "etc").mkdir()
    for name, text in _SETTINGS.items():
        (root / "etc" / name).write_text(text)
    for path in _SYSTEM_SETTINGS:
        # Through links: where they lead is not there to be followed from inside.
        if os.path.exists(path):
            target = root / path.lstrip("/")
            if os.path.isdir(path):
                target.mkdir()
            else:
                target.touch()
            kernel.mount(path, str(target), flags=kernel.MS_BIND)
