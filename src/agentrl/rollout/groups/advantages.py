"""From the scores of a group to the advantage of each rollout: the estimators of `--advantage`.

Pure functions, one for each baseline of the literature; or the user's own, from a file. What
follows (efficiency, scaling, rules that leave rollouts out) is `group_rules.py`; what needs the
whole step (normalization, a critic's estimates) is the trainer's.
"""

import math
from collections.abc import Callable, Sequence

from agentrl.configs.flag import ConfigError, is_function
from agentrl.configs.user_module import load_user_function
from agentrl.databases.documents import Record
from agentrl.foreign_text import error_line

STD_FLOOR = 1e-4  # added to the standard deviation; avoids division by 0
GREEDY_ROLLOUT = 0  # number of the rollout that `remax` samples greedily

# From the scored Records [n] of a group and their scores [n], which `--efficient_rewarding` may
# have moved from those of the Records.
Estimator = Callable[[Sequence[Record], Sequence[float]], list[float]]


def mean_std(scores: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4), std with n - 1 (GRPO, arXiv 2402.03300, eq. 3.1)."""
    scale = spread(scores)
    return [value / scale for value in mean(scores)]


def spread(scores: Sequence[float]) -> float:
    """std(r) + 1e-4, std with n - 1; 1 for a single score."""
    if len(scores) < 2:
        return 1.0
    squares = sum(value * value for value in mean(scores))
    return math.sqrt(squares / (len(scores) - 1)) + STD_FLOOR


def mean(scores: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r) (Dr.GRPO, arXiv 2503.20783; MiniRL, arXiv 2512.01374)."""
    average = sum(scores) / len(scores)
    return [score - average for score in scores]


def leave_one_out(scores: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean(r)) (RLOO, arXiv 2402.14740)."""
    if len(scores) < 2:
        return [0.0 for _ in scores]
    return [value * len(scores) / (len(scores) - 1) for value in mean(scores)]


def leave_one_out_clipped(scores: Sequence[float], judged: Sequence[float]) -> list[float]:
    """A_i of `leave_one_out`, at most 0 for a wrong rollout and at least 0 for a right one.

    AgentRL's. A wrong rollout is never reinforced because the others of its group are worse still.
    `judged`: the scores by which a rollout is wrong (at most 0.5) or right, before they were moved.
    """
    return [
        min(value, 0.0) if score <= 0.5 else max(value, 0.0)
        for score, value in zip(judged, leave_one_out(scores), strict=True)
    ]


def opo(scores: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """A_i = r_i - sum(l r) / sum(l), l: numbers of generated tokens (OPO, arXiv 2505.23585).

    The baseline of least variance if a gradient's squared norm is proportional to the length.
    """
    baseline = sum(n * r for n, r in zip(lengths, scores, strict=True)) / max(1, sum(lengths))
    return [score - baseline for score in scores]


def remax(scores: Sequence[float], greedy: float | None) -> list[float]:
    """A_i = r_i - r of the greedy rollout (ReMax, arXiv 2310.10505); 0 if that has no score."""
    return [0.0 if greedy is None else score - greedy for score in scores]


def _of_scores(function: Callable[[Sequence[float]], list[float]]) -> Estimator:
    return lambda records, scores: function(scores)


ESTIMATORS: dict[str, Estimator] = {
    "mean_std": _of_scores(mean_std),
    "mean": _of_scores(mean),
    "leave_one_out": _of_scores(leave_one_out),
    "leave_one_out_clipped": lambda records, scores: leave_one_out_clipped(
        scores, [score_of(record) for record in records]
    ),
    "opo": lambda records, scores: opo(scores, [r.tokens.generated for r in records]),
    "remax": lambda records, scores: remax(scores, _greedy(records, scores)),
    # A_i = r_i: the trainer computes the advantage, by normalization or with a critic.
    "score": lambda records, scores: list(scores),
}


def find_estimator(name: str) -> Estimator:
    """The estimator that `--advantage` names. Raises `ConfigError` for an unusable file.

    A user's function takes the scored Records [n] of a group and returns n numbers. It must be
    deterministic: any sampler may call it, and more than once for the same group.
    """
    if not is_function(name):
        return ESTIMATORS[name]
    function = load_user_function(name, "advantage")

    def estimate(records: Sequence[Record], scores: Sequence[float]) -> list[float]:
        records = [
            record.model_copy(update={"score": score})
            for record, score in zip(records, scores, strict=True)
        ]
        group = f"--advantage {name} on the group of task {records[0].task_id}"
        try:
            values = [float(value) for value in function(records)]
        except Exception as error:
            raise ConfigError(f"{group} fails: {error_line(error)}") from error
        if len(values) != len(records) or not all(map(math.isfinite, values)):
            raise ConfigError(
                f"{group}: returned {values} for {len(records)} records, and not a finite number "
                "for each"
            )
        return values

    return estimate


def _greedy(records: Sequence[Record], scores: Sequence[float]) -> float | None:
    of_group = zip(records, scores, strict=True)
    return next((score for record, score in of_group if record.rollout == GREEDY_ROLLOUT), None)


def score_of(record: Record) -> float:
    """The score of a scored Record."""
    assert record.score is not None, f"{record.id} has no score, so it is in no group"
    return record.score
