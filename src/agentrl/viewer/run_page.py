"""The page of a run: how far it is, what it learns, and what serves it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from agentrl.databases.device_use import DeviceHours, device_hours
from agentrl.databases.documents import Run, Split
from agentrl.databases.failed_tasks import count_failed_tasks
from agentrl.databases.quarantine import count_quarantined
from agentrl.databases.runs import SAMPLING, load_run
from agentrl.databases.server_time import server_time
from agentrl.databases.success import success_curve
from agentrl.launcher.progress import Metrics, Snapshot
from agentrl.launcher.run_folder import read_launch
from agentrl.launcher.step_panels import PANELS, values_of
from agentrl.viewer.compare_page import read_side, sides
from agentrl.viewer.places import Place
from agentrl.viewer.samplers import SamplerLine, busiest, read_samplers
from agentrl.viewer.services import ServiceLine, read_services
from agentrl.viewer.steps import read_steps, thinned
from agentrl.viewer.timeline import PHASES

_SHOWN_EVALUATIONS = 20
_SLOW_S = 10.0
_MOST_STEPS = 500  # points of a curve


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
class SlowPart:
    """What a page that keeps itself fresh reads less often, because it changes slowly."""

    services: list[ServiceLine]
    samplers: list[SamplerLine]  # the busiest
    n_samplers: int
    n_failed: int
    n_quarantined: int
    evaluations: list[tuple[str, int, float]]  # name, number of tasks, and success
    hours: DeviceHours


@dataclass(frozen=True)
class RunPage:
    """What the page shows. `seconds`: of all launches so far; `sampled`, `trained`: tokens so far,
    the former also of evaluations, and None until they are summed.

    `phase`: what the run does, if a trainer or a run without one is at work.
    """

    run: Run | None
    phase: str | None
    snapshot: Snapshot
    charts: list[Chart]
    slow: SlowPart
    flags: dict[str, Any]
    seconds: float | None
    sampled: int | None
    trained: int


async def read_run_page(place: Place) -> RunPage:
    """Read it, with some fifteen small queries, and at times with as many more."""
    database = place.database
    snapshot = await place.progress.read()
    run = await load_run(database)
    launch = read_launch(place.folder)
    phase = snapshot.status if run is not None and await _at_work(place, run) else None
    stays = _SLOW_S if phase else 0.0
    slow = await place.kept.get("slow", lambda: _slow(place), stays)
    return RunPage(
        run=run,
        phase=phase,
        snapshot=snapshot,
        charts=await read_charts(place, snapshot, stays),
        slow=slow,
        flags=dict(run.flags or {}) if run else {},
        seconds=launch.seconds if launch is not None else None,
        sampled=await place.kept.get_soon("sampled", lambda: _sampled_tokens(place), stays),
        trained=sum(line["n_train_tokens"] for line in await read_steps(place)),
    )


async def _at_work(place: Place, run: Run) -> bool:
    ends = run.lease_expires
    leased = ends is not None and ends > await server_time(place.database.client)
    return leased or run.status == SAMPLING


async def _slow(place: Place) -> SlowPart:
    database = place.database
    now = await server_time(database.client)
    samplers = await read_samplers(place, now)
    return SlowPart(
        services=await read_services(place, now),
        samplers=busiest(samplers),
        n_samplers=len(samplers),
        n_failed=await count_failed_tasks(database),
        n_quarantined=(await count_quarantined(database)).total,
        evaluations=await _evaluations(place),
        hours=await device_hours(database),
    )


async def _sampled_tokens(place: Place) -> int:
    """Generated tokens of all Records, by the index that has them: a second a million or so."""
    cursor = await place.database.records.aggregate(
        [
            {"$match": {"split": {"$in": list(Split)}}},
            {"$group": {"_id": None, "tokens": {"$sum": "$tokens.generated"}}},
        ],
        hint="results",
    )
    return sum([group["tokens"] async for group in cursor])


async def _evaluations(place: Place) -> list[tuple[str, int, float]]:
    """Those by `agentrl eval`, the newest first."""
    found: list[tuple[str, int, float]] = []
    for split, epoch, name in await sides(place):
        if epoch < 0 and len(found) < _SHOWN_EVALUATIONS:
            successes = (await read_side(place, split, epoch, name)).successes
            if successes:
                found.append((name, len(successes), mean(successes.values())))
    return found


async def read_charts(place: Place, snapshot: Snapshot, stays_s: float = 0.0) -> list[Chart]:
    """Success first, then the trainer's figures. `stays_s`: how long success is not read again."""
    made = await place.kept.get_soon(
        "curve", lambda: success_curve(place.database, _MOST_STEPS), stays_s
    )
    training = "training tasks" if made is not None else "training tasks (not summed yet)"
    curve = made or []
    held_out = {each.step: each.success for each in snapshot.held_out}
    steps = sorted({*(point.step for point in curve), *held_out})
    of_step = {point.step: point for point in curve}
    success = Chart(
        "success by the step whose weights began the records",
        steps,
        [
            (training, [of_step[s].success if s in of_step else None for s in steps]),
            ("held-out tasks", [held_out.get(s) for s in steps]),
        ],
    )
    return [success, *_trainer_charts(thinned(await read_steps(place), _MOST_STEPS))]


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
        phases = [(label, [line[name] for line in metrics]) for name, label in PHASES]
        charts.append(Chart("phases of a step", steps, phases, "s", stacked=True))
    return charts
