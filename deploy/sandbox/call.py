"""Runs one call: a program in a new process namespace, until all its processes have ended.

    keeper ── init ── the program ── its child processes
             (new process and mount namespaces from here on)

`init` is process 1 of the namespace. It ends with the program, and the kernel then kills all
remaining processes, also those that ignore signals or have detached themselves. To stop a call, the
keeper kills `init`.
"""

import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

import kernel
import room
from limits import OPEN_FILES, PROGRAM_BYTES, Limits

# The environment of programs: no user site folder, a fixed locale, one thread.
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": room.WORK, "TMPDIR": "/tmp", "USER": "sandbox",
    "LANG": "C.UTF-8", "PYTHONPATH": room.WORK, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
_SET_UP_S = 10.0
_TICK_S = 0.05  # between two checks of the memory
_NICE = 10  # programs yield to the server
_OWN_PROCESSES = 3  # keeper, its parent and init, which count for the user's process limit
_FLOOD = 256  # a program that prints this many times what is kept of it is stopped


@dataclass(frozen=True)
class Outcome:
    """The result of a call.

    output: standard output and error together
    left_out: number of bytes left out in the middle of `output`
    status: exit status as a shell gives it (128 + the signal's number); None if it was stopped
    stopped: the limit that stopped the program, as the end of a sentence
    """

    output: tuple[bytes, bytes]
    left_out: int
    status: int | None
    stopped: str | None


class CallFailed(RuntimeError):
    """The sandbox could not run the program. The message is one sentence."""


def run(
    argv: list[str], program: bytes, limits: Limits, system_call_filter: bytes, owner: int
) -> Outcome:
    """Run `argv` with `program` in the file `room.PROGRAM`, until all its processes have ended.

    `owner`: a file descriptor; the call is stopped when it has input or closes. Raises CallFailed.
    """
    with ExitStack() as stack:
        printed, print_to = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, printed)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        init = kernel.fork_into_process_namespace()
        if init == 0:
            _init(argv, program, limits, system_call_filter, print_to, theirs)
        theirs.close()
        os.close(print_to)
        try:
            processes = _started(ours)
            stack.callback(os.close, processes)
            kept, stopped = _Watch(limits, printed, processes, init, owner).until_the_end()
        finally:
            # However we leave: nothing of the call stays behind. It is waited for here only, so
            # that the number is still its own.
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)
        return Outcome(kept.parts(), kept.left_out, None if stopped else _status(ours), stopped)


def _started(ours: socket.socket) -> int:
    """Wait until `init` is ready. Returns a descriptor of the namespace's /proc."""
    ours.settimeout(_SET_UP_S)
    try:
        message, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
    except TimeoutError:
        raise CallFailed("the sandbox could not start the program in time") from None
    if not descriptors:
        why = json.loads(message)["error"] if message else "it was killed"
        raise CallFailed(f"the sandbox could not start the program: {why}")
    return descriptors[0]


def _status(ours: socket.socket) -> int | None:
    """The program's exit status as `init` reports it; None if it could not report."""
    message = ours.recv(4096)
    return int(json.loads(message)["status"]) if message else None


class _Watch:
    """Watches the output, time and memory of a running call."""

    def __init__(self, limits: Limits, printed: int, processes: int, init: int, owner: int) -> None:
        self._limits = limits
        self._printed = printed
        self._processes = processes
        self._init = init
        self._owner = owner
        self._kept = _Kept(limits.output_kib * 1024)
        self._stopped: str | None = None

    def until_the_end(self) -> tuple["_Kept", str | None]:
        """Wait for the end. Returns the output, and the limit that stopped the call, if any."""
        deadline = time.monotonic() + self._limits.call_seconds
        poll = select.poll()
        ended = os.pidfd_open(self._init)  # which ends after the last process of the namespace
        poll.register(ended, select.POLLIN)
        poll.register(self._printed, select.POLLIN)
        poll.register(self._owner, select.POLLIN)
        look_at = time.monotonic()
        try:
            while True:
                events = dict(poll.poll(_TICK_S * 1000))
                if self._printed in events and not self._read_printed():
                    poll.unregister(self._printed)
                if ended in events:
                    break
                now = time.monotonic()
                if self._owner in events:
                    poll.unregister(self._owner)
                    self._stop("its caller went away")
                elif now > deadline:
                    self._stop(f"it ran longer than {self._limits.call_seconds:g} s")
                elif self._kept.total > _FLOOD * self._kept.limit:
                    self._stop(f"it printed more than {_FLOOD * self._limits.output_kib} KiB")
                elif now >= look_at:
                    if self._memory() > self._limits.memory_mib << 20:
                        memory = self._limits.memory_mib
                        self._stop(f"its processes used more than {memory} MiB together")
                    look_at = now + _TICK_S
        finally:
            os.close(ended)
        while self._read_printed():
            pass
        return self._kept, self._stopped

    def _stop(self, why: str) -> None:
        if self._stopped is None:
            self._stopped = why
            os.kill(self._init, signal.SIGKILL)

    def _read_printed(self) -> bool:
        """Read from the pipe. Returns False at its end, or if it is empty."""
        try:
            block = os.read(self._printed, 1 << 16)
        except BlockingIOError:
            return False
        self._kept.add(block)
        return bool(block)

    def _memory(self) -> int:
        """Bytes of memory of all processes. The exact value is read only near the limit."""
        processes = [name for name in os.listdir(self._processes) if name.isdecimal()]
        # The first figure counts shared memory for each process, the second in equal parts.
        at_most = sum(self._sum(f"{process}/statm", _resident) for process in processes)
        if at_most <= self._limits.memory_mib << 20:
            return at_most
        return sum(self._sum(f"{process}/smaps_rollup", _proportional) for process in processes)

    def _sum(self, path: str, measure: Callable[[str], int]) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._processes)
            with os.fdopen(descriptor) as file:
                return measure(file.read())
        except (FileNotFoundError, ProcessLookupError):
            return 0  # it has just ended


def _resident(statm: str) -> int:
    return int(statm.split()[1]) * resource.getpagesize()


def _proportional(smaps_rollup: str) -> int:
    lines = (line.split() for line in smaps_rollup.splitlines())
    return sum(int(line[1]) * 1024 for line in lines if line[0] == "Pss:")


class _Kept:
    """The first and the last part of a program's output."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._first = bytearray()
        self._last = bytearray()

    def add(self, block: bytes) -> None:
        self.total += len(block)
        space = self.limit // 2 - len(self._first)
        self._first += block[:space]
        self._last = (self._last + block[space:])[-(self.limit - self.limit // 2) :]

    def parts(self) -> tuple[bytes, bytes]:
        return bytes(self._first), bytes(self._last)

    @property
    def left_out(self) -> int:
        return self.total - len(self._first) - len(self._last)


# What follows runs in children of the keeper, and never returns into its code.


def _init(
    argv: list[str],
    program: bytes,
    limits: Limits,
    system_call_filter: bytes,
    print_to: int,
    theirs: socket.socket,
) -> NoReturn:
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        no_programs = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        # Processes only, of this namespace, and of those none with privileges (which this one has).
        kernel.mount("proc", "/proc", "proc", no_programs, "subset=pid,hidepid=invisible")
        kernel.mount("tmpfs", "/run", "tmpfs", no_programs, f"size={2 * PROGRAM_BYTES},mode=0755")
        with open(room.PROGRAM, "wb") as file:
            file.write(program)
        kernel.make_read_only("/run")
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        socket.send_fds(theirs, [b"{}"], [processes])
        first = os.fork()
        if first == 0:
            _program(argv, limits, system_call_filter, print_to)
        os.close(print_to)
        process = 0
        while process != first:
            process, wait_status = os.wait()
        status = os.waitstatus_to_exitcode(wait_status)
        theirs.send(json.dumps({"status": 128 - status if status < 0 else status}).encode())
    except OSError as error:
        theirs.send(json.dumps({"error": str(error)}).encode())
    finally:
        os._exit(0)


def _program(argv: list[str], limits: Limits, system_call_filter: bytes, print_to: int) -> NoReturn:
    """Drop privileges and resources, then execute the program."""
    try:
        os.setsid()
        os.set_blocking(print_to, True)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(print_to, 1)
        os.dup2(print_to, 2)
        os.closerange(3, OPEN_FILES)
        # Whoever runs out of memory, the kernel is to take it from programs first.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        os.chdir(room.WORK)
        os.umask(0o022)
        os.nice(_NICE)
        for limit, value in _rlimits(limits).items():
            resource.setrlimit(limit, (value, value))
        kernel.give_up_privileges()
        kernel.filter_system_calls(system_call_filter)
        os.execvpe(argv[0], argv, _ENVIRONMENT)
    except OSError as error:
        os.write(2, f"the sandbox cannot run {argv[0]}: {error}\n".encode())
    finally:
        os._exit(126)


def _rlimits(limits: Limits) -> dict[int, int]:
    return {
        resource.RLIMIT_AS: limits.memory_mib << 20,
        resource.RLIMIT_NPROC: limits.processes + _OWN_PROCESSES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_FSIZE: limits.disk_mib << 20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
