"""What scorers say of Records, and how it is put together to a Record's score: pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.databases.documents import GroupScore, Record
from agentrl.databases.scorer_notation import parse_scorer


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer says of one Record. None: not scored, so that the Record takes no part in its
    group. `explanation` is kept for people to read."""

    value: float | None
    explanation: str | None = None


def as_score(scorer: str, result: object) -> Score:
    """What a scorer function returned. Raises ValueError if that is no score."""
    if isinstance(result, Score):
        value = as_score(scorer, result.value).value
        return Score(value, result.explanation)
    if result is None:
        return Score(None)
    if not isinstance(result, int | float) or not math.isfinite(result):
        raise ValueError(f"scorer {scorer!r} returned {result!r}, which is not a finite number")
    return Score(float(result))


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
