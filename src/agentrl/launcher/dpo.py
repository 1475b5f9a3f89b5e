"""`agentrl dpo`: trains a model on pairs of answers and writes it as a Hugging Face folder.

    agentrl dpo --model DIR --train_file preferences.jsonl [--eval_file F] [--flag value ...]
    agentrl dpo --model DIR --from_run RUN [--margin X] [--where "turns<=4"] [--flag value ...]

`supervised.py` has what `agentrl sft` and `agentrl dpo` share.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict

from agentrl.configs import ConfigError
from agentrl.configs.supervised_verbs import DPO_PRESET, dpo_parser, preference_of
from agentrl.launcher.run_pairs import pairs_of_run
from agentrl.launcher.supervised import run_supervised, supervised_config


def main(argv: Sequence[str]) -> int:
    """Prepare, train, export; returns the exit status. Raises `ConfigError` for bad input."""
    given = dpo_parser().parse(argv)
    layers, config = supervised_config(given, DPO_PRESET)
    preference = preference_of(given.own, config)
    margin = given.own.margin
    if margin is not None and given.own.from_run is None:
        raise ConfigError("--margin is between trajectories of --from_run, which is not given")
    if margin is not None and margin <= 0:
        raise ConfigError(f"--margin {margin:g}: must be above 0, so that one answer is better")
    flags = asdict(preference)
    del flags["beta"]  # a flag of the run, which is handed on with the others
    return run_supervised(
        given,
        layers,
        config,
        of_run=lambda *how: pairs_of_run(given.own.where, margin, *how),
        pairs=True,
        objective=[
            word
            for name, value in flags.items()
            if value is not None
            for word in (f"--{name}", str(value))
        ],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
