"""Results of scorers, and their weighted sum as a Record's score: pure functions."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from agentrl.databases.documents import GroupScore, Record
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.foreign_text import shown, text_of

KEPT_CHARACTERS = 10_000  # of an explanation: a whole group's must fit into one document (16 MB)
_ARRAY_TYPES = ("numpy", "torch", "jax", "jaxlib", "tensorflow", "cupy", "mlx")


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's result for one Record.

    `value`: None means not scored; the Record then takes no part in its group. `explanation`: for
    display.
    """

    value: float | None
    explanation: str | None = None


def as_score(scorer: str, result: object) -> Score:
    """A scorer function's result as a `Score` with a storable explanation.

    A number may be a scalar or a one-element array of numpy or torch. Raises ValueError if the
    result is not a finite number.
    """
    if isinstance(result, Score):
        value = as_score(scorer, result.value).value
        return Score(value, storable_text(result.explanation))
    if result is None:
        return Score(None)
    number = _number(result)
    if number is None or not math.isfinite(number):
        raise ValueError(
            f"scorer {scorer!r} returned {shown(result)}, which is not a finite number"
        )
    return Score(number)


def as_list(result: object) -> Sequence[object] | None:
    """The result of a group scorer as a list; None if it is none. A 1-D array is a list."""
    if _is_array(result):
        result = result.tolist()  # type: ignore[attr-defined]
    if isinstance(result, str | bytes) or not isinstance(result, Sequence):
        return None
    return result


def storable_text(explanation: object) -> str | None:
    """An explanation as storable text; the middle of a long one is cut out."""
    if explanation is None:
        return None
    text = text_of(explanation)
    left_out = len(text) - KEPT_CHARACTERS
    if left_out > 0:
        half = KEPT_CHARACTERS // 2
        text = f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
    # Lone surrogates, which broken JSON can contain, have no UTF-8 encoding.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(result: object) -> float | None:
    """A result as a float; None if it is not a number."""
    if _is_array(result):
        try:
            result = result.item()  # type: ignore[attr-defined]
        except (ValueError, RuntimeError, TypeError):  # more than one element
            return None
    if not isinstance(result, numbers.Real | Decimal):
        return None
    try:
        return float(result)
    except OverflowError:  # an integer too large for a float
        return math.inf


def _is_array(value: object) -> bool:
    """Whether it is a scalar or array of an array library; imports none of them."""
    library = type(value).__module__.partition(".")[0]
    return library in _ARRAY_TYPES and hasattr(value, "item")


def weigh(scorer: str, scores: Mapping[str, float | None]) -> float | None:
    """The weighted sum of notation `scorer`: score = sum_k w_k * score_k.

    None if a score is missing or None: a sum of fewer terms is not comparable with those of other
    Records.
    """
    total = 0.0
    for name, weight in parse_scorer(scorer).items():
        score = scores.get(name)
        if score is None:
            return None
        total += weight * score
    return total


def with_scores(scorer: str, record: Record, scores: Mapping[str, Score]) -> Record:
    """The Record with these scores added, and its weighted sum updated."""
    values = {**record.scores, **{name: score.value for name, score in scores.items()}}
    explanations = {
        name: score.explanation for name, score in scores.items() if score.explanation is not None
    }
    return record.model_copy(
        update={
            "score": weigh(scorer, values),
            "scores": values,
            "explanations": {**record.explanations, **explanations},
        }
    )


def with_group_scores(scorer: str, record: Record, said: Sequence[GroupScore]) -> Record:
    """The Record with its own scores among `said` added."""
    own = {of.scorer: Score(of.score, of.explanation) for of in said if of.record == record.id}
    return with_scores(scorer, record, own)
