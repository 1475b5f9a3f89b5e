"""Supervision, with real processes that die, linger, fork and are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agentrl.launcher.processes import Change, Event, Kind, Part, Supervisor, last_lines
from agentrl.subreaper import descendants

SLEEPER = "import time; time.sleep(60)"
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", os.getpid(), flush=True)
time.sleep(60)
"""
# Like the workers of `accelerate launch`: a grandchild in a session of its own, deaf to SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN);"
     "print('ready', flush=True); time.sleep(60)"],
    start_new_session=True,
)
print("family", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def part(folder: Path, code: str, name: str = "part", **changes: object) -> Part:
    fields: dict[str, object] = {
        "name": name,
        "kind": Kind.SAMPLER,
        "command": (sys.executable, "-c", code),
        "log": folder / f"{name}.log",
        "grace_s": 0.5,
        **changes,
    }
    return Part(**fields)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


async def events_until(supervisor: Supervisor, count: int) -> list[Event]:
    events: list[Event] = []

    def enough() -> bool:
        events.extend(supervisor.poll())
        return len(events) >= count

    await until(enough)
    return events


def log_words(folder: Path, name: str = "part") -> list[str]:
    log = folder / f"{name}.log"
    return log.read_text().split() if log.exists() else []


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(first_delay_s=0.05)
    yield supervisor
    supervisor.kill_all()


async def test_a_part_that_dies_is_started_again_until_its_limit(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(part(tmp_path, "print('here'); raise SystemExit(3)", restarts=2))
    events = await events_until(supervisor, 3)
    assert [event.change for event in events] == [Change.DIED, Change.DIED, Change.LOST]
    assert {event.status for event in events} == {3}
    assert log_words(tmp_path).count("here") == 3
    assert supervisor.expected(Kind.SAMPLER) == 0


async def test_a_part_that_ran_for_long_has_its_restarts_back(tmp_path: Path) -> None:
    supervisor = Supervisor(first_delay_s=0.05, forgiven_after_s=1.0)
    code = """
import pathlib, sys, time
turn = pathlib.Path(sys.argv[1]).read_text().count("here")
print("here", flush=True)
time.sleep(1.2 if turn == 2 else 0)
raise SystemExit(3)
"""
    log = tmp_path / "part.log"
    command = (sys.executable, "-c", code, str(log))
    try:
        supervisor.start(part(tmp_path, code, command=command, restarts=2))
        changes = [event.change for event in await events_until(supervisor, 5)]
    finally:
        supervisor.kill_all()
    assert changes == [*4 * [Change.DIED], Change.LOST]  # the third ran for long: two more come
    assert supervisor.restarts(Kind.SAMPLER) == 5


async def test_a_part_killed_with_sigkill_comes_back_as_a_new_process(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = f"import os; print('pid', os.getpid(), flush=True); {SLEEPER}"
    supervisor.start(part(tmp_path, code, restarts=1))
    await until(lambda: "pid" in log_words(tmp_path))
    first = int(log_words(tmp_path)[-1])
    os.kill(first, signal.SIGKILL)
    [event] = await events_until(supervisor, 1)
    assert (event.change, event.status) == (Change.DIED, 128 + signal.SIGKILL)
    assert "SIGKILL" in event.sentence and "started again" in event.sentence

    def restarted() -> bool:
        supervisor.poll()
        return log_words(tmp_path).count("pid") == 2

    await until(restarted)
    assert supervisor.alive(Kind.SAMPLER) == 1


async def test_a_part_that_was_called_wrongly_is_not_started_again(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(part(tmp_path, "raise SystemExit(2)", restarts=5))
    [event] = await events_until(supervisor, 1)
    assert event.change == Change.LOST


async def test_a_part_that_may_end_is_done_with_status_zero(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(part(tmp_path, "pass", name="a", restarts=5, may_end=True))
    supervisor.start(part(tmp_path, "pass", name="b", restarts=0))
    events = await events_until(supervisor, 2)
    changes = {event.part.name: event.change for event in events}
    assert changes == {"a": Change.DONE, "b": Change.LOST}


async def test_a_command_that_does_not_exist_is_a_death_with_a_sentence(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(part(tmp_path, "", command=("/no/such/command",)))
    [event] = await events_until(supervisor, 1)
    assert event.status == 127
    assert "/no/such/command cannot be started" in " ".join(log_words(tmp_path))


async def test_stop_gives_a_part_the_time_to_end_in_order(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = """
import signal, sys, time
def end(*_):
    time.sleep(0.2); print("in order", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
    supervisor.start(part(tmp_path, code, grace_s=10.0))
    await until(lambda: "up" in log_words(tmp_path))
    await supervisor.stop(Kind.SAMPLER)
    assert log_words(tmp_path)[-2:] == ["in", "order"]
    assert supervisor.alive(Kind.SAMPLER) == 0


async def test_stop_kills_after_the_grace_period_what_does_not_listen(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(part(tmp_path, STUBBORN))
    await until(lambda: "deaf" in log_words(tmp_path))
    pid = int(log_words(tmp_path)[-1])
    began = time.monotonic()
    await supervisor.stop_all()
    assert 0.4 < time.monotonic() - began < 5
    assert not is_alive(pid)


async def test_parts_are_stopped_in_the_order_of_their_kinds(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = """
import signal, sys, time
def end(*_):
    print(time.monotonic(), flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
    kinds = [Kind.SERVICE, Kind.TRAINER, Kind.SAMPLER]
    for kind in kinds:
        supervisor.start(part(tmp_path, code, name=kind.name, kind=kind))
    for kind in kinds:
        await until(lambda kind=kind: "up" in log_words(tmp_path, kind.name))
    await supervisor.stop_all()
    ended = {kind: float(log_words(tmp_path, kind.name)[-1]) for kind in kinds}
    samplers_and_trainer = max(ended[Kind.SAMPLER], ended[Kind.TRAINER])
    assert samplers_and_trainer < ended[Kind.SERVICE]


async def test_samplers_and_trainer_have_the_same_seconds_to_end_in(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = """
import signal, sys, time
def end(*_):
    print("told", time.monotonic(), flush=True); time.sleep(1.5); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
    kinds = [Kind.SAMPLER, Kind.TRAINER]
    for kind in kinds:
        supervisor.start(part(tmp_path, code, name=kind.name, kind=kind, grace_s=10))
    for kind in kinds:
        await until(lambda kind=kind: "up" in log_words(tmp_path, kind.name))
    await supervisor.stop_all()
    told = [float(log_words(tmp_path, kind.name)[-1]) for kind in kinds]
    assert abs(told[0] - told[1]) < 1.0, "none waits for the other's end"


async def test_what_slurm_warns_a_whole_job_with_ends_no_part(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = f"import os; print('pid', os.getpid(), os.getppid(), flush=True); {SLEEPER}"
    supervisor.start(part(tmp_path, code))
    await until(lambda: "pid" in log_words(tmp_path))
    pids = [int(word) for word in log_words(tmp_path)[-2:]]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for pid in pids:
            os.kill(pid, number)
    await asyncio.sleep(0.3)
    assert supervisor.poll() == [] and all(map(is_alive, pids))


async def test_grandchildren_in_sessions_of_their_own_are_stopped_too(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(part(tmp_path, FAMILY))
    await until(lambda: {"family", "ready"} <= set(log_words(tmp_path)))
    words = log_words(tmp_path)
    at = words.index("family")
    family = [int(words[at + 1]), int(words[at + 2])]
    assert all(map(is_alive, family))
    await supervisor.stop_all()
    assert not any(map(is_alive, family))


async def test_a_dying_part_takes_its_children_with_it(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start(part(tmp_path, FAMILY))
    await until(lambda: {"family", "ready"} <= set(log_words(tmp_path)))
    words = log_words(tmp_path)
    at = words.index("family")
    parent, child = int(words[at + 1]), int(words[at + 2])
    os.kill(parent, signal.SIGKILL)
    [event] = await events_until(supervisor, 1)
    assert event.status == 128 + signal.SIGKILL
    assert not is_alive(child)


LAUNCHER = """
import sys, time
from pathlib import Path
from agentrl.launcher.processes import Kind, Part, Supervisor

folder, family, stubborn = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
supervisor = Supervisor()
for name, code in (("first", family), ("second", stubborn)):
    command = (sys.executable, "-c", code)
    supervisor.start(Part(name, Kind.SAMPLER, command, folder / f"{name}.log", grace_s=0.5))
while True:
    supervisor.poll()
    time.sleep(0.05)
"""


@pytest.mark.parametrize("group", [False, True], ids=["launcher", "launcher's process group"])
async def test_nothing_survives_a_launcher_that_is_killed_with_sigkill(
    tmp_path: Path, group: bool
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), FAMILY, STUBBORN], process_group=0
    )
    try:
        await until(
            lambda: (
                # A log begins with the part's name, so no name is a word that is waited for.
                {"family", "ready"} <= set(log_words(tmp_path, "first"))
                and "deaf" in log_words(tmp_path, "second")
            )
        )
        family = descendants(launcher.pid)
        assert len(family) == 5  # two subreapers, two parts, one grandchild
        if group:
            os.killpg(launcher.pid, signal.SIGKILL)
        else:
            launcher.kill()
        launcher.wait()
        await until(lambda: not any(map(is_alive, family)))
    finally:
        launcher.kill()
        launcher.wait()


async def test_kill_all_ends_everything_at_once(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(part(tmp_path, FAMILY, grace_s=60.0))
    await until(lambda: {"family", "ready"} <= set(log_words(tmp_path)))
    words = log_words(tmp_path)
    at = words.index("family")
    family = [int(words[at + 1]), int(words[at + 2])]
    supervisor.kill_all()
    await until(lambda: not any(map(is_alive, family)), 2.0)


def test_last_lines_skips_empty_ones_and_reads_only_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 200_000 + "\n\nfirst\n\nsecond  \n\n")
    assert last_lines(log, 2) == ["first", "second"]
    log.write_text("of the last time\n=== part starts, today\nof this time\n")
    assert last_lines(log, 2) == ["of this time"]
    assert last_lines(tmp_path / "none", 2) == []
