"""Credit by forks against GRPO at equal sampled tokens, and what a step on forks costs as a tree.

Learning: the demo with its long tasks alone (two bins, their sum or difference: four turns), by the
commands that a user gives. Both arms sample the same tokens for a group, about those of eight
rollouts:

    grpo    8 rollouts of a task
    forks   4 rollouts, each forked twice at its turn of the highest entropy: 12 rows, of which 8
            begin in the middle

Success is held out, on the long tasks, 4 rollouts each, every 5 steps. It is read where an arm has
trained as many tokens as the other arm has at its end, whichever ends first; each sampled token is
trained once.

Cost: a step on the rows of 2 rollouts of 6 turns with 2 forks at turns 2 and 4, as separate
sequences and as a tree, by the trainer's own step (`prefix_merge.py` says how).

    python benchmarks/forks.py [--seeds 5] [--quick] [--save] [--runs FILE] [--cost_only]

Each finished run is a line of FILE, `results/forks.jsonl` if none is given. Started again, the
program makes only the runs that are missing.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from demo_baselines import ROOT, START, Curve, Demo
from prefix_merge import Piece, Trainer, Workload, make_workload, measure
from report import RESULTS, finish, parse_flags

from agentrl.training.parallel import exit_process, make_mesh

LONG = ("sum", "diff")
GROUPS, STEPS = 16, 20  # of a step; of a run
ARMS = {
    "grpo": ("--num_generations", "8", "--per_device_train_batch_size", str(8 * GROUPS)),
    "forks": (
        "--num_generations", "4", "--fork_turns", "1", "--forks", "2",
        "--per_device_train_batch_size", str(12 * GROUPS),
    ),
}  # fmt: skip


def long_tasks(folder: Path) -> tuple[str, ...]:
    """Flags that name files with the demo's long tasks."""
    flags = []
    for flag, name in (("--train_file", "train.jsonl"), ("--eval_file", "heldout.jsonl")):
        lines = (ROOT / "assets" / "demo" / name).read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["kind"] in LONG]
        (folder / name).write_text("\n".join(kept) + "\n")
        flags += [flag, str(folder / name)]
    return tuple(flags)


def learn(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: held-out success, by trained tokens."""
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        curve: Curve = Demo(folder, seed).grpo(arm, START, steps, *long_tasks(folder), *ARMS[arm])
        lines = (folder / "output" / arm / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
    trained = np.cumsum([line["n_train_tokens"] for line in metrics]).tolist()
    tokens = {line["step"]: total for line, total in zip(metrics, trained, strict=True)}
    points = [(tokens.get(step, 0), success) for step, success in curve]
    return {"arm": arm, "seed": seed, "steps": steps, "curve": points}


class Runs:
    """The finished runs, in a file with a line of JSON for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._done: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def get(self, arm: str, seed: int, steps: int) -> dict[str, Any]:
        """A run, made now if it was not made before."""
        for found in self._done:
            if (found["arm"], found["seed"], found["steps"]) == (arm, seed, steps):
                return found
        made = learn(arm, seed, steps)
        self._done.append(made)
        with self._path.open("a") as file:
            file.write(json.dumps(made) + "\n")
        print(f"{arm}, seed {seed}: {made['curve']}", flush=True)
        return made


def at_equal_tokens(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Success of the arms, by interpolation, at the tokens that all runs have reached."""
    budget = min(run["curve"][-1][0] for run in runs)
    result: dict[str, Any] = {"tokens": budget, "success": {}}
    for share in (0.25, 0.5, 1.0):
        of_arms = {
            arm: [
                float(np.interp(share * budget, *zip(*run["curve"], strict=True)))
                for run in runs
                if run["arm"] == arm
            ]
            for arm in ARMS
        }
        result["success"][f"{share:g}"] = {
            arm: {
                "mean": round(statistics.mean(values), 4),
                "seeds": [round(value, 4) for value in values],
            }
            for arm, values in of_arms.items()
        }
    return result


def forked(scale: float) -> Workload:
    """Two rollouts of 6 turns on a prompt of 512 tokens, with 2 forks at turns 2 and 4 of each."""
    paths: list[list[Piece]] = []
    names = iter(range(1, 1000))

    def turn() -> list[Piece]:
        return [Piece(next(names), 128, True), Piece(next(names), 128, False)]

    for _ in range(2):
        rollout = [turn() for _ in range(6)]
        branches = [rollout]
        for at in (2, 4):
            branches += [[*rollout[:at], *(turn() for _ in range(6 - at))] for _ in range(2)]
        for branch in branches:
            paths.append([Piece(0, 512, False), *(piece for pair in branch for piece in pair)])
    made = make_workload("forks", paths, range(len(paths)), scale)
    return replace(made, per_turn=made.per_record)  # rows of turns are measured elsewhere


def cost(scale: float, rounds: int) -> dict[str, object]:
    """Seconds and operations of a step on forks, as rows and as a tree."""
    torch.set_num_threads(1)
    mesh = make_mesh(Accelerator(cpu=True))
    plain, tree = Trainer(mesh, trees=False), Trainer(mesh, trees=True)
    workload = forked(scale)
    for trainer in (plain, tree):  # the first step allocates
        trainer.step(workload.per_record[:1], 2048)
    trainers = {"per_turn": plain, "per_record": plain, "tree": tree}
    return measure(workload, trainers, rounds)


def main() -> None:
    """Make the runs that are missing, measure the cost, and report."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--runs", type=Path, help="file of the finished runs")
        parser.add_argument("--cost_only", action="store_true", help="no runs of the demo")

    args = parse_flags(__doc__ or "", add=add)
    result: dict[str, Any] = {}
    if not args.cost_only:
        seeds, steps = (1, 1) if args.quick else (args.seeds, STEPS)
        with tempfile.TemporaryDirectory() as named:
            own = Path(named) / "runs.jsonl" if args.quick else RESULTS / "forks.jsonl"
            runs = Runs(args.runs or own)
            found = [runs.get(arm, seed, steps) for seed in range(seeds) for arm in ARMS]
        result = {"seeds": seeds, "steps": steps, **at_equal_tokens(found)}
    scale, rounds = (0.125, 1) if args.quick else (1.0, 3)
    result["cost"] = cost(scale, rounds)
    finish("forks", result, ("torch", "transformers"), save=args.save)
    exit_process(0)


if __name__ == "__main__":
    main()
