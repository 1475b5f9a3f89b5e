"""The last lines of a launch: what failed, what was saved, and how to continue."""

import re
from dataclasses import dataclass
from pathlib import Path

from agentrl.databases.attempt_tally import AttemptCounts
from agentrl.launcher.processes import Event, last_lines, signal_name
from agentrl.launcher.run_folder import last_checkpoint

FAILED = 1
REFUSED = 2  # invalid input
_SHOWN_LOG_LINES = 12
_ELASTIC_REPORT = "] failed (exitcode: "
_RANK_KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")  # by a signal


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    status: int
    reason: str = ""  # for display; empty after success
    log: str = ""  # the end of the failed part's log
    first: str = ""  # what the user has to do before continuing
    stopped: bool = False  # by a signal


@dataclass(frozen=True)
class Saved:
    """The stored state of a run when all its processes have ended."""

    run: str  # the run's arguments of a verb, see `report.run_arguments`
    folder: Path
    step: int  # the last optimizer step
    drain_seconds: float
    attempts: AttemptCounts  # of this launch
    trains: bool = True

    @property
    def checkpoint(self) -> int | None:
        """Step of the last checkpoint; None without one."""
        return last_checkpoint(self.folder)

    @property
    def sentence(self) -> str:
        """One sentence on what was saved and what was lost."""
        trajectories = f"{self.attempts.stored} trajectories stored by this launch"
        if not self.trains:
            return f"saved: {trajectories}"
        if self.checkpoint is None:
            return f"saved: no checkpoint yet, {trajectories}"
        lost = self.step - self.checkpoint
        late = (
            f" (without the {lost} steps after it: the trainer did not save them within "
            f"--drain_seconds {self.drain_seconds:g})"
            if lost > 0
            else ""
        )
        return f"saved: checkpoint-{self.checkpoint} in {self.folder}{late}, {trajectories}"

    @property
    def way_on(self) -> str:
        """How the run is continued."""
        if not self.trains:
            return "the same command goes on with the other tasks"
        return way_on_from(self.checkpoint)


def way_on_from(checkpoint: int | None) -> str:
    """How a run whose last checkpoint is of this step is continued; None without one."""
    if checkpoint is None:
        return "the same command starts it again: there is no checkpoint yet"
    return f"the same command resumes from checkpoint-{checkpoint}"


def stopped_by(number: int) -> Outcome:
    """The outcome of a launch that a signal ended."""
    return Outcome(128 + number, f"stopped by {signal_name(number)}", stopped=True)


def part_failed(event: Event) -> Outcome:
    """The outcome of a launch of which a necessary part ended."""
    lines = last_lines(event.part.log, 500)
    # torch's launcher appends about forty lines that only say that its child failed.
    added = [i for i, line in enumerate(lines) if _ELASTIC_REPORT in line]
    shown = lines[: added[0] if added else None][-_SHOWN_LOG_LINES:]
    log = "".join(f"\n    {line}" for line in shown)
    killed = _RANK_KILLED.search(lines[added[0]]) if added else None
    if killed is None:
        return Outcome(FAILED, event.sentence, log)
    number, rank = killed.groups()
    ended = f"{event.sentence}; its process {rank} was ended by {signal_name(int(number))}"
    return Outcome(FAILED, ended, log)


def failures_lines(attempts: AttemptCounts, run: str) -> list[str]:
    """How many attempts of this launch failed, and the command that lists them."""
    if attempts.sentence is None:
        return []
    lines = [f"{attempts.sentence} (`agentrl show {run} --failed` lists them)"]
    return [*lines, "most attempts failed: the exit status is 1"] if attempts.most_failed else lines


def last_lines_of(outcome: Outcome, saved: Saved | None) -> list[str]:
    """The last lines of a launch that failed or was stopped. `saved`: None if it keeps no run."""
    if not outcome.reason:
        return []
    way_on = saved.way_on if saved else "the same command starts it again"
    kept = f"{saved.sentence}; " if saved and outcome.stopped else ""
    end = f". The log ends:{outcome.log}" if outcome.log else ""
    failed = failures_lines(saved.attempts, saved.run)[:1] if saved else []
    return ["", *failed, f"{outcome.reason}; {kept}{outcome.first}{way_on}{end}"]
