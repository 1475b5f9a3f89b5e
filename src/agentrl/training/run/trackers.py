"""Trackers of a run: Weights & Biases, MLflow, SwanLab, TensorBoard, Trackio. For rank 0.

Accelerate's own take the flags and the figures; each shows tables in its own way, which is here.
The project and the place are those of the tracker's own environment variables; the run in it has
the name of AgentRL's run. A run that is resumed is a further run there.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from agentrl.configs import Config, trackers_of
from agentrl.configs.trackers import refused_by
from agentrl.databases.success import HeldOut
from agentrl.foreign_text import one_line
from agentrl.training.checkpoint.layout import recorded_config
from agentrl.training.run.rollout_table import Rollout, look_at, pages_address

logger = logging.getLogger(__name__)

PROJECT = "agentrl"  # of runs whose environment names none
_TABLE = "rollouts"
_STEPS_OF_A_FILE = 100  # of MLflow, which writes the whole file again for each step
# Of MLflow's requests at the start, unless the user's environment says otherwise. Its own defaults
# repeat a request for four minutes, which suits a server that is busy, and not one that is away.
_AT_THE_START = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class Trackers:
    """The started trackers of `--report_to`."""

    def __init__(self, config: Config) -> None:
        """Start them. Raises `ConfigError` if one is not installed or refuses."""
        run = config.run.run_name
        self.pages = pages_address()
        told = _flat(config) | {"look": look_at(run, None, self.pages)}
        self._trackers = _made(config)
        for tracker in self._trackers:
            try:
                with _impatient():
                    tracker.start()
                    tracker.store_init_configuration(told)
            except Exception as error:  # of the packages of others, whatever they raise
                raise refused_by(tracker.name, config.run.report_to, str(error)) from error

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand over the figures of a step."""
        self._each(lambda tracker: tracker.log(dict(values), step=step))

    def log_rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Hand over a table of rollouts, which are of this step."""
        self._each(lambda tracker: _LOG_TABLE[tracker.name](tracker, rollouts, step))

    def log_evaluation(self, done: HeldOut, step: int | None) -> None:
        """Hand over a finished evaluation on held-out tasks, at the step of its policy.

        `step`: the present one; None at the end. It is for Weights & Biases, which takes no figures
        of earlier steps, and at most one evaluation at each.
        """
        values = {
            "held_out/success": done.success,
            "held_out/score": done.mean_score,
            "held_out/rollouts": done.rollouts,
        }

        def hand_over(tracker: GeneralTracker) -> None:
            if isinstance(tracker, WandBTracker):
                tracker.run.define_metric("held_out/*", step_metric="held_out/step")
                place = tracker.run.step + 1 if step is None else step
                tracker.log({**values, "held_out/step": done.step}, step=place)
            else:
                tracker.log(values, step=done.step)

        self._each(hand_over)

    def close(self) -> None:
        """Flush what is not written yet."""
        self._each(lambda tracker: tracker.finish())

    def _each(self, act: Callable[[GeneralTracker], None]) -> None:
        """Have each tracker act. A tracker that fails does not end the run, and gets no more."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # of the packages of others, whatever they raise
                self._trackers.remove(tracker)
                logger.exception(
                    "tracker %s: %s; it gets nothing more until the trainer starts again, "
                    "metrics.jsonl has all figures",
                    tracker.name, one_line(str(error)),
                )  # fmt: skip


@contextmanager
def _impatient() -> Iterator[None]:
    """Have requests in the block fail in seconds where the server is away."""
    ours = {name: value for name, value in _AT_THE_START.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _made(config: Config) -> list[GeneralTracker]:
    """Accelerate's trackers, not started yet."""
    run, variables = config.run.run_name, os.environ
    # SwanLab reads a project of its own from this variable, as JSON, and fails at a name.
    swanlab_project = variables.pop("SWANLAB_PROJECT", "").strip()
    # Nobody sees a question or a progress bar in a log.
    variables.setdefault("SWANLAB_INTERACTIVE", "false")
    variables.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    workspace = variables.get("SWANLAB_WORKSPACE", "").strip()
    makers: dict[str, Callable[[], GeneralTracker]] = {
        "tensorboard": lambda: TensorBoardTracker(run, str(config.output / "tensorboard")),
        "wandb": lambda: WandBTracker(
            variables.get("WANDB_PROJECT") or PROJECT,
            name=variables.get("WANDB_NAME") or run,
            group=variables.get("WANDB_RUN_GROUP") or run,
        ),
        # MLFLOW_EXPERIMENT_NAME counts more.
        "mlflow": lambda: MLflowTracker(PROJECT, run_name=variables.get("MLFLOW_RUN_NAME") or run),
        "swanlab": lambda: SwanLabTracker(
            swanlab_project or PROJECT,
            experiment_name=run,
            **({"workspace": workspace} if workspace else {}),
        ),
        "trackio": lambda: TrackioTracker(
            variables.get("TRACKIO_PROJECT") or PROJECT, name=run, group=run, embed=False
        ),
    }
    return [makers[name]() for name in trackers_of(config.run.report_to)]


def _flat(config: Config) -> dict[str, str | int | float | bool]:
    """The flags as trackers store them."""
    flags = {k: v for group in recorded_config(config).values() for k, v in group.items()}
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in flags.items()
    }


# -- a table of rollouts, as each tracker has them

_COLUMNS = ["step", *(field.name for field in fields(Rollout))]


def _rows(rollouts: Sequence[Rollout], step: int) -> list[list[Any]]:
    return [[step, *asdict(rollout).values()] for rollout in rollouts]


def _wandb_table(tracker: WandBTracker, rollouts: Sequence[Rollout], step: int) -> None:
    tracker.log_table(_TABLE, columns=_COLUMNS, data=_rows(rollouts, step), step=step)


def _mlflow_table(tracker: MLflowTracker, rollouts: Sequence[Rollout], step: int) -> None:
    mlflow = importlib.import_module("mlflow")
    first = (step - 1) // _STEPS_OF_A_FILE * _STEPS_OF_A_FILE + 1
    columns = zip(_COLUMNS, zip(*_rows(rollouts, step), strict=True), strict=True)
    mlflow.log_table(
        data={name: list(values) for name, values in columns},
        artifact_file=f"{_TABLE}/steps-{first:06}-{first + _STEPS_OF_A_FILE - 1:06}.json",
        run_id=tracker.tracker.info.run_id,
    )


def _swanlab_table(tracker: SwanLabTracker, rollouts: Sequence[Rollout], step: int) -> None:
    swanlab = importlib.import_module("swanlab")
    table = swanlab.echarts.Table()
    table.add(_COLUMNS, _rows(rollouts, step))
    tracker.log({_TABLE: table}, step=step)


def _trackio_table(tracker: TrackioTracker, rollouts: Sequence[Rollout], step: int) -> None:
    trackio = importlib.import_module("trackio")
    table = trackio.Table(columns=_COLUMNS, data=_rows(rollouts, step))
    tracker.log({_TABLE: table}, step=step)


def _tensorboard_table(tracker: TensorBoardTracker, rollouts: Sequence[Rollout], step: int) -> None:
    """As Markdown: TensorBoard has texts, and no tables."""
    parts = []
    for each in rollouts:
        look = f"<{each.look}>" if each.look.startswith("http") else f"`{each.look}`"
        head = f"**{each.which}**, score {each.score}, reward {each.reward}, task `{each.task}`, "
        text = "\n".join(f"    {line}" for line in each.text.splitlines())
        parts.append(f"{head}{each.stop}: {look}\n\n{text}")
    tracker.log({_TABLE: "\n\n".join(parts)}, step=step)


_LOG_TABLE: Mapping[str, Callable[[Any, Sequence[Rollout], int], None]] = {
    "tensorboard": _tensorboard_table,
    "wandb": _wandb_table,
    "mlflow": _mlflow_table,
    "swanlab": _swanlab_table,
    "trackio": _trackio_table,
}
