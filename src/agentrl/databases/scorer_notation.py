"""The notation of a task's `scorer`: one name, or a weighted sum of several.

    "math"                     the score of `math`
    "0.7*math + 0.3*f1"        a weighted sum; a name without a weight has weight 1
    {"math": 0.7, "f1": 0.3}   the same, in a task file

`rollout/scorers` knows the scorers that the names mean.
"""

import math
import re
from collections.abc import Mapping

_NAME = re.compile(r"[^\s*+]+")


def parse_scorer(text: str) -> dict[str, float]:
    """The weight of each scorer in `text`, in order. Raises ValueError for another notation."""
    weights: dict[str, float] = {}
    for term in text.split("+"):
        *weight, name = (part.strip() for part in term.split("*"))
        if len(weight) > 1 or not _NAME.fullmatch(name):
            raise ValueError(
                f"scorer {text!r} is neither a name nor a weighted sum like 0.7*math + 0.3*f1"
            )
        if name in weights:
            raise ValueError(f"scorer {text!r} names {name!r} twice")
        weights[name] = _weight(weight[0], text) if weight else 1.0
    return weights


def _weight(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"scorer {text!r}: weight {number!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"scorer {text!r}: weight {number!r} is not finite")
    return value


def write_scorer(scorer: object) -> str:
    """The text form of a task file's `scorer`, which is a text or an object of weights.

    Raises ValueError for any other value.
    """
    if isinstance(scorer, Mapping):
        if not scorer or not all(
            isinstance(weight, int | float) and not isinstance(weight, bool)
            for weight in scorer.values()
        ):
            raise ValueError(f"`scorer` {dict(scorer)!r} does not give each scorer a weight")
        scorer = " + ".join(f"{weight}*{name}" for name, weight in scorer.items())
    if not isinstance(scorer, str):
        raise ValueError(f"`scorer` is a {type(scorer).__name__}, not a text or an object")
    parse_scorer(scorer)
    return scorer
