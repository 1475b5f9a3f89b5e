"""Success after equal sampled tokens, by staleness, for four losses: how far off policy one can be.

Every run trains the start model of `sorting_task.py`, 16 groups of 8 a step, and ends with the step
that reaches 120,000 sampled tokens. The policy that samples is as many optimizer steps old as
`--max_staleness` says (`stale_run.py`). Success is of 16 answers at temperature 1 to each of 128
held-out prompts, after the last step.

    python benchmarks/staleness.py [--quick] [--save] [--seeds 5] [--runs FILE]

The learning rate of each loss is chosen first, at staleness 0 alone: of `RATES` the one with the
best mean success over two seeds that the grid does not have, the larger one of equals. Then comes
the grid, one seed after the other, so that a part of it is balanced. One thread; some 13 CPU
seconds a run, half an hour for all 124.

Each finished run is a line of FILE, under `results/` if none is given. Started again, the program
makes only the runs that FILE does not have with the same settings and the same start model. The
last line is a JSON object with the means; `staleness_page.py` draws it.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from clock import clock
from report import RESULTS, finish, parse_flags
from sorting_task import make_start_model
from stale_run import GROUPS, ROLLOUTS, Length, run

from agentrl.training.parallel import exit_process

LOSSES = {
    "GRPO": ("--loss_calculator", "GRPO"),
    "MINIRL": ("--loss_calculator", "MINIRL"),
    "GSPO": ("--loss_calculator", "GSPO"),
    # Its ratio is 1, because it is to the policy before the step: nothing in it knows of staleness.
    "GSPO, weighted": (
        "--loss_calculator", "GSPO", "--rollout_is", "sequence",
        "--rollout_is_threshold", "5",
    ),
    # The clip range around a policy between the sampler's and the current one, and the ratio of
    # that policy to the sampler's as a weight: with one update a step, the policy before the step
    # is the current one, around which nothing is ever clipped. AReaL caps the weight at 5.
    "decoupled PPO": (
        "--loss_calculator", "GRPO", "--proximal_policy", "loglinear",
        "--rollout_is", "token", "--rollout_is_threshold", "5",
    ),
}  # fmt: skip
STALENESS = (0, 1, 2, 4, 8)
RATES = ("5e-4", "1e-3", "2e-3")
SEEDS_OF_RATES = (1000, 1001)
QUICK = Length(tokens=1_500, curve_steps=1, final=1)


@dataclass(frozen=True)
class Settings:
    """What a run follows from. `start`: SHA-256 of the start model's weights."""

    loss: str
    flags: tuple[str, ...]
    rate: str
    staleness: int
    seed: int
    length: Length
    start: str
    rows: int = GROUPS * ROLLOUTS

    def key(self) -> dict[str, Any]:
        """The same as JSON."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


class Runs:
    """The finished runs, in a file with a line of JSON for each."""

    def __init__(self, path: Path, start_model: Path) -> None:
        """Raises `SystemExit` for a line that is no run."""
        self._path = path
        self._start_model = start_model
        self._done: list[dict[str, Any]] = []
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                found = json.loads(line)
                self._done.append({**found, "settings": found["settings"]})
            except (ValueError, TypeError, KeyError) as error:
                raise SystemExit(
                    f"{path}, line {number} is no finished run ({error!r}): remove the line, and "
                    "its run is made again"
                ) from error

    def get(self, settings: Settings) -> dict[str, Any]:
        """The run with these settings, made now if it was not made before."""
        key = settings.key()
        for found in self._done:
            if found["settings"] == key:
                return found
        began = clock()
        flags = (*settings.flags, "--learning_rate", settings.rate)
        made = run(self._start_model, flags, settings.staleness, settings.seed, settings.length)
        made = {"settings": key, **made, "cpu_s": round(clock() - began, 1)}
        self._done.append(made)
        with self._path.open("a") as file:
            file.write(json.dumps(made) + "\n")
        what = f"{settings.loss} at {settings.rate}, staleness {settings.staleness}"
        print(
            f"{what}, seed {settings.seed}: {made['success']:.3f} in {made['cpu_s']} s",
            file=sys.stderr,
            flush=True,
        )
        return made


def choose_rates(
    runs: Runs, rates: Sequence[str], length: Length, start: str
) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """The rate of each loss, and the mean success at staleness 0 of each of `rates`."""
    success = {
        loss: {
            rate: statistics.mean(
                runs.get(Settings(loss, flags, rate, 0, seed, length, start))["success"]
                for seed in SEEDS_OF_RATES
            )
            for rate in rates
        }
        for loss, flags in LOSSES.items()
    }
    chosen = {
        loss: max(of_rate, key=lambda rate: (of_rate[rate], float(rate)))
        for loss, of_rate in success.items()
    }
    return chosen, success


def summary(of_seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the runs of one loss at one staleness, with the standard error of the success."""
    success = [one["success"] for one in of_seeds]
    error = statistics.stdev(success) / len(success) ** 0.5 if len(success) > 1 else None
    points = zip(*(one["curve"] for one in of_seeds), strict=False)
    return {
        "success": round(statistics.mean(success), 4),
        "standard_error": error and round(error, 4),
        "seeds": [round(value, 4) for value in success],
        "curve": [
            [round(statistics.mean(values), 3) for values in zip(*point, strict=True)]
            for point in points
        ],
        **{
            name: round(statistics.mean(one[name] for one in of_seeds), 5)
            for name in (
                "steps", "tokens", "staleness_mean", "mismatch_kl", "clip_fraction",
                "effective_sample_size", "effective_sample_size_min",
            )
        },
    }  # fmt: skip


def main() -> None:
    """Make the runs that are missing, and report."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--runs", type=Path, help="file of the finished runs")

    args = parse_flags(__doc__ or "", add=add)
    torch.set_num_threads(1)
    length = QUICK if args.quick else Length()
    seeds, rates = (1, RATES[:1]) if args.quick else (args.seeds, RATES)
    grid = STALENESS[:2] if args.quick else STALENESS
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        start = make_start_model(folder, *((20,) if args.quick else ()))
        own = folder / "runs.jsonl" if args.quick else RESULTS / "staleness.jsonl"
        runs = Runs(args.runs or own, folder)
        chosen, of_rates = choose_rates(runs, rates, length, start)
        found: dict[str, dict[int, list[dict[str, Any]]]] = {
            loss: {staleness: [] for staleness in grid} for loss in LOSSES
        }
        for seed in range(seeds):
            for staleness in grid:
                for loss, flags in LOSSES.items():
                    settings = Settings(loss, flags, chosen[loss], staleness, seed, length, start)
                    found[loss][staleness].append(runs.get(settings))
    result = {
        "losses": {
            loss: {
                "flags": " ".join((*LOSSES[loss], "--learning_rate", chosen[loss])),
                "success_of_rates": of_rates[loss],
                "staleness": {k: summary(of_seeds) for k, of_seeds in by_staleness.items()},
            }
            for loss, by_staleness in found.items()
        },
        "seeds": seeds,
        "sampled_tokens": length.tokens,
        "start": start,
    }
    finish("staleness", result, ("torch", "transformers"), save=args.save)


if __name__ == "__main__":
    main()
    exit_process(0)
