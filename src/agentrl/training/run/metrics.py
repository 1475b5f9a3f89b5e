"""The metrics of a step, written to a JSONL file and optionally to trackers. Only rank 0 writes."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, ClassVar, Protocol

from accelerate import Accelerator

from agentrl.configs import Config, trackers_of
from agentrl.databases.row_ledger import RowCounts, RowHeader
from agentrl.training.run.trackers import Trackers
from agentrl.training.step.statistics import StepStatistics


@dataclass(frozen=True)
class StepTimes:
    """The durations of a step."""

    step_seconds: float  # from the end of the last step to the end of this one
    train_seconds: float  # forward, backward and update
    wait_seconds: float  # for rows
    publish_seconds: float  # pause of training for publications
    save_seconds: float  # pause of training to copy the state of a checkpoint
    stall_seconds: float  # longest pause of a service for the last finished publication


@dataclass(frozen=True)
class StepMetrics(StepStatistics, StepTimes):
    """One line of `metrics.jsonl`."""

    step: int
    version: int  # the newest policy version before the step; its services sampled meanwhile
    time: float  # seconds since 1970, when the step ended
    reward_mean: float  # over the step's rows: what filters left out is not in it
    reward_std: float
    n_rows: int
    n_continuations: int  # of the rows: where a turn was followed by more
    n_drifts: int  # continuations where the chat template rewrites what was sampled
    n_tokens: int
    plan_balance: float  # the most expensive rank's operations over the mean of all ranks
    rows_ready: int  # rows that wait in the database, counted up to 10,000
    rows_evicted: int  # of the whole run: too old to be trained
    outages: int  # number of unreachable dependencies that samplers wait for


class MetricsLine(Protocol):
    """A dataclass of one step's figures."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def step(self) -> int: ...

    @property
    def time(self) -> float: ...


def step_metrics(
    step: int,
    version: int,
    statistics: StepStatistics,
    rows: Sequence[RowHeader],
    plan_balance: float,
    times: StepTimes,
    counts: RowCounts,
    n_outages: int,
) -> StepMetrics:
    """Make the line of a step. `rows`: all rows of the step. `n_outages`: present outages."""
    rewards = [row.reward for row in rows]
    return StepMetrics(
        step=step,
        version=version,
        time=time.time(),
        reward_mean=mean(rewards),
        reward_std=pstdev(rewards),
        n_rows=len(rows),
        n_continuations=sum(row.n_continuations for row in rows),
        n_drifts=sum(row.n_drifts for row in rows),
        n_tokens=sum(row.n_tokens for row in rows),
        plan_balance=plan_balance,
        rows_ready=counts.ready,
        rows_evicted=counts.evicted,
        outages=n_outages,
        **asdict(statistics),
        **asdict(times),
    )


class MetricsWriter:
    """Writes a run's metrics on rank 0. All ranks make one."""

    def __init__(self, output: Path, accelerator: Accelerator, config: Config, step: int) -> None:
        """Continue after `step`. Lines of later steps, which are trained again, are set aside.

        Raises `ConfigError` if a tracker of `report_to` is not installed or does not start.
        """
        self._every = config.run.logging_steps
        self._file = output / "metrics.jsonl"
        self._trackers: Trackers | None = None
        self._writes = accelerator.is_main_process
        if self._writes:
            _set_aside_after(self._file, step)
            if trackers_of(config.run.report_to):
                self._trackers = Trackers(config)

    def write(self, metrics: MetricsLine) -> None:
        """Append a step's line, if it is a multiple of `logging_steps`."""
        if not self._writes or metrics.step % self._every:
            return
        values = {"step": metrics.step, **asdict(metrics)}  # the line begins with it
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self._trackers is not None:
            del values["step"], values["time"]
            self._trackers.log(_scalars(values), metrics.step)

    def trackers(self, step: int | None = None) -> Trackers | None:
        """The trackers, if there are any that show more of this step; None: of the run's end."""
        shows = self._trackers and (step is None or not step % self._every)
        return self._trackers if shows else None

    def close(self) -> None:
        """Flush the trackers."""
        if self._trackers is not None:
            self._trackers.close()


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Flatten the values to numbers for a tracker. None is left out."""
    shown: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            shown.update({f"{name}/{key}": part for key, part in value.items()})
        elif isinstance(value, tuple):
            shown.update({f"{name}/{place}": part for place, part in enumerate(value)})
        elif value is not None:
            shown[name] = value
    return shown


def _set_aside_after(file: Path, step: int) -> None:
    """Move lines of steps after `step`, and a line cut short by a crash, to a file beside."""
    if not file.exists():
        return
    kept: list[str] = []
    later: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        (kept if _step_of(line) <= step else later).append(line + "\n")
    if not later:
        return
    with file.with_name("metrics.superseded.jsonl").open("a", encoding="utf-8") as superseded:
        superseded.writelines(later)
    partial = file.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, file)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except json.JSONDecodeError:
        return float("inf")  # the last line, cut short
