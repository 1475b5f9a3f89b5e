"""`--agent_sandbox`: the program of an attempt within namespaces of its own, or in a container.

    bubblewrap       `bwrap` of the machine: the system's programs, Python's environment and the
                     folders of --agent_sandbox_folders are there to be read, /tmp to be written
    docker:IMAGE     `docker run` of an image that has `python3`, with the same folders

In both a program sees no other file, no other process and no network but the gateway
(`program_start.py` opens the way to it, `door.py` is its other end). Of the sampler's environment
it has nothing but the language and, within bubblewrap, the PATH.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import orjson

from agentrl.configs import AgentConfig, ConfigError, comma_separated
from agentrl.gateway.program_limits import OWN_PROCESSES, ProgramLimits
from agentrl.gateway.program_start import PROGRAM_START

SHOWN = "/run/agentrl"  # in a sandbox: what an attempt gives its program to read
DOOR, TASK = "door", "task.json"  # in it
_START = "start.py"
_NOBODY = 65534  # the user of programs if the sampler is root
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl")
_ETC = {
    "passwd": "agent:x:{uid}:{gid}::/tmp:/bin/sh\n",
    "group": "agent:x:{gid}:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_LANGUAGE = ("LANG", "LC_ALL", "TZ")
_OWN = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "agent", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class SandboxedProgram:
    """A program and what it is given.

    `name`: of the attempt. `shown`: its folder, which `show` has filled. `port`: of the gateway;
    None without a way to it. `variables`: names of those that the program gets.
    """

    words: Sequence[str]
    name: str
    shown: Path
    port: int | None = None
    variables: Sequence[str] = ()


class Sandbox(Protocol):
    """A way to run programs apart from the machine.

    `kills`: whether the kernel kills a program at its limit of memory.
    """

    kills: bool

    def command(self, program: SandboxedProgram) -> list[str]:
        """The words that run a program."""
        ...

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of `command`, with these variables for the program."""
        ...

    def removal(self, name: str) -> list[str] | None:
        """A command that ends what may be left of an attempt; None if nothing can be."""
        ...


def show(folder: Path, task: bytes) -> Path:
    """Make the folder that an attempt shows its program, which may be another user's."""
    shown = folder / "shown"
    shown.mkdir()
    shutil.copyfile(PROGRAM_START, shown / _START)
    (shown / TASK).write_bytes(task)
    uid, gid = _user()
    for name, text in _ETC.items():
        (shown / name).write_text(text.format(uid=uid, gid=gid))
    for path in (shown, *shown.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return shown


def sandbox_of(agent: AgentConfig, limits: ProgramLimits) -> Sandbox | None:
    """The sandbox of the flags; None without one. Raises `ConfigError` if it cannot be used."""
    given = agent.agent_sandbox
    if given is None:
        return None
    folders = tuple(_folder(name) for name in comma_separated(agent.agent_sandbox_folders))
    kind, _, image = given.partition(":")
    sandbox: Sandbox
    if given == "bubblewrap":
        sandbox = Bubblewrap(folders, limits)
    elif kind == "docker" and image:
        sandbox = Docker(image, folders, limits)
    else:
        raise ConfigError(f"--agent_sandbox {given}: must be bubblewrap, or docker:IMAGE")
    _check(sandbox, given)
    return sandbox


@dataclass(frozen=True)
class Bubblewrap:
    """Namespaces by bubblewrap, as an ordinary user.

    If the sampler is root, bubblewrap first shows the folders with root's rights, and then again,
    as nobody, makes a user namespace in which nothing of root is left.
    """

    folders: tuple[Path, ...]
    limits: ProgramLimits
    kills = False

    def command(self, program: SandboxedProgram) -> list[str]:
        """See `Sandbox`."""
        start = _start_words(self.limits.of_process(), program.port)
        return [*self._room(program.shown), sys.executable, *start, *program.words]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """See `Sandbox`."""
        return {**_kept("PATH", *_LANGUAGE), **_OWN, **variables}

    def removal(self, name: str) -> None:
        """Nothing: the kernel ends a process namespace with its first process."""

    def _room(self, shown: Path) -> list[str]:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigError(
                "--agent_sandbox bubblewrap: there is no program bwrap; install bubblewrap 0.8 or "
                "newer, as by `apt install bubblewrap`"
            )
        as_root = os.geteuid() == 0
        alone = ["--unshare-user", "--disable-userns"]
        room = [
            bwrap, *(() if as_root else alone), "--unshare-pid", "--unshare-net", "--unshare-ipc",
            "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session",
            "--proc", "/proc", "--dev", "/dev",
        ]  # fmt: skip
        for place in ("/tmp", "/dev/shm"):
            if self.limits.disk_mib is not None:
                room += ["--size", str(self.limits.disk_mib << 20)]
            room += ["--perms", "1777", "--tmpfs", place]
        python = [sys.prefix, sys.base_prefix, *([str(Path(bwrap).parent)] if as_root else [])]
        seen = dict.fromkeys([*python, *map(str, self.folders)])
        places = [Path(place) for place in (*_SYSTEM, *_SETTINGS, *seen) if os.path.lexists(place)]
        room += _parents([*places, Path(SHOWN), Path("/etc/passwd")])
        for path in places:
            if path.is_symlink() and str(path) not in seen:  # as /bin, to /usr/bin
                room += ["--symlink", os.readlink(path), str(path)]
            else:
                room += ["--ro-bind", str(path), str(path)]
        room += ["--ro-bind", str(shown), SHOWN]
        for name in _ETC:
            room += ["--ro-bind", str(shown / name), f"/etc/{name}"]
        begins = str(self.folders[0]) if self.folders else "/tmp"
        room += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", begins]
        if as_root:
            drops = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # what becoming nobody takes
            kept = [word for capability in drops for word in ("--cap-add", capability)]
            nobody = ["--reuid", str(_NOBODY), "--regid", str(_NOBODY), "--clear-groups"]
            none = ["--inh-caps=-all", "--bounding-set=-all"]
            room += ["--cap-drop", "ALL", *kept, "--", "setpriv", *nobody, *none, "--"]
            room += [bwrap, "--dev-bind", "/", "/", *alone, "--chdir", begins]
        return [*room, "--"]


@dataclass(frozen=True)
class Docker:
    """A container without a network, of an image that has `python3`."""

    image: str
    folders: tuple[Path, ...]
    limits: ProgramLimits
    kills = True

    def command(self, program: SandboxedProgram) -> list[str]:
        """See `Sandbox`."""
        start = _start_words(self.limits.of_process(memory=False, processes=False), program.port)
        uid, gid = _user()
        room = [
            "docker", "run", "--rm", "--init", "--name", _container(program.name),
            "--network", "none", "--read-only", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges",
            "--user", f"{uid}:{gid}", "--entrypoint", "python3",
            "--workdir", str(self.folders[0]) if self.folders else "/tmp",
            "--tmpfs", f"/tmp:exec,mode=1777{self._size()}",
        ]  # fmt: skip
        for source, target in (
            (program.shown, SHOWN),
            *((folder, folder) for folder in self.folders),
        ):
            room += ["--mount", f"type=bind,source={source},target={target},readonly"]
        if self.limits.memory_mib is not None:
            room += ["--memory", f"{self.limits.memory_mib}m"]
            room += ["--memory-swap", f"{self.limits.memory_mib}m"]  # both together: no swap
        if self.limits.processes is not None:
            room += ["--pids-limit", str(self.limits.processes + OWN_PROCESSES)]
        if self.limits.disk_mib is not None:
            room += ["--shm-size", f"{self.limits.disk_mib}m"]
        for variable, value in _OWN.items():
            room += ["--env", f"{variable}={value}"]
        # Without a value: it stands in the environment of `docker`, which others do not see.
        for variable in (*_kept(*_LANGUAGE), *program.variables):
            room += ["--env", variable]
        return [*room, self.image, *start, *program.words]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """See `Sandbox`."""
        of_docker = [name for name in os.environ if name.startswith("DOCKER_")]
        return {**_kept("PATH", "HOME", *_LANGUAGE, *of_docker), **variables}

    def removal(self, name: str) -> list[str]:
        """See `Sandbox`."""
        return ["docker", "rm", "--force", _container(name)]

    def _size(self) -> str:
        return "" if self.limits.disk_mib is None else f",size={self.limits.disk_mib}m"


def _start_words(limits: Mapping[str, list[int]], port: int | None) -> list[str]:
    door = None if port is None else f"{SHOWN}/{DOOR}"
    start = {"limits": limits, "door": door, "port": port}
    return ["-I", "-S", f"{SHOWN}/{_START}", orjson.dumps(start).decode()]


def _container(name: str) -> str:
    return f"agentrl-{name}"


def _user() -> tuple[int, int]:
    """The user and group of programs."""
    uid, gid = os.geteuid(), os.getegid()
    return (_NOBODY, _NOBODY) if uid == 0 else (uid, gid)


def _kept(*names: str) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _folder(name: str) -> Path:
    path = Path(name).absolute()
    if not path.is_dir():
        raise ConfigError(f"--agent_sandbox_folders {name}: there is no such folder")
    return path


def _parents(folders: Sequence[Path]) -> list[str]:
    """The folders above, which others may enter: bubblewrap's own would be its user's alone."""
    above = {parent for folder in folders for parent in folder.parents if parent != Path("/")}
    made = sorted(above - set(folders))
    return [word for parent in made for word in ("--perms", "0755", "--dir", str(parent))]


@cache
def _check(sandbox: Sandbox, given: str) -> None:
    """Raise `ConfigError` if nothing can be run in it, with what was said of that."""
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
        name = f"check-{secrets.token_hex(4)}"
        shown = show(Path(folder), b"{}")
        command = sandbox.command(SandboxedProgram(["true"], name, shown))
        try:
            tried = subprocess.run(
                command, env=sandbox.environment({}), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace",
            )  # fmt: skip
        except FileNotFoundError:
            raise ConfigError(
                f"--agent_sandbox {given}: there is no program {command[0]}; install Docker, as by "
                "`apt install docker.io`"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--agent_sandbox {given}: {command[0]} cannot be started: {error.strerror}"
            ) from None
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"status {tried.returncode}"]
        # After its reason `docker` writes where its help is.
        reason = next((line for line in said if line.startswith("docker: ")), said[-1])
        raise ConfigError(f"--agent_sandbox {given}: no program can be run in it: {reason}")
