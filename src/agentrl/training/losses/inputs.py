"""What a loss is given and what it gives back: the types of this package."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from torch import Tensor

from agentrl.configs import LossConfig

_SCOPE = "scope"  # attribute of a loss function


class Scope(IntEnum):
    """How much of the batch the term of one token depends on.

    A part of the batch that holds less cannot compute its own share of the loss: then the step
    first gathers what it lacks. The order is by size: of two, `max` is what both need.
    """

    TOKEN = 0  # itself only
    SEQUENCE = 1  # all trained tokens of its row
    BATCH = 2  # all trained tokens of the step, over all data-parallel ranks


@dataclass(frozen=True)
class LossInputs:
    """What the loss knows of N tokens. All tensors are [N]; only `logprobs` and, where it is
    trained, `entropy` carry gradients."""

    logprobs: Tensor  # float32, of the policy being trained
    behaviour_logprobs: Tensor  # float32, the sampler's
    advantages: Tensor  # float32
    mask: Tensor  # bool, the tokens that are trained
    staleness: Tensor  # int >= 0, steps that the trained weights are newer than the sampler's
    sequence_tokens: Tensor  # float32, trained tokens of the token's whole row
    sequence: Tensor  # int64, which row the token is of; numbers mean nothing else
    entropy: Tensor | None = None  # float32, of the policy at the token
    reference_logprobs: Tensor | None = None  # float32, of the reference policy
    proximal_logprobs: Tensor | None = None  # float32, see `ratio.py`; None: the sampler's

    @classmethod
    def of_columns(
        cls,
        columns: Mapping[str, Tensor],
        *,
        logprobs: Tensor,
        entropy: Tensor | None,
        mask: Tensor,
        sequence: Tensor,
        sequence_tokens: Tensor,
    ) -> Self:
        """The inputs of tokens with these per-token columns (`databases.token_tree`), each [N]."""
        return cls(
            logprobs=logprobs,
            behaviour_logprobs=columns["logprobs"],
            advantages=columns["advantages"],
            mask=mask,
            staleness=columns["staleness"],
            sequence_tokens=sequence_tokens,
            sequence=sequence,
            entropy=entropy,
        )


@dataclass(frozen=True)
class TokenLoss:
    """A loss before layers and normalisation. All tensors are [N]; all but `token_losses` are
    detached.

    Where `LossInputs.mask` is False values mean nothing.
    """

    token_losses: Tensor  # float32
    ratio: Tensor  # float32, what is held to the clip range
    clipped_low: Tensor  # bool, the clip took effect, the ratio being too small
    clipped_high: Tensor  # bool, or too large


@dataclass(frozen=True)
class BatchTotals:
    """Sums over all data-parallel ranks and micro-batches of one optimizer step."""

    tokens: int  # trained tokens
    sequences: int  # rows with at least one trained token
    advantages: float = 0.0  # of the trained tokens, as the rows have them
    squared_advantages: float = 0.0

    @property
    def advantage_mean(self) -> float:
        """Over the trained tokens."""
        return self.advantages / max(self.tokens, 1)

    @property
    def advantage_std(self) -> float:
        """Over the trained tokens; with n, as the mean of squares has it."""
        squares = self.squared_advantages / max(self.tokens, 1)
        return math.sqrt(max(0.0, squares - self.advantage_mean**2))


LossFunction = Callable[[LossInputs, LossConfig], TokenLoss]


def depends_on(scope: Scope) -> Callable[[LossFunction], LossFunction]:
    """Says of a loss function that the term of a token depends on more than the token."""

    def mark(function: LossFunction) -> LossFunction:
        setattr(function, _SCOPE, scope)
        return function

    return mark


def scope_of(function: LossFunction) -> Scope:
    """What `depends_on` said; `Scope.TOKEN` without."""
    scope: Scope = getattr(function, _SCOPE, Scope.TOKEN)
    return scope
