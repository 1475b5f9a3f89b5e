"""One process of a run on one host, watched as systemd would: started again whenever it ends.

Faults are done to it here: killed, stopped for a while. What else befalls its host is `network`'s.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from network import Host

_PR_SET_PDEATHSIG = 1
_RESTART_S = 1.0


class HostProcess:
    """A command on a host. Its output is appended to `log`.

    `poll` must be called often: it starts again what ended, unless it ended with status 0 and
    `may_end` says that its work is then done.
    """

    def __init__(
        self, host: Host, command: Sequence[str], log: Path, *, may_end: bool = False
    ) -> None:
        self.host = host
        self.command = list(command)
        self.deaths = 0  # ends that were not `end`, whoever caused them
        self._log = log
        self._may_end = may_end
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at: float | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """Whether it ended by itself with its work done."""
        return self._done

    @property
    def pid(self) -> int | None:
        """The process itself, while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it on its host."""
        assert self._process is None
        self._start_at = None
        self._done = False
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.host.command(*self.command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_die_with_us,
            )  # fmt: skip

    def poll(self) -> None:
        """Look after it."""
        if self._process is not None and self._process.poll() is not None:
            self._done = self._may_end and self._process.returncode == 0
            self._gone(_RESTART_S)
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self.start()

    def kill(self, down_s: float) -> None:
        """End it as a crash would; it is started again after `down_s` seconds."""
        if self._process is not None:
            self._process.kill()
        self._gone(down_s)

    def stop(self) -> None:
        """Freeze it (SIGSTOP): it neither works nor ends, and its connections stay open."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `stop`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def end(self, grace_s: float = 20.0) -> int | None:
        """End it in order and do not start it again; returns its status, if it ran."""
        self._start_at = None
        if self._process is None:
            return None
        process = self._process
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
        status = process.wait()
        self._sweep(process)
        self._process = None
        return status

    def _gone(self, restart_s: float) -> None:
        """The process was killed or has ended: what it started goes too, as with systemd."""
        if self._process is not None:
            self._process.wait()
            self._sweep(self._process)
            self._process = None
        if not self._done:
            self.deaths += 1
            self._start_at = time.monotonic() + restart_s

    @staticmethod
    def _sweep(process: subprocess.Popen[bytes]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nothing of its group is left


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
