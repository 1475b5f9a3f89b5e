"""From the scores of a group to advantages: pure functions, composed in one visible order.

scores -> advantage estimator -> scaling -> filters -> which Records become rows
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.configs import RewardConfig

ZERO = 1e-6  # an advantage below this carries no gradient
STD_FLOOR = 1e-4  # keeps a group of equal scores finite


def mean_std(scores: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4), std with n - 1 (GRPO, arXiv 2402.03300, eq. 3.1)."""
    centred = mean(scores)
    if len(scores) < 2:
        return centred
    std = math.sqrt(sum(value * value for value in centred) / (len(scores) - 1))
    return [value / (std + STD_FLOOR) for value in centred]


def mean(scores: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r) (Dr.GRPO, arXiv 2503.20783; MiniRL, arXiv 2512.01374)."""
    average = sum(scores) / len(scores)
    return [score - average for score in scores]


def leave_one_out(scores: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean(r)) (RLOO, arXiv 2402.14740)."""
    if len(scores) < 2:
        return [0.0 for _ in scores]
    return [value * len(scores) / (len(scores) - 1) for value in mean(scores)]


ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "mean_std": mean_std,
    "mean": mean,
    "leave_one_out": leave_one_out,
}


@dataclass(frozen=True)
class Reward:
    """What a group makes of one of its Records."""

    advantage: float
    trained: bool


def reward_group(scores: Sequence[float], config: RewardConfig) -> list[Reward]:
    """The advantage of each Record of a group, and whether it is trained.

    `scores`: one per Record that has a score; Records that failed take no part in the group.
    """
    if not scores:
        return []
    advantages = [
        advantage * config.adv_scaling for advantage in ESTIMATORS[config.advantage](scores)
    ]
    return [Reward(advantage, _is_trained(advantage, config)) for advantage in advantages]


def _is_trained(advantage: float, config: RewardConfig) -> bool:
    if config.drop_zero_advantage and abs(advantage) < ZERO:
        return False
    return config.minimal_advantage is None or advantage > config.minimal_advantage
