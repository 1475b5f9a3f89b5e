"""What the processes of a run did in the time of an optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentrl.databases.documents import Split
from agentrl.launcher.progress import Metrics
from agentrl.viewer.places import Place

# The trainer's phases, in the order in which a step has them.
PHASES = (
    ("wait_seconds", "waiting for rows"), ("train_seconds", "training"),
    ("publish_seconds", "publishing"), ("save_seconds", "saving"),
)  # fmt: skip
_BUCKETS = 60


@dataclass(frozen=True)
class Stretch:
    """A phase of the trainer: its share of the step's time, and its seconds."""

    name: str
    share: float
    seconds: float


@dataclass(frozen=True)
class SamplerTime:
    """Attempts of a sampler that ended in the step's time, by sixtieths of it."""

    owner: str
    ended: list[int]


@dataclass(frozen=True)
class Timeline:
    """A step's time. `most`: the largest number of attempts in a sixtieth."""

    seconds: float
    trainer: list[Stretch]
    samplers: list[SamplerTime]
    most: int


async def read_timeline(place: Place, figures: Metrics) -> Timeline | None:
    """Read it; None where the step's time is not known."""
    seconds = float(figures.get("step_seconds") or 0.0)
    if not seconds or "time" not in figures:
        return None
    end = float(figures["time"])
    begin = end - seconds
    within = {"$gte": _at(begin), "$lt": _at(end)}
    found = place.database.records.find(
        {"split": {"$in": list(Split)}, "finished_at": within},
        {"owner": 1, "finished_at": 1, "_id": 0},
        hint="recent",
    )
    ended: dict[str, list[int]] = {}
    async for record in found:
        share = (record["finished_at"].timestamp() - begin) / seconds
        counts = ended.setdefault(record["owner"], [0] * _BUCKETS)
        counts[max(0, min(_BUCKETS - 1, int(share * _BUCKETS)))] += 1
    return Timeline(
        seconds=seconds,
        trainer=_phases(figures, seconds),
        samplers=[SamplerTime(owner, counts) for owner, counts in sorted(ended.items())],
        most=max((max(counts) for counts in ended.values()), default=0),
    )


def _phases(figures: Metrics, seconds: float) -> list[Stretch]:
    known: Sequence[tuple[str, Any]] = [(name, figures.get(field)) for field, name in PHASES]
    phases = [Stretch(name, value / seconds, value) for name, value in known if value]
    rest = seconds - sum(each.seconds for each in phases)
    return [*phases, Stretch("bookkeeping", rest / seconds, rest)] if rest > 0 else phases


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
