"""`training.png`: the trainer's figures over a run's steps, one small panel for each figure.

`curve.png` shows whether the agent improves; `training.png` shows whether the training is sound.
docs/reference/losses.md explains the figures.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.launcher.progress import Metrics
from agentrl.launcher.step_panels import PANELS, Panel, values_of
from agentrl.whole_file import write_whole

_INK, _GRID = "#333333", "#dddddd"
_COLOURS = ("#2a6fbb", "#e08a1e")
_COLUMNS = 4


def draw_training(output: Path, run: str, metrics: Sequence[Metrics]) -> Path:
    """Write `training.png` into the run's folder, from the lines of its `metrics.jsonl`.

    A figure that no line has gets no panel.
    """
    panels = [
        panel for panel in PANELS if any(values_of(metrics, name) for name, _ in panel.figures)
    ]
    rows = -(-len(panels) // _COLUMNS) or 1
    figure = Figure(figsize=(3.4 * _COLUMNS, 2.4 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{run}: training", x=0.01, ha="left", fontsize=12, color=_INK)
    for place, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(rows, _COLUMNS, place), panel, metrics)
    path = output / "training.png"
    with write_whole(path) as partial:
        figure.savefig(partial)
    return path


def _draw(axes: Axes, panel: Panel, metrics: Sequence[Metrics]) -> None:
    labelled = False
    for (name, label), colour in zip(panel.figures, _COLOURS, strict=False):
        values = values_of(metrics, name)
        if values:
            steps, figures = zip(*values, strict=True)
            axes.plot(steps, figures, color=colour, linewidth=1.4, label=label or None)
            labelled |= bool(label)
    axes.set_title(panel.title, loc="left", fontsize=9, color=_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=7)
    if labelled:
        axes.legend(frameon=False, fontsize=7)
