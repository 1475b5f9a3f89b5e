"""A subreaper between the launcher and one part, so that nothing of the part outlives either.

    python -I -S subreaper.py GRACE_SECONDS COMMAND [ARGUMENT ...]

The subreaper starts the command and ends with its status. When it gets SIGTERM, or when its
standard input closes (which also happens when the launcher is killed with SIGKILL), it sends the
command's process group SIGTERM (and again with each further SIGTERM that it gets), waits up to
GRACE_SECONDS, and then kills what is left of the command's whole family. As the family's subreaper
it also finds processes that left the group or lost their parent, such as the workers of
`accelerate launch`. SIGUSR1 and SIGUSR2, with which Slurm may warn all processes of a job, are for
the launcher, which stops the parts in order: subreaper and command ignore them. It imports only the
standard library and starts in milliseconds.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from types import FrameType

SUBREAPER = __file__  # the program, for command lines
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def descendants(root: int) -> list[int]:
    """All living processes below `root`, itself not included; zombies count as dead."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # The name before the last parenthesis may hold anything.
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if state not in "ZX":
            children[int(parent)].append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children[todo.pop()]
        found += below
        todo += below
    return found


class Subreaper:
    """One command and all its descendants, until the last of them has ended."""

    def __init__(self, command: list[str], grace_s: float) -> None:
        self._grace_s = grace_s
        self._status: int | None = None
        self._stops_asked = 0
        # Signals wake the loop through a pipe, because a flag could be set just before it sleeps.
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._ask_stop)
        signal.signal(signal.SIGINT, self._ask_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for warning in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(warning, signal.SIG_IGN)  # which the command inherits
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)

        def die_with_subreaper() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_subreaper
        )

    def run(self) -> int:
        """Wait for the end of the command, or for a request to end it.

        Returns its exit status as a shell does: 128 + n for signal n.
        """
        while self._status is None and not self._stops_asked:
            readable, _, _ = select.select([sys.stdin, self._wake_read], [], [])
            if sys.stdin in readable and not os.read(sys.stdin.fileno(), 1):
                self._stops_asked += 1
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
            self._reap()
        self._end_family()
        assert self._status is not None
        return self._status

    def _ask_stop(self, number: int, frame: FrameType | None) -> None:
        self._stops_asked += 1

    def _end_family(self) -> None:
        """Send SIGTERM, wait for the grace period, send SIGKILL until no process is left."""
        if self._status is None:
            self._signal(-self._process.pid, signal.SIGTERM)
        else:
            # The command has ended; the processes that it left get SIGTERM too.
            for pid in descendants(os.getpid()):
                self._signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        handed_on = 1
        while family := descendants(os.getpid()):
            if time.monotonic() > deadline:
                for pid in family:
                    self._signal(pid, signal.SIGKILL)
            if self._stops_asked > handed_on and self._status is None:
                handed_on = self._stops_asked
                self._signal(-self._process.pid, signal.SIGTERM)
            time.sleep(_POLL_S)
            self._reap()
        while self._status is None:
            self._reap()
            time.sleep(_POLL_S)

    def _reap(self) -> None:
        """Reap ended children, adopted ones included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._process.pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        try:
            if pid < 0:
                os.killpg(-pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            pass


def main() -> None:
    """Run the command of `sys.argv`."""
    grace_s, *command = sys.argv[1:]
    try:
        subreaper = Subreaper(command, float(grace_s))
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    status = subreaper.run()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
