"""Held-out success of the demo after SFT and after DPO on a run's own trajectories, then GRPO.

A first run makes a few GRPO steps of the demo, so that its trajectories are those of a model that
is half trained. Then three models go on, each with as many GRPO steps:

    grpo   the run itself
    sft    the start model after `agentrl sft --from_run`: the run's right trajectories
    dpo    the start model after `agentrl dpo --from_run`: best against worst of each group

All by the commands that a user gives. Success is what the runs evaluate: 96 held-out tasks, 4
rollouts each; that of SFT and DPO is what the GRPO run from their model finds before its first
step.

    python benchmarks/demo_baselines.py [--seeds 3] [--folder DIR] [--quick] [--save] [--draw]

`--folder` keeps the runs, and what was interrupted goes on from there.
`--draw` makes the picture and the tables of the guides of the saved results, and measures nothing.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report import RESULTS, finish, parse_flags

from agentrl.databases.connection import connect
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.success import evaluations
from agentrl.launcher.presets import DEMO_TOOLS, GRPO, preset_flags

ROOT = Path(__file__).parents[1]
START = ROOT / "assets" / "demo" / "model"
GUIDES = ROOT / "docs" / "guides"
CHART = ROOT / "docs" / "images" / "demo-baselines.png"
MARKER, END = (
    f"<!-- {where} here written by benchmarks/demo_baselines.py -->\n"
    for where in ("From", "Until")
)
DATA_STEPS, GRPO_STEPS, EVERY = 5, 5, 5  # of the first run; after it; between evaluations
SFT = ("--num_train_epochs", "3", "--per_device_train_batch_size", "32", "--learning_rate", "3e-4")
DPO = ("--num_train_epochs", "3", "--per_device_train_batch_size", "16", "--learning_rate", "1e-3")
# A model that is right mostly has small gradients of few groups. Adam's first steps are as large as
# the learning rate all the same: with the demo's own, 5e-4, success falls before it rises.
AFTER_SFT = ("--learning_rate", "2e-4")
NAMES = {"grpo": "GRPO", "sft": "SFT, then GRPO", "dpo": "DPO, then GRPO"}
COLOURS = {"grpo": "#2a6fbb", "sft": "#e08a1e", "dpo": "#3a9a6b"}
LIMIT_S = 3600.0  # of one command

Curve = list[tuple[int, float]]  # GRPO steps, held-out success


class Demo:
    """The commands of one seed, in a folder of their own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed

    def grpo(self, run: str, model: Path, steps: int, *flags: str) -> Curve:
        """Train `run` to `steps` steps, or on from where it is; its evaluations."""
        self._agentrl(
            "launch", "grpo", run, *preset_flags(GRPO, 1, demo=True), "--model_name_or_path",
            str(model), "--mcp_manager_url", DEMO_TOOLS, "--max_steps", str(steps),
            "--eval_steps", str(EVERY), *flags,
        )  # fmt: skip
        data = self._folder / "output" / run / "mongo"
        with EmbeddedMongod(data, self._folder / "mongod.log") as mongod:
            return asyncio.run(_evaluations(mongod.url, run))

    def supervised(self, verb: str, run: str, flags: Sequence[str]) -> tuple[Path, dict[str, Any]]:
        """Train the start model on a run's trajectories; its folder and the last metrics."""
        output = self._folder / "output" / verb
        if not (output / "model").is_dir():
            words = ("--model", str(START), "--from_run", run, "--max_tokens", "384", *flags)
            self._agentrl(verb, *words)
        last = (output / "metrics.jsonl").read_text().splitlines()[-1]
        return output / "model", json.loads(last)

    def _agentrl(self, *words: str) -> None:
        command = [sys.executable, "-m", "agentrl.cli", *words, "--seed", str(self._seed)]
        log = self._folder / "log"
        with log.open("wb") as out:
            done = subprocess.run(
                command, cwd=self._folder, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S,
                env={**os.environ, "NUM_PROCESSES": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        if done.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"agentrl {' '.join(words)} ended with {done.returncode}:\n{tail}")


async def _evaluations(url: str, run: str) -> Curve:
    database = await connect(url, run)
    try:
        return [(point.step, point.success) for point in await evaluations(database)]
    finally:
        await database.close()


def measure(seed: int, data_steps: int, grpo_steps: int, folder: Path) -> dict[str, Any]:
    """One seed: the curve of each model, and what SFT and DPO trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    demo = Demo(folder, seed)
    until = data_steps + grpo_steps
    found: dict[str, Any] = {"seed": seed, "curves": {}, "trained": {}}
    starts = {}
    for verb, flags in (("sft", SFT), ("dpo", DPO)):
        if not (folder / "output" / verb / "model").is_dir():
            demo.grpo("data", START, data_steps)
        starts[verb], found["trained"][verb] = demo.supervised(verb, "data", flags)
    found["curves"]["grpo"] = demo.grpo("data", START, until)
    for verb, after in (("sft", AFTER_SFT), ("dpo", ())):
        curve = demo.grpo(f"from-{verb}", starts[verb], grpo_steps, *after)
        # The steps that made its data were GRPO steps, too.
        found["curves"][verb] = [(data_steps + step, success) for step, success in curve]
    print(json.dumps(found["curves"]), file=sys.stderr, flush=True)
    return found


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean success by model and step, and its range over the seeds."""
    means: dict[str, dict[str, list[float]]] = {}
    for model in NAMES:
        at: dict[int, list[float]] = {}
        for run in runs:
            for step, success in run["curves"][model]:
                at.setdefault(step, []).append(success)
        means[model] = {
            str(step): [round(x, 4) for x in (statistics.mean(got), min(got), max(got))]
            for step, got in sorted(at.items())
            if len(got) == len(runs)
        }
    return means


def lines(result: dict[str, Any]) -> list[str]:
    """The table of the guides."""
    steps = sorted({int(step) for at in result["success"].values() for step in at})
    rows = [
        f"| held-out success, percent ({result['seeds']} seed{'s' * (result['seeds'] > 1)}) | "
        + " | ".join(f"step {step}" for step in steps)
        + " |",
        "| --- |" + " ---: |" * len(steps),
    ]
    for model, at in result["success"].items():
        cells = [f"{100 * at[str(step)][0]:.1f}" if str(step) in at else "" for step in steps]
        rows.append(f"| {NAMES[model]} | " + " | ".join(cells) + " |")
    return rows


def draw(result: dict[str, Any]) -> None:
    """Write the picture, and the table into both guides."""
    figure = Figure(figsize=(6, 3.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for model, at in result["success"].items():
        steps = [int(step) for step in at]
        mean, low, high = ([100 * one[i] for one in at.values()] for i in range(3))
        axes.plot(steps, mean, color=COLOURS[model], marker="o", label=NAMES[model])
        axes.fill_between(steps, low, high, color=COLOURS[model], alpha=0.15, linewidth=0)
    axes.axvline(result["data_steps"], color="#999999", linestyle=":", linewidth=1)
    axes.set_xlabel(
        f"GRPO steps (SFT and DPO: on the trajectories of the first {result['data_steps']})"
    )
    axes.set_ylabel("held-out success, percent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(CHART)
    for guide in ("supervised.md", "preferences.md"):
        page = GUIDES / guide
        before, _, rest = page.read_text(encoding="utf-8").partition(MARKER)
        _, _, after = rest.partition(END)
        table = "\n".join(lines(result))
        page.write_text(f"{before}{MARKER}\n{table}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Measure and report, or draw what is saved."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--folder", type=Path, help="where the runs are kept")
        parser.add_argument("--draw", action="store_true", help="draw the saved results only")

    flags = parse_flags(__doc__ or "", add=add)
    saved = RESULTS / "demo_baselines.json"
    if flags.draw:
        draw(json.loads(saved.read_text()))
        return
    seeds, data_steps, grpo_steps = (
        (1, 1, 1) if flags.quick else (flags.seeds, DATA_STEPS, GRPO_STEPS)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = (flags.folder or Path(temporary)).absolute()
        runs = [
            measure(seed, data_steps, grpo_steps, folder / f"seed-{seed}") for seed in range(seeds)
        ]
    result = {
        "seeds": seeds,
        "data_steps": data_steps,
        "flags": {
            name: " ".join(words)
            for name, words in (("sft", SFT), ("dpo", DPO), ("after_sft", AFTER_SFT))
        },
        "success": summary(runs),
        "runs": runs,
    }
    finish("demo_baselines", result, ("torch", "transformers", "pymongo"), save=flags.save)


if __name__ == "__main__":
    main()
