"""How a launch ended, in its last lines: what failed, what was saved, and how to go on."""

import re
from dataclasses import dataclass
from pathlib import Path

from agentrl.databases.attempt_tally import AttemptCounts
from agentrl.launcher.processes import Event, last_lines, signal_name
from agentrl.launcher.run_folder import last_checkpoint

FAILED = 1
REFUSED = 2  # for what the user gave
_SHOWN_LOG_LINES = 12
_ELASTIC_REPORT = "] failed (exitcode: "
_RANK_KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")  # by a signal


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    status: int
    reason: str = ""  # for people, if it did not end as it should
    log: str = ""  # the end of the log that says more
    first: str = ""  # what has to be done before it can go on
    stopped: bool = False  # by a signal


@dataclass(frozen=True)
class Saved:
    """What there is of a run when all its processes have ended."""

    run: str  # as verbs are told it
    folder: Path
    step: int  # the last one that was taken
    drain_seconds: float
    attempts: AttemptCounts  # of this launch

    @property
    def checkpoint(self) -> int | None:
        """The last one's step."""
        return last_checkpoint(self.folder)

    @property
    def sentence(self) -> str:
        """What was saved, and what was not."""
        trajectories = f"{self.attempts.stored} trajectories stored by this launch"
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
        """How the run is gone on with."""
        if self.checkpoint is None:
            return "the same command starts it again: there is no checkpoint yet"
        return f"the same command resumes from checkpoint-{self.checkpoint}"


def stopped_by(number: int) -> Outcome:
    """A signal ended it."""
    return Outcome(128 + number, f"stopped by {signal_name(number)}", stopped=True)


def part_failed(event: Event) -> Outcome:
    """A part that the run cannot do without ended."""
    lines = last_lines(event.part.log, 500)
    # torch's launcher adds some forty lines that say no more than that its child failed.
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
    """How many attempts of this launch failed, and where to look; `run`: as verbs are told it."""
    if attempts.sentence is None:
        return []
    lines = [f"{attempts.sentence} (`agentrl show {run} --failed` lists them)"]
    return [*lines, "most attempts failed: the exit status is 1"] if attempts.most_failed else lines


def last_lines_of(outcome: Outcome, saved: Saved | None) -> list[str]:
    """The end of a launch that did not end as it should. `saved`: None where no run is kept."""
    if not outcome.reason:
        return []
    way_on = saved.way_on if saved else "the same command starts it again"
    kept = f"{saved.sentence}; " if saved and outcome.stopped else ""
    end = f". The log ends:{outcome.log}" if outcome.log else ""
    failed = failures_lines(saved.attempts, saved.run)[:1] if saved else []
    return ["", *failed, f"{outcome.reason}; {kept}{outcome.first}{way_on}{end}"]
