"""Hosts on a network of their own: Linux network namespaces, a bridge between them, and its cables.

    with Network() as network:
        one, two = network.host("one"), network.host("two")
        subprocess.run(two.command("ping", "-c1", one.address))
        one.cut()       # its cable is pulled: packets are lost, nothing is refused
        one.join()

A host has a network of its own and shares all else (files, processes, clock) with this machine. It
reaches the other hosts and nobody else. This process is on none of them: it looks on from outside.

Needs iproute2, and root or the right to make user namespaces (then it takes one, and is root in
there only). All of it is gone when the block ends, and also when this process is killed: a
namespace lives as long as the process in it, which ends when its standard input closes.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_BRIDGE = "switch"
_SUBNET = "10.77.0"
_HOLD = "ip link set lo up && echo held && exec cat"


class NetworkUnavailable(RuntimeError):
    """This machine lets us make no network namespaces. The message is one sentence."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one address. `pid` is the process that keeps it."""

    name: str
    address: str
    pid: int
    switch: int  # the process that keeps the bridge's namespace

    def command(self, *command: str) -> list[str]:
        """What to execute so that `command` runs on this host, as the very process started."""
        return [*_enter(self.pid), *command]

    def cut(self) -> None:
        """Pull the cable: what is sent from now on, to it or by it, is lost."""
        self._set("down")

    def join(self) -> None:
        """Put the cable back. Connections that are still open go on."""
        self._set("up")

    def _set(self, state: str) -> None:
        _run(self.switch, "ip", "link", "set", f"to-{self.name}", state)


class Network:
    """A bridge in a namespace of its own, and the hosts that were asked for."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._switch = 0
        self._hosts = 0

    def host(self, name: str) -> Host:
        """A new host, joined to the others. `name`: at most 12 characters."""
        self._hosts += 1
        pid = self._hold([*_enter(self._switch), "unshare", "--net"])
        host = Host(name, f"{_SUBNET}.{self._hosts}", pid, self._switch)
        ours = f"to-{name}"
        _run(
            self._switch, "ip", "link", "add", ours, "type", "veth",
            "peer", "name", "eth0", "netns", str(pid),
        )  # fmt: skip
        _run(self._switch, "ip", "link", "set", ours, "master", _BRIDGE)
        _run(pid, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        _run(pid, "ip", "link", "set", "eth0", "up")
        host.join()
        return host

    def _hold(self, namespace: list[str]) -> int:
        """Start a process in a new namespace, which it keeps until our end of its pipe closes."""
        holder = subprocess.Popen(
            [*namespace, "sh", "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._stack.callback(holder.communicate)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "held\n":
            reason = holder.stderr.read().strip()
            raise NetworkUnavailable(
                f"network namespaces cannot be made here ({reason}): run this as root, or allow "
                "user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
            )
        return holder.pid

    def __enter__(self) -> Self:
        for tool in ("ip", "unshare", "nsenter"):
            if shutil.which(tool) is None:
                raise NetworkUnavailable(
                    f"no `{tool}` on PATH: hosts are network namespaces, made with iproute2 and "
                    "util-linux (`apt install iproute2 util-linux`)"
                )
        with ExitStack() as on_failure:
            on_failure.callback(self._stack.close)
            user = [] if os.geteuid() == 0 else ["--map-root-user"]
            self._switch = self._hold(["unshare", *user, "--net"])
            _run(self._switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
            _run(self._switch, "ip", "link", "set", _BRIDGE, "up")
            on_failure.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _enter(pid: int) -> list[str]:
    """The front of a command that is to run in the namespaces of process `pid`."""
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), *user, "--net"]


def _run(pid: int, *command: str) -> None:
    result = subprocess.run([*_enter(pid), *command], capture_output=True, text=True)
    if result.returncode != 0:
        raise NetworkUnavailable(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
