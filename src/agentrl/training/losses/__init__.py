"""Losses: pure functions of per-token tensors, and how they become one number."""

from agentrl.training.losses.inputs import BatchTotals, LossInputs, Scope, TokenLoss
from agentrl.training.losses.normalisation import Normalisation, normalise
from agentrl.training.losses.policy import (
    LOSS_FUNCTIONS,
    LossFunction,
    clip_range,
    cross_entropy,
    decayed_advantages,
    grpo,
    log_ratio,
    minirl,
    normalisation_of,
)

__all__ = [
    "LOSS_FUNCTIONS",
    "BatchTotals",
    "LossFunction",
    "LossInputs",
    "Normalisation",
    "Scope",
    "TokenLoss",
    "clip_range",
    "cross_entropy",
    "decayed_advantages",
    "grpo",
    "log_ratio",
    "minirl",
    "normalisation_of",
    "normalise",
]
