"""The launcher's files in a run's folder: the lock of the live launch, and the launch's arguments.

launch.lock    held while any process of a launch lives; the kernel releases it with the last one
launch.json    preset, flags, seconds so far and how the launch ended, for the next launch, for
               evaluation and for `agentrl runs`
summary.json   the report of a finished run
"""

import fcntl
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from pydantic import ConfigDict

from agentrl.configs import ConfigError
from agentrl.configs.run_json import read_run_json
from agentrl.configs.secret_variables import VARIABLES
from agentrl.whole_file import write_whole

# Longer than a part's grace with the default of --drain_seconds (30 s, and 30 s to save and to hand
# back): samplers need all of it where MongoDB was killed with the launch.
PARTS_END_S = 75.0


class RunLock:
    """The lock of a run's folder: one launch at a time, with one lock for each machine.

    Subreapers inherit it (`fileno()`), so that it is held until the last process of a launch has
    ended, also if the launch was killed.
    """

    def __init__(self, folder: Path, machine_rank: int = 0) -> None:
        self._path = folder / (
            "launch.lock" if machine_rank == 0 else f"launch-{machine_rank}.lock"
        )
        self._file: int | None = None

    def acquire(self, patience_s: float = PARTS_END_S) -> None:
        """Take the lock. Raises `ConfigError` if a launch is live.

        A launch that was killed needs up to a minute until its parts are gone: that is waited for.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.read(file, 32).decode().strip()
                os.lseek(file, 0, os.SEEK_SET)
                if _is_alive(holder):
                    os.close(file)
                    raise ConfigError(
                        f"run folder {self._path.parent} belongs to a live launch (process "
                        f"{holder}): stop that first, or use another run name"
                    ) from None
                if time.monotonic() > deadline:
                    os.close(file)
                    raise ConfigError(
                        f"run folder {self._path.parent} is held by parts of a launch that was "
                        f"killed (process {holder or 'unknown'}) and have not ended yet: try again "
                        "in a moment, or end them"
                    ) from None
                time.sleep(0.2)
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
        self._file = file

    def release(self) -> None:
        """Release the lock of this process. Living subreapers keep theirs."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def fileno(self) -> int:
        """The descriptor that subreapers inherit."""
        assert self._file is not None, "the lock is not held"
        return self._file

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def lock_holder(folder: Path) -> str | None:
    """The process id of a live launch or evaluation in this folder, or None.

    The check takes a shared lock for a moment.
    """
    for path in sorted(folder.glob("launch*.lock")):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(file, 32).decode().strip() or "unknown"
        finally:
            os.close(file)
    return None


def _is_alive(pid: str) -> bool:
    return pid.isdecimal() and Path(f"/proc/{pid}").exists()


@dataclass(frozen=True)
class LaunchRecord:
    """How a run was launched.

    `seconds`: wall time of all its launches so far. `demo_tools`: the run uses the demo's tools,
    also where it is evaluated. `origins`: where each flag came from. `withheld`: flags that hold a
    secret, which is kept nowhere, as they may be shown.
    `held_out`: success of the first and the last evaluation. `status`, `ended`: of the last launch,
    its exit status and why it was not 0; None while it lives, and for ever if it was killed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    preset: str
    flags: Sequence[str]
    seconds: float = 0.0
    demo_tools: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)
    withheld: Mapping[str, str] = field(default_factory=dict)
    max_steps: int | None = None
    held_out: Sequence[float] = field(default_factory=list)
    status: int | None = None
    ended: str = ""


def write_launch(folder: Path, launch: LaunchRecord) -> None:
    """Write `launch.json` atomically; only its owner can read it."""
    with write_whole(folder / "launch.json") as partial:
        partial.touch(mode=0o600)
        partial.write_text(json.dumps(asdict(launch), indent=1), encoding="utf-8")


def read_launch(folder: Path) -> LaunchRecord | None:
    """Read `launch.json`; None if the run was never launched. Raises `ConfigError`."""
    return read_run_json(folder / "launch.json", LaunchRecord)


def refuse_withheld(launch: LaunchRecord, given: Collection[str], needed: Collection[str]) -> None:
    """Raise `ConfigError` if a secret flag of the launch is needed and not `given` again.

    Secrets are not stored.
    """
    for name in needed:
        if name in launch.withheld and name not in given:
            raise ConfigError(
                f"--{name}: the run was launched with {launch.withheld[name]}, and its password is "
                f"kept nowhere: set {VARIABLES.get(name, f'--{name}')} as for the launch"
            )


def steps_finished(folder: Path) -> int | None:
    """The steps of a finished run, by its report; None for one that is not finished."""
    file = folder / "summary.json"
    if not file.is_file():
        return None
    return int(json.loads(file.read_text(encoding="utf-8"))["steps"])


def last_checkpoint(folder: Path) -> int | None:
    """The step of the last checkpoint, by its name alone: checkpoints appear whole.

    `agentrl.training.checkpoint.layout` reads them, but loads torch, which takes seconds.
    """
    numbers = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)
