"""What scorers say of Records, and how it is put together to a Record's score: pure functions."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from agentrl.databases.documents import GroupScore, Record
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.foreign_text import shown, text_of

KEPT_CHARACTERS = 10_000  # of an explanation: a group's stand together in one document of 16 MB
_ARRAY_TYPES = ("numpy", "torch", "jax", "jaxlib", "tensorflow", "cupy", "mlx")


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer says of one Record. None: not scored, so that the Record takes no part in its
    group. `explanation` is kept for people to read."""

    value: float | None
    explanation: str | None = None


def as_score(scorer: str, result: object) -> Score:
    """What a scorer function returned, its explanation as it can be stored.

    A number may be of numpy or torch, also the only element of an array. Raises ValueError if the
    result is no score.
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
    """What a scorer of a group returned as a list of results; None if it is none. One dimension of
    an array is a list."""
    if _is_array(result):
        result = result.tolist()  # type: ignore[attr-defined]
    if isinstance(result, str | bytes) or not isinstance(result, Sequence):
        return None
    return result


def storable_text(explanation: object) -> str | None:
    """An explanation as text that a database can store, cut in the middle where it is long."""
    if explanation is None:
        return None
    text = text_of(explanation)
    left_out = len(text) - KEPT_CHARACTERS
    if left_out > 0:
        half = KEPT_CHARACTERS // 2
        text = f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
    # Surrogates that stand alone, as they come out of broken JSON, have no UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(result: object) -> float | None:
    """The number that a result is; None if it is none."""
    if _is_array(result):
        try:
            result = result.item()  # type: ignore[attr-defined]
        except (ValueError, RuntimeError, TypeError):  # more than one element
            return None
    if not isinstance(result, numbers.Real | Decimal):
        return None
    try:
        return float(result)
    except OverflowError:  # a whole number beyond what a float holds
        return math.inf


def _is_array(value: object) -> bool:
    """Whether it is a scalar or an array of a library of arrays, none of which is imported here."""
    library = type(value).__module__.partition(".")[0]
    return library in _ARRAY_TYPES and hasattr(value, "item")


def weigh(scorer: str, scores: Mapping[str, float | None]) -> float | None:
    """The weighted sum that `scorer` asks for: score = sum_k w_k * score_k.

    None while a scorer has not said its score, and where one of them scored nothing: a sum of fewer
    terms could not be compared with those of the other Records.
    """
    total = 0.0
    for name, weight in parse_scorer(scorer).items():
        score = scores.get(name)
        if score is None:
            return None
        total += weight * score
    return total


def with_scores(scorer: str, record: Record, scores: Mapping[str, Score]) -> Record:
    """The Record with these scores beside those that it has, and what they come to."""
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
    """The Record with what was said of it among its group."""
    own = {of.scorer: Score(of.score, of.explanation) for of in said if of.record == record.id}
    return with_scores(scorer, record, own)
