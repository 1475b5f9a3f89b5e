"""Draws `docs/images/cpu-per-turn.png` from the saved results of `time_to_success.py`.

    python benchmarks/turn_cost_chart.py

A bar is the CPU of all processes of a demo's runs, start included, over the turns that were
sampled, the mean of its seeds. TRL does the same rollouts in one process, which counts no turns:
its CPU is divided by ours.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report import RESULTS

CHART = Path(__file__).parents[1] / "docs" / "images" / "cpu-per-turn.png"
# Colours that differ for the colour-blind, too.
PARTS = {
    "engine": "#2a6fbb", "sampler": "#e08a1e", "mongod": "#3a9a6b", "trainer": "#b3261e",
    "tools": "#8d6cab", "launcher": "#8a8a8a",
}  # fmt: skip


def cost_by_part(runs: list[dict[str, Any]], with_turns: list[dict[str, Any]]) -> dict[str, float]:
    """CPU milliseconds a turn, by part. `with_turns`: the runs whose turns are counted."""
    turns = statistics.mean(run["turns"] for run in with_turns)
    return {
        part: statistics.mean(1000 * run["cpu_s"].get(part, 0.0) / turns for run in runs)
        for part in PARTS
    }


def draw(bars: dict[str, dict[str, float]], path: Path) -> None:
    """Write the chart."""
    figure = Figure(figsize=(9, 2.9), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, costs in enumerate(bars.values()):
        left = 0.0
        for part, cost in costs.items():
            axes.barh(row, cost, left=left, color=PARTS[part], height=0.6)
            if cost > 0.7:
                axes.text(
                    left + cost / 2, row, f"{cost:.1f}", ha="center", va="center", color="white"
                )
            left += cost
        axes.text(left + 0.15, row, f"{left:.1f}", va="center", fontweight="bold")
    for part, color in PARTS.items():
        axes.barh(0, 0, color=color, label=part)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of CPU a turn")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Draw the saved results."""
    before, now = (
        json.loads((RESULTS / f"time_to_success{tail}.json").read_text())["runs"]
        for tail in ("_before", "")
    )
    draw(
        {
            "before": cost_by_part(before["ours"], before["ours"]),
            "now": cost_by_part(now["ours"], now["ours"]),
            "TRL, one process": cost_by_part(now["trl"], now["ours"]),
        },
        CHART,
    )


if __name__ == "__main__":
    main()
