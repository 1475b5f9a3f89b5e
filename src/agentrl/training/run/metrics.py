"""What a step is measured by, and where it is written: JSONL always, a tracker if asked for.

Trackers are Accelerate's own (TensorBoard, SwanLab). Only rank 0 writes.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from accelerate import Accelerator

from agentrl.configs import Config
from agentrl.databases.row_ledger import RowCounts, RowHeader
from agentrl.training.checkpoint.layout import recorded_config
from agentrl.training.step.statistics import StepStatistics


@dataclass(frozen=True)
class StepTimes:
    """Where the seconds of a step went."""

    step_seconds: float  # from the end of the last step to the end of this one
    train_seconds: float  # forward, backward and update
    wait_seconds: float  # for rows
    publish_seconds: float  # that training stood still to gather the weights
    save_seconds: float  # that training stood still to copy what a checkpoint holds
    stall_seconds: float  # that services generated nothing for the last publication that is done


@dataclass(frozen=True)
class StepMetrics(StepStatistics, StepTimes):
    """One line of `metrics.jsonl`: these, and what the step says of its tokens and its times."""

    step: int
    version: int  # the policy version that was trained
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
    outages: int  # dependencies that samplers wait for, such as a tool server out of reach


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
    """The line of a step from its parts. `rows`: all of the step, over all ranks. `n_outages`: how
    much is out of reach."""
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
    """Writes a run's metrics. Made on every rank, does something on rank 0."""

    def __init__(self, output: Path, accelerator: Accelerator, config: Config, step: int) -> None:
        """Go on after `step`: lines of later steps, which are trained again, are set aside.

        Raises `ConfigError` if the tracker of `report_to` is not installed.
        """
        self._accelerator = accelerator
        self._tracks = config.run.report_to != "none"
        self._every = config.run.logging_steps
        self._file = output / "metrics.jsonl"
        if accelerator.is_main_process:
            _set_aside_after(self._file, step)
        if self._tracks:
            accelerator.init_trackers(config.run.run_name, _flat(config))

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; every `logging_steps` steps."""
        if not self._accelerator.is_main_process or metrics.step % self._every:
            return
        values = {"step": metrics.step, **asdict(metrics)}  # the line begins with it
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self._tracks:
            del values["step"], values["time"]
            self._accelerator.log(_scalars(values), step=metrics.step)

    def close(self) -> None:
        """Flush the tracker. Not by `end_training`, which takes the process group along."""
        for tracker in self._accelerator.trackers:
            tracker.finish()


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """What trackers can draw: numbers, those of a list or a mapping one by one, without None."""
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


def _flat(config: Config) -> dict[str, str | int | float | bool]:
    """The flags as trackers store them."""
    flags = {k: v for group in recorded_config(config).values() for k, v in group.items()}
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in flags.items()
    }
