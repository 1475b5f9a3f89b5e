"""`agentrl sft`: trains a model on conversations and writes it as a Hugging Face folder.

    agentrl sft --model DIR --train_file conversations.jsonl [--eval_file F] [--flag value ...]
    agentrl sft --model DIR --from_run RUN [--where "score>=1"] [--flag value ...]

`supervised.py` has what `agentrl sft` and `agentrl dpo` share.
"""

import sys
from collections.abc import Sequence

from agentrl.configs.supervised_verbs import SFT_PRESET, sft_parser
from agentrl.launcher.run_rows import demonstrations_of_run
from agentrl.launcher.supervised import run_supervised, supervised_config


def main(argv: Sequence[str]) -> int:
    """Prepare, train, export; returns the exit status. Raises `ConfigError` for bad input."""
    given = sft_parser().parse(argv)
    layers, config = supervised_config(given, SFT_PRESET)
    return run_supervised(
        given,
        layers,
        config,
        of_run=lambda *how: demonstrations_of_run(given.own.where, *how),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
