"""`curve.png`: a run's success and reward over its steps, held-out evaluations marked."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.databases.success import CurvePoint, HeldOut
from agentrl.launcher.report import Report
from agentrl.launcher.statistics import wilson
from agentrl.whole_file import write_whole

_SUCCESS, _REWARD, _HELD_OUT, _INK = "#2a6fbb", "#e08a1e", "#b3261e", "#333333"
Values = npt.NDArray[np.float64]
_WINDOW = 5  # steps of the moving average


def draw_curve(output: Path, run: str, report: Report) -> Path:
    """Write `curve.png` into the run's folder."""
    figure = Figure(figsize=(9, 5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_samples(axes, report.curve)
    _draw_held_out(axes, report.held_out)
    axes.set_title(_title(run, report), loc="left", fontsize=12, color=_INK, pad=12)
    axes.set_xlabel("optimizer step", color=_INK)
    axes.set_ylim(min([-0.02, *(point.reward for point in report.curve)]), 1.04)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    if report.curve or report.held_out:
        axes.legend(loc="lower right", frameon=False)
    path = output / "curve.png"
    with write_whole(path) as partial:
        figure.savefig(partial)
    return path


def _title(run: str, report: Report) -> str:
    s = report.summary
    if s.eval_before is None or s.eval_after is None:
        return f"{run}: {s.steps} steps"
    return (
        f"{run}: held-out success {s.eval_before:.2f} → {s.eval_after:.2f} "
        f"in {s.steps} steps, {s.seconds / 60:.1f} minutes"
    )


def _draw_samples(axes: Axes, curve: Sequence[CurvePoint]) -> None:
    if not curve:
        return
    steps = np.array([point.step for point in curve])
    success = np.array([point.success for point in curve])
    reward = np.array([point.reward for point in curve])
    binary = bool(np.allclose(success, reward))
    label = "training success = mean reward" if binary else "training success"
    axes.plot(steps, success, color=_SUCCESS, alpha=0.25, linewidth=1)
    axes.plot(steps, _smooth(success), color=_SUCCESS, linewidth=2.2, label=label)
    if not binary:
        axes.plot(steps, reward, color=_REWARD, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(reward), color=_REWARD, linewidth=2.2, label="training reward")


def _smooth(values: Values) -> Values:
    """Centred moving average over `_WINDOW` points, over fewer at the ends."""
    kernel = np.ones(min(_WINDOW, 2 * ((len(values) - 1) // 2) + 1))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def _draw_held_out(axes: Axes, held_out: Sequence[HeldOut]) -> None:
    if not held_out:
        return
    steps = [evaluation.step for evaluation in held_out]
    rates = [wilson(evaluation.successes, evaluation.rollouts) for evaluation in held_out]
    axes.errorbar(
        steps,
        [rate.mean for rate in rates],
        yerr=[[r.mean - r.low for r in rates], [r.high - r.mean for r in rates]],
        fmt="o",
        color=_HELD_OUT,
        markersize=7,
        markeredgecolor="white",
        capsize=3,
        linewidth=1.2,
        zorder=5,
        clip_on=False,
        label="held-out success (95 % interval)",
    )
    for step, rate in zip(steps, rates, strict=True):
        axes.annotate(
            f"{rate.mean:.2f}",
            (step, rate.low),
            xytext=(0, -13),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=_HELD_OUT,
        )
