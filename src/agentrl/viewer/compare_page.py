"""Two runs, or two evaluations of one, on the same tasks: won, lost, changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from agentrl.databases.documents import Evaluation, Split
from agentrl.databases.success import SUCCESS_SCORE
from agentrl.launcher.statistics import Estimate, mean_over_tasks
from agentrl.viewer.places import Place

_SHOWN = 500
Choice = tuple[str, int, str]  # split, epoch and name


@dataclass(frozen=True)
class Side:
    """One of the two: a run, and which epoch of a split. `groups`: its groups, by task."""

    run: str
    split: str
    epoch: int
    name: str
    successes: Mapping[str, float]
    groups: Mapping[str, str]


@dataclass(frozen=True)
class Change:
    """A task with another success."""

    task_id: str
    first: float
    second: float


@dataclass(frozen=True)
class Outcome:
    """What the second did less the first, on the tasks of both."""

    tasks: int
    won: int
    lost: int
    success: Estimate | None
    changes: list[Change]


async def sides(place: Place) -> list[Choice]:
    """What can be compared of a run: split, epoch and name.

    Held-out results of training come first, the newest before the others, then evaluations, which
    have negative epochs, in the same order, and training epochs.
    """
    named = {
        found.epoch: f"evaluation of {found.model}, {found.created_at:%Y-%m-%d %H:%M}"
        async for found in _evaluations(place)
    }
    found = []
    for split in (Split.EVAL, Split.TRAIN):
        epochs = await place.database.tasks.distinct("epoch", {"split": split})
        for epoch in sorted(epochs, key=lambda epoch: (epoch < 0, -abs(epoch))):
            kind = f"epoch {epoch}" if split == Split.TRAIN else f"held-out tasks at step {epoch}"
            found.append((str(split), epoch, named.get(epoch, kind)))
    return found


def oldest(choices: Sequence[Choice]) -> int:
    """The place of the oldest result of the kind that comes first."""
    alike = [(split, epoch < 0) for split, epoch, _ in choices]
    return alike.count(alike[0]) - 1 if alike else 0


def chosen(choices: Sequence[Choice], asked: str, run: str) -> tuple[Choice | None, str]:
    """What a form asked for (`SPLIT:EPOCH`), or one sentence on why it is not there."""
    for choice in choices:
        if f"{choice[0]}:{choice[1]}" == asked:
            return choice, ""
    split, _, epoch = asked.partition(":")
    if split == Split.TRAIN:
        return None, f"{run} has no epoch {epoch}"
    if epoch.isdecimal():
        return None, f"{run} has no evaluation at step {epoch}"
    return None, f"{run} does not have the evaluation that was chosen"


async def read_side(place: Place, split: str, epoch: int, name: str) -> Side:
    """The success of each task with scores."""
    wanted: dict[str, Any] = {"split": Split(split), "epoch": epoch}
    successes: dict[str, float] = {}
    groups: dict[str, str] = {}
    async for task in place.database.tasks.find(wanted, {"task_id": 1, "slots.score": 1}):
        scores = [slot["score"] for slot in task["slots"] if slot["score"] is not None]
        if scores:
            successes[task["task_id"]] = mean(score >= SUCCESS_SCORE for score in scores)
            groups[task["task_id"]] = task["_id"]
    return Side(place.name, split, epoch, name, successes, groups)


def compare(first: Side, second: Side) -> Outcome:
    """Compare them task by task; what differs between tasks then cancels."""
    both = sorted(first.successes.keys() & second.successes.keys())
    gains = {task: second.successes[task] - first.successes[task] for task in both}
    changes = [
        Change(task, first.successes[task], second.successes[task])
        for task in sorted(both, key=lambda task: gains[task])
        if gains[task]
    ]
    return Outcome(
        tasks=len(both),
        won=sum(gain > 0 for gain in gains.values()),
        lost=sum(gain < 0 for gain in gains.values()),
        success=mean_over_tasks(list(gains.values()), largest=1.0) if both else None,
        changes=changes[:_SHOWN],
    )


async def _evaluations(place: Place) -> Any:
    async for document in place.database.evaluations.find():
        yield Evaluation.from_mongo(document)
