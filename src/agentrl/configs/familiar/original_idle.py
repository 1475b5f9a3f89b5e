"""Flags that the original AgentRL takes together, although one of them has no effect beside others.

Here such a pair is refused, because the user means something by each flag. `src/main.py` and
`src/sampling.py` run scripts that ran there, so they leave out what has no effect, and say so.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.configs.familiar.original_defaults import ORIGINAL_DEFAULTS

_ALONE = "--balance_sample true decides alone what is trained of a group"
_NO_CLIP = "--loss_calculater MINIRL has no clip range"

# A flag, the flag and value beside which it has no effect, and why. In the order of application.
_IDLE: tuple[tuple[str, str, object, str], ...] = (
    ("out_of_date_decay", "strict_in_bound", True,
     "with --strict_in_bound true the band is the clip range, whatever the staleness"),
    ("efficient_rewarding", "balance_sample", True, _ALONE),
    ("min_turns", "balance_sample", True, _ALONE),
    ("reserve_context_error_count", "balance_sample", True, _ALONE),
    ("reserve_context_error_count", "efficient_rewarding", True,
     "--efficient_rewarding true keeps all records that ended at a limit"),
    ("skip_length_normalization", "token_level_loss", True,
     "--token_level_loss true is the mean over all tokens"),
    ("beta1", "loss_calculator", "MINIRL", _NO_CLIP),
    ("beta2", "loss_calculator", "MINIRL", _NO_CLIP),
)  # fmt: skip


def idle_there(values: Mapping[str, Any]) -> Mapping[str, str]:
    """The flags that have no effect beside the others, with the reasons.

    `values`: all flags of a script, its defaults included, under the names of this trainer.
    """
    return dict(_idle(dict(values)))


def _idle(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, beside, value, why in _IDLE:
        given = values.get(name)
        if given not in (None, False, ORIGINAL_DEFAULTS[name]) and values.get(beside) == value:
            del values[name]
            yield name, why
