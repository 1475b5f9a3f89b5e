"""The types of a loss function's inputs and result."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from torch import Tensor

from agentrl.configs import LossConfig

_SCOPE = "scope"  # attribute of a loss function


class Scope(IntEnum):
    """The part of the batch that the loss of one token depends on.

    If a micro-batch holds less than this, the step first gathers the missing inputs. Members are
    ordered by size: the `max` of two scopes serves both.
    """

    TOKEN = 0  # itself only
    SEQUENCE = 1  # all trained tokens of its row
    BATCH = 2  # all trained tokens of the step, over all data-parallel ranks


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss for N tokens. All tensors are [N].

    Only `logprobs` and, with an entropy bonus, `entropy` have gradients.
    """

    logprobs: Tensor  # float32, of the policy being trained
    behaviour_logprobs: Tensor  # float32, the sampler's
    advantages: Tensor  # float32
    mask: Tensor  # bool, the tokens that are trained
    staleness: Tensor  # int >= 0, steps that the trained weights are newer than the sampler's
    sequence_tokens: Tensor  # float32, trained tokens of the token's whole row
    sequence: Tensor  # int64, number of the token's row
    entropy: Tensor | None = None  # float32, of the policy at the token
    reference_logprobs: Tensor | None = None  # float32, of the reference policy
    proximal_logprobs: Tensor | None = None  # float32, see `ratio.py`; None: the sampler's
    capped: Tensor | None = None  # bool, failed turns: none of them is reinforced
    place: Tensor | None = None  # int64, index of the token among the trained tokens of its row

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
        place: Tensor,
    ) -> Self:
        """Make the inputs from per-token columns (`databases.token_tree`), each [N]."""
        return cls(
            logprobs=logprobs,
            behaviour_logprobs=columns["logprobs"],
            advantages=columns["advantages"],
            mask=mask,
            staleness=columns["staleness"],
            capped=columns["capped"] == 1,
            sequence_tokens=sequence_tokens,
            sequence=sequence,
            entropy=entropy,
            place=place,
        )


@dataclass(frozen=True)
class TokenLoss:
    """The result of a loss function, before layers and normalisation. All tensors are [N].

    All tensors except `token_losses` are detached. Values where `LossInputs.mask` is False are
    ignored.
    """

    token_losses: Tensor  # float32
    ratio: Tensor  # float32, the ratio that the clip range applies to
    clipped_low: Tensor  # bool, whether the ratio was clipped as too small
    clipped_high: Tensor  # bool, whether it was clipped as too large


@dataclass(frozen=True)
class BatchTotals:
    """Sums over all data-parallel ranks and micro-batches of one optimizer step."""

    tokens: int  # trained tokens
    sequences: int  # rows with at least one trained token
    advantages: float = 0.0  # sum over the trained tokens, as stored in the rows
    squared_advantages: float = 0.0  # sum of their squares

    @property
    def advantage_mean(self) -> float:
        """Mean advantage of the trained tokens."""
        return self.advantages / max(self.tokens, 1)

    @property
    def advantage_std(self) -> float:
        """Standard deviation of the trained tokens' advantages, with divisor n."""
        squares = self.squared_advantages / max(self.tokens, 1)
        return math.sqrt(max(0.0, squares - self.advantage_mean**2))


LossFunction = Callable[[LossInputs, LossConfig], TokenLoss]


def depends_on(scope: Scope) -> Callable[[LossFunction], LossFunction]:
    """Decorator that declares the scope of a loss function; the default is `Scope.TOKEN`."""

    def mark(function: LossFunction) -> LossFunction:
        setattr(function, _SCOPE, scope)
        return function

    return mark


def scope_of(function: LossFunction) -> Scope:
    """The scope that `depends_on` declared, else `Scope.TOKEN`."""
    scope: Scope = getattr(function, _SCOPE, Scope.TOKEN)
    return scope
