"""Writes the figures of `results/staleness.json` into docs/reference/off-policy.md, and draws them.

    python benchmarks/staleness_page.py

The recommendation is, of the losses whose success at a staleness of 4 is within two points of that
at 0, the one with the best success at 4.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report import RESULTS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "reference" / "off-policy.md"
CHART = DOCS / "images" / "staleness.png"
MARKER = "<!-- From here on written by benchmarks/staleness_page.py -->\n"
END = "<!-- Until here written by benchmarks/staleness_page.py -->\n"
JUDGED, WITHIN = 4, 0.02  # staleness, and the success that it may cost
# Colours that differ for the colour-blind, too.
COLOURS = {
    "GRPO": "#2a6fbb", "MINIRL": "#e08a1e", "GSPO": "#b3261e", "decoupled PPO": "#3a9a6b",
}  # fmt: skip


def recommended(losses: dict[str, Any]) -> str | None:
    """The loss to use off policy; None if `JUDGED` costs each more than `WITHIN`."""
    at = {
        loss: {int(k): one["success"] for k, one in found["staleness"].items()}
        for loss, found in losses.items()
    }
    near = [loss for loss, success in at.items() if success[0] - success[JUDGED] <= WITHIN]
    return max(near, key=lambda loss: at[loss][JUDGED], default=None)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The generated part of the page."""
    losses = result["losses"]
    staleness = [int(k) for k in next(iter(losses.values()))["staleness"]]
    yield (
        "Final success in percent, the mean of " + f"{result['seeds']} seeds ± its standard error:"
    )
    yield ""
    yield "| staleness | " + " | ".join(losses) + " |"
    yield "| ---: |" + " ---: |" * len(losses)
    for k in staleness:
        cells = [_cell(found["staleness"][str(k)]) for found in losses.values()]
        yield f"| {k} | " + " | ".join(cells) + " |"
    yield ""
    chosen = recommended(losses)
    if chosen is None:
        yield f"No loss is within two points of its success at 0 at a staleness of {JUDGED}."
    else:
        at = losses[chosen]["staleness"]
        points = 100 * (at["0"]["success"] - at[str(JUDGED)]["success"])
        side = "below" if points > 0 else "above"
        flags, _, _ = losses[chosen]["flags"].partition(" --learning_rate")
        yield f"Within two points of 0 at a staleness of {JUDGED}, and best there, is **{chosen}**"
        yield f"(`{flags}`), {abs(points):.1f} points {side} its success at 0."
    yield ""
    yield "How far off policy these runs are, the mean over all steps at staleness"
    yield f"{JUDGED} and {staleness[-1]}:"
    yield ""
    yield (
        "| | flags | "
        + " | ".join(
            f"`{name}` at {k}"
            for name in ("effective_sample_size", "mismatch_kl", "clip_fraction")
            for k in (JUDGED, staleness[-1])
        )
        + " |"
    )
    yield "| --- | --- |" + " ---: |" * 6
    for loss, found in losses.items():
        cells = [
            f"{found['staleness'][str(k)][name]:.3f}"
            for name in ("effective_sample_size", "mismatch_kl", "clip_fraction")
            for k in (JUDGED, staleness[-1])
        ]
        yield f"| {loss} | `{found['flags']}` | " + " | ".join(cells) + " |"


def _cell(found: dict[str, Any]) -> str:
    error = found["standard_error"]
    return f"{100 * found['success']:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def page(text: str, result: dict[str, Any]) -> str:
    """The page with its generated part made anew."""
    before, _, rest = text.partition(MARKER)
    _, _, after = rest.partition(END)
    return before + MARKER + "\n" + "\n".join(lines(result)) + "\n\n" + END + after


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture: success by staleness, and the curves of `JUDGED` against those of 0."""
    figure = Figure(figsize=(9, 3.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    final, curves = figure.subplots(1, 2)
    for loss, found in result["losses"].items():
        at = {int(k): one for k, one in found["staleness"].items()}
        final.errorbar(
            range(len(at)),
            [100 * one["success"] for one in at.values()],
            yerr=[100 * (one["standard_error"] or 0.0) for one in at.values()],
            color=COLOURS[loss],
            marker="o",
            capsize=3,
            label=loss,
        )
        final.set_xticks(range(len(at)), [str(k) for k in at])
        for k, style in ((0, ":"), (JUDGED, "-")):
            tokens, success = zip(*at[k]["curve"], strict=True)
            curves.plot(
                [count / 1000 for count in tokens],
                [100 * value for value in success],
                style,
                color=COLOURS[loss],
            )
    final.set_xlabel("staleness, optimizer steps")
    final.set_ylabel("final success, percent")
    curves.set_xlabel(f"sampled tokens, thousands (dotted: staleness 0, solid: {JUDGED})")
    curves.set_ylabel("success, percent")
    for axes in (final, curves):
        axes.spines[["top", "right"]].set_visible(False)
    final.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Write the page and the picture."""
    result = json.loads((RESULTS / "staleness.json").read_text())
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    draw(result, CHART)


if __name__ == "__main__":
    main()
