"""Losses: pure functions of per-token tensors, and how they become one number.

    inputs.py          the types of a loss function's inputs and result; `depends_on`
    clipped.py weighted.py covariance.py supervised.py    the loss functions
    preference.py      losses of pairs of answers
    resolve.py         these by name, and a user's from a file
    ratio.py           ratios of policies, and their caps
    band.py importance.py divergence.py    layers over any loss
    normalisation.py   token losses to the loss of the global batch

`step/objective.py` combines them by flags. Models, ranks and micro-batches are unknown here.
"""

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import (
    BatchTotals,
    LossFunction,
    LossInputs,
    Scope,
    TokenLoss,
    depends_on,
    scope_of,
)
from agentrl.training.losses.normalisation import Normalisation, normalise
from agentrl.training.losses.ratio import sequence_mean, sequence_sum, token_ratio
from agentrl.training.losses.resolve import LOSS_FUNCTIONS, loss_function

__all__ = [
    "LOSS_FUNCTIONS",
    "BatchTotals",
    "LossConfig",
    "LossFunction",
    "LossInputs",
    "Normalisation",
    "Scope",
    "TokenLoss",
    "depends_on",
    "loss_function",
    "normalise",
    "scope_of",
    "sequence_mean",
    "sequence_sum",
    "token_ratio",
]
