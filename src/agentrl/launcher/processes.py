"""Child processes of a run: started, watched, restarted when they die, stopped in order.

Every process runs under a subreaper (`subreaper.py`) in a session of its own. So the terminal's
Ctrl-C reaches only the launcher, which stops the processes in order, and no process outlives the
launcher.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import IO

from agentrl.subreaper import SUBREAPER, descendants

RESTARTS = 10  # how often in a row a part that should last as long as the run is started again
FORGIVEN_AFTER_S = 600.0  # a part that ran for so long begins a new row
USER_ERROR = 2  # exit status of a part that was called wrongly: calling it again would not help
_POLL_S = 0.05
_START_MARK = "=== "


class Kind(IntEnum):
    """The kind of a part. Parts are stopped in this order, and the database last.

    Samplers and trainer are stopped together: both have `--drain_seconds` and need the other parts.
    """

    SAMPLER = 0
    TRAINER = 1
    SERVICE = 2


@dataclass(frozen=True)
class Part:
    """One process of a run, as it is to be started."""

    name: str
    kind: Kind
    command: Sequence[str]
    log: Path | None  # standard output and error are appended here; None: they are this process's
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the launcher's own
    restarts: int = 0  # how often in a row it is started again after it died
    may_end: bool = False  # exit status 0 means that its work is done, not that it died
    grace_s: float = 10.0  # between SIGTERM and SIGKILL


class Change(StrEnum):
    """How a part ended."""

    DONE = "done"  # it ended by itself, as it may
    DIED = "died"  # it will be started again
    LOST = "lost"  # it died and is not started again


@dataclass(frozen=True)
class Event:
    """A part ended. `status` is its exit status as a shell gives it: 128 + n for signal n."""

    part: Part
    change: Change
    status: int

    @property
    def sentence(self) -> str:
        """For people."""
        ended = (
            f"was ended by {signal_name(self.status - 128)}"
            if self.status > 128
            else (f"ended with status {self.status}")
        )
        then = {
            Change.DONE: "its work is done",
            Change.DIED: "it is started again",
            Change.LOST: "it is not started again",
        }[self.change]
        where = "" if self.part.log is None else f" (log: {self.part.log})"
        return f"{self.part.name} {ended}: {then}{where}"


@dataclass
class DeathsInARow:
    """Deaths of something that is started again, each soon after the start before it.

    `started`: the last start, in seconds of the monotonic clock.
    """

    count: int = 0
    started: float = 0.0

    def died(self, now: float, forgiven_after_s: float = FORGIVEN_AFTER_S) -> int:
        """It died: which death of the row this is. What ran for long begins a new row."""
        self.count = 1 if now - self.started >= forgiven_after_s else self.count + 1
        return self.count


@dataclass
class _Watched:
    part: Part
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0  # all of them
    row: DeathsInARow = field(default_factory=DeathsInARow)
    start_at: float | None = None  # when a dead part is started again


class Supervisor:
    """The parts of one launch.

    `first_delay_s`: a part that died is started again after this, then twice this, and so on, but
    within half a minute. `forgiven_after_s`: one that ran for so long has its restarts back.
    `inherited`: a file descriptor that every subreaper keeps open, such as a lock that must last as
    long as any part lives.
    """

    def __init__(
        self,
        first_delay_s: float = 0.5,
        inherited: int | None = None,
        forgiven_after_s: float = FORGIVEN_AFTER_S,
    ) -> None:
        self._first_delay_s = first_delay_s
        self._forgiven_after_s = forgiven_after_s
        self._inherited = () if inherited is None else (inherited,)
        self._parts: dict[str, _Watched] = {}

    def start(self, part: Part) -> None:
        """Start a part and watch it from now on."""
        assert part.name not in self._parts, f"two parts are named {part.name}"
        watched = _Watched(part)
        self._parts[part.name] = watched
        self._spawn(watched)

    def poll(self) -> list[Event]:
        """Return the parts that ended since the last call, and restart due ones. Call it often."""
        events: list[Event] = []
        for watched in self._parts.values():
            if watched.process is None:
                if watched.start_at is not None and time.monotonic() >= watched.start_at:
                    self._spawn(watched)
                continue
            status = watched.process.poll()
            if status is None:
                continue
            watched.process = None
            change = self._judge(watched, 128 - status if status < 0 else status)
            events.append(change)
        return events

    def revive(self, part: Part) -> Event:
        """A part that ended with `Change.DONE` had work left: it counts as one that died."""
        watched = self._parts[part.name]
        assert watched.process is None and watched.start_at is None
        return self._died(watched, 0)

    def alive(self, kind: Kind) -> int:
        """How many parts of this kind run now."""
        return sum(w.process is not None for w in self._of(kind))

    def expected(self, kind: Kind) -> int:
        """How many parts of this kind run now or will be started again."""
        return sum(w.process is not None or w.start_at is not None for w in self._of(kind))

    def restarts(self, kind: Kind) -> int:
        """How often parts of this kind died."""
        return sum(w.deaths for w in self._of(kind))

    async def stop(self, kind: Kind) -> None:
        """End all parts of this kind at once: SIGTERM, then SIGKILL after their grace period."""
        running: list[tuple[_Watched, subprocess.Popen[bytes]]] = []
        for watched in self._of(kind):
            watched.start_at = None
            if watched.process is not None:
                watched.process.send_signal(signal.SIGTERM)
                running.append((watched, watched.process))
        for watched, process in running:
            await _gone(process, watched.part.grace_s + 5)
            watched.process = None

    def hurry(self, kind: Kind) -> None:
        """Send a further SIGTERM to parts of this kind that are being stopped."""
        for watched in self._of(kind):
            if watched.process is not None:
                watched.process.send_signal(signal.SIGTERM)

    async def stop_all(self) -> None:
        """End everything, in the order of `Kind`."""
        await asyncio.gather(self.stop(Kind.SAMPLER), self.stop(Kind.TRAINER))
        await self.stop(Kind.SERVICE)

    def kill_all(self) -> None:
        """End everything now, without a chance to finish anything."""
        for watched in self._parts.values():
            watched.start_at = None
            if watched.process is None:
                continue
            # The subreaper may not come round to it, so its family is killed from here.
            for pid in [*descendants(watched.process.pid), watched.process.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            watched.process.wait()
            watched.process = None

    def _of(self, kind: Kind) -> list[_Watched]:
        return [w for w in self._parts.values() if w.part.kind == kind]

    def _spawn(self, watched: _Watched) -> None:
        part = watched.part
        watched.start_at = None
        watched.row.started = time.monotonic()
        with _output(part) as log:
            watched.process = subprocess.Popen(
                [sys.executable, "-I", "-S", SUBREAPER, str(part.grace_s), *part.command],
                stdin=subprocess.PIPE,  # closed by our end, however we end: the subreaper's notice
                stdout=log,
                stderr=log,
                env={**os.environ, **part.environment},
                start_new_session=True,
                pass_fds=self._inherited,
            )

    def _judge(self, watched: _Watched, status: int) -> Event:
        if status == 0 and watched.part.may_end:
            return Event(watched.part, Change.DONE, status)
        return self._died(watched, status)

    def _died(self, watched: _Watched, status: int) -> Event:
        part = watched.part
        now = time.monotonic()
        watched.deaths += 1
        in_a_row = watched.row.died(now, self._forgiven_after_s)
        if status == USER_ERROR or in_a_row > part.restarts:
            return Event(part, Change.LOST, status)
        delay = min(self._first_delay_s * 2 ** (in_a_row - 1), 30.0)
        watched.start_at = now + delay
        return Event(part, Change.DIED, status)


async def _gone(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until a subreaper has ended; kill it if it does not come round to that."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
        await asyncio.sleep(_POLL_S)


@contextmanager
def _output(part: Part) -> Iterator[IO[bytes] | None]:
    """Where a part that starts writes to; None for this process's own output."""
    if part.log is None:
        yield None
        return
    part.log.parent.mkdir(parents=True, exist_ok=True)
    with part.log.open("ab") as log:
        log.write(f"{_START_MARK}{part.name} starts, {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
        log.flush()
        yield log


def signal_name(number: int) -> str:
    """`SIGKILL`, of a signal's number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_lines(log: Path | None, count: int) -> list[str]:
    """The last lines of a log that hold something, since the part was last started."""
    if log is None:
        return []
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith(_START_MARK)]
    return lines[starts[-1] + 1 if starts else 0 :][-count:]
