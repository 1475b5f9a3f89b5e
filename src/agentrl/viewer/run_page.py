"""The page of a run: how far it is, what it learns, and what serves it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from agentrl.databases.documents import InferenceService, Run
from agentrl.databases.failed_tasks import count_failed_tasks
from agentrl.databases.quarantine import count_quarantined
from agentrl.databases.runs import load_run
from agentrl.databases.success import success_curve
from agentrl.launcher.progress import Metrics, ProgressReader, Snapshot
from agentrl.launcher.step_panels import PANELS, values_of
from agentrl.viewer.compare_page import read_side, sides
from agentrl.viewer.places import Place
from agentrl.viewer.steps import read_steps

_SHOWN_EVALUATIONS = 20
_MOST_STEPS = 500  # points of the curve of success
_PHASES = (
    ("wait_seconds", "waiting for rows"), ("train_seconds", "training"),
    ("publish_seconds", "publishing"), ("save_seconds", "saving"),
)  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """Lines over steps, as the script of the pages draws them. Values may be None.

    `stacked`: the values of a step are parts of a whole.
    """

    title: str
    steps: list[int]
    lines: list[tuple[str, list[float | None]]]
    unit: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class RunPage:
    """What the page shows."""

    run: Run | None
    snapshot: Snapshot
    charts: list[Chart]
    services: list[InferenceService]
    n_failed: int
    n_quarantined: int
    flags: dict[str, Any]
    evaluations: list[tuple[str, int, float]]  # name, number of tasks, and success


async def read_run_page(place: Place) -> RunPage:
    """Read it, with some twenty small queries."""
    database = place.database
    snapshot = await ProgressReader(database, place.folder).read()
    run = await load_run(database)
    services = [InferenceService.from_mongo(found) async for found in database.services.find()]
    return RunPage(
        run=run,
        snapshot=snapshot,
        charts=await read_charts(place, snapshot),
        services=services,
        n_failed=await count_failed_tasks(database),
        n_quarantined=(await count_quarantined(database)).total,
        flags=dict(run.flags or {}) if run else {},
        evaluations=await _evaluations(place),
    )


async def _evaluations(place: Place) -> list[tuple[str, int, float]]:
    """Those by `agentrl eval`, the newest first."""
    found: list[tuple[str, int, float]] = []
    for split, epoch, name in await sides(place):
        if epoch < 0 and len(found) < _SHOWN_EVALUATIONS:
            successes = (await read_side(place, split, epoch, name)).successes
            if successes:
                found.append((name, len(successes), mean(successes.values())))
    return found


async def read_charts(place: Place, snapshot: Snapshot) -> list[Chart]:
    """Success first, then the trainer's figures."""
    curve = await success_curve(place.database, _MOST_STEPS)
    held_out = {each.step: each.success for each in snapshot.held_out}
    steps = sorted({*(point.step for point in curve), *held_out})
    of_step = {point.step: point for point in curve}
    success = Chart(
        "success by the step whose weights began the records",
        steps,
        [
            ("training tasks", [of_step[s].success if s in of_step else None for s in steps]),
            ("held-out tasks", [held_out.get(s) for s in steps]),
        ],
    )
    return [success, *_trainer_charts(await read_steps(place))]


def _trainer_charts(metrics: Sequence[Metrics]) -> list[Chart]:
    charts = []
    steps = [line["step"] for line in metrics]
    for panel in PANELS:
        lines = [
            (label or panel.title, [line.get(name) for line in metrics])
            for name, label in panel.figures
            if values_of(metrics, name)
        ]
        if lines and panel.title != "seconds of a step":
            charts.append(Chart(panel.title, steps, lines))
    if metrics:
        rewards: list[float | None] = [line["reward_mean"] for line in metrics]
        charts.insert(0, Chart("mean reward of trained rows", steps, [("reward", rewards)]))
        rate: list[float | None] = [
            line["n_train_tokens"] / max(line["step_seconds"], 1e-9) for line in metrics
        ]
        charts.append(Chart("trained tokens per second", steps, [("tokens/s", rate)]))
        phases = [(label, [line[name] for line in metrics]) for name, label in _PHASES]
        charts.append(Chart("phases of a step", steps, phases, "s", stacked=True))
    return charts
