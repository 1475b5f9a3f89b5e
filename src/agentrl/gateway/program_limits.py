"""What a program may use: `--agent_memory_mib`, `--agent_cpu_seconds`, and so on.

The kernel holds the limits. A program that reaches one fails in a way of its own: it is killed by a
signal, or a call of the system fails and the program says what it makes of that. `explain` finds in
both which limit it was.
"""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from agentrl.configs import AgentConfig

OWN_PROCESSES = 2  # of a sandbox: its first process and the one that starts the program
_LAST_LINES = 20  # of what a program wrote, in which the error of a limit stands
_KILLED = 128  # and the number of the signal: the status of a program that a signal ended

# What programs write, in lower case, when a limit is reached.
_SAID = {
    "agent_memory_mib": (
        "memoryerror", "bad_alloc", "out of memory", os.strerror(errno.ENOMEM).lower(),
    ),
    "agent_processes": (
        "can't start new thread", "cannot fork", os.strerror(errno.EAGAIN).lower(),
    ),
    "agent_disk_mib": (
        os.strerror(errno.EFBIG).lower(), os.strerror(errno.ENOSPC).lower(),
    ),
}  # fmt: skip
_SIGNALS = {"agent_cpu_seconds": signal.SIGXCPU, "agent_disk_mib": signal.SIGXFSZ}


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one attempt's program; None for no limit.

    `memory_mib`: of each process, and in a container of all together. `cpu_seconds`: of each
    process. `processes`: at once, threads included. `disk_mib`: size of a file, and in a sandbox
    of all files together.
    """

    memory_mib: int | None = None
    cpu_seconds: int | None = None
    processes: int | None = None
    disk_mib: int | None = None

    @classmethod
    def of(cls, agent: AgentConfig) -> Self:
        """The limits of the flags."""
        return cls(
            memory_mib=agent.agent_memory_mib,
            cpu_seconds=agent.agent_cpu_seconds,
            processes=agent.agent_processes,
            disk_mib=agent.agent_disk_mib,
        )

    def of_process(self, *, memory: bool = True, processes: bool = True) -> dict[str, list[int]]:
        """Soft and hard limits of a process, by their names in `resource`.

        `memory`, `processes`: whether these too, where nothing else bounds them.
        """
        limits: dict[str, list[int]] = {}
        if self.memory_mib is not None and memory:
            # Not RLIMIT_AS: runtimes reserve address space that they never use.
            limits["RLIMIT_DATA"] = [self.memory_mib << 20] * 2
        if self.cpu_seconds is not None:
            # The first signal says why, the second, a second later, cannot be ignored.
            limits["RLIMIT_CPU"] = [self.cpu_seconds, self.cpu_seconds + 1]
        if self.processes is not None and processes:
            limits["RLIMIT_NPROC"] = [self.processes + OWN_PROCESSES] * 2
        if self.disk_mib is not None:
            limits["RLIMIT_FSIZE"] = [self.disk_mib << 20] * 2
        if limits:
            limits["RLIMIT_CORE"] = [0, 0]
        return limits

    def explain(self, status: int, said: str, *, kills: bool = False) -> str | None:
        """The flag whose limit ended a program, with its value; None if none did, as it seems.

        `said`: what the program wrote. `kills`: whether the kernel kills at the limit of memory.
        """
        given = {
            "agent_memory_mib": self.memory_mib, "agent_cpu_seconds": self.cpu_seconds,
            "agent_processes": self.processes, "agent_disk_mib": self.disk_mib,
        }  # fmt: skip
        last = "\n".join(said.lower().splitlines()[-_LAST_LINES:])
        signs: list[Callable[[str], bool]] = [
            lambda name: name in _SIGNALS and status == _KILLED + _SIGNALS[name],
            lambda name: any(text in last for text in _SAID.get(name, ())),
            lambda name: (
                name == "agent_memory_mib" and kills and status == _KILLED + signal.SIGKILL
            ),
        ]
        for sign in signs:
            for name, value in given.items():
                if value is not None and sign(name):
                    return f"--{name} {value}"
        return None
