"""What became of the attempts of one process, counted as it happens."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class AttemptEvent(StrEnum):
    """Something that ended a step of an attempt.

    Infrastructure is the cause of `OUTAGE` and `SCORING_OUTAGE`, the run's code that of `FAILED`
    and `SCORING_FAILED` (`failures.py`). Model and task cause no failure.
    """

    SAMPLED = "sampled"
    SCORED = "scored"
    OUTAGE = "outage"  # handed back at no cost: a dependency is unreachable
    FAILED = "failed"  # the agent failed
    SILENT = "silent"  # who was to make it, on another machine, went silent
    HANDED_BACK = "handed_back"  # the process stops, or cannot start the agent
    LOST = "lost"  # another process has the slot by now
    SCORING_OUTAGE = "scoring_outage"
    SCORING_FAILED = "scoring_failed"
    QUARANTINED = "quarantined"


@dataclass
class AttemptCounts:
    """Attempts by event, and sampled trajectories by their stop reason."""

    events: Counter[AttemptEvent] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)
