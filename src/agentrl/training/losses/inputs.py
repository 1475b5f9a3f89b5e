"""What a loss is given and what it gives back: the types of this package."""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


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


@dataclass(frozen=True)
class TokenLoss:
    """A loss before normalisation. All tensors are [N]; all but `terms` are detached."""

    terms: Tensor  # float32, 0 where a token is not trained
    ratio: Tensor  # float32, what is held to the clip range
    clipped_low: Tensor  # bool, trained tokens that get no gradient: their ratio is too small
    clipped_high: Tensor  # bool, or too large


@dataclass(frozen=True)
class BatchTotals:
    """Counts over all data-parallel ranks and micro-batches of one optimizer step."""

    tokens: int  # trained tokens
    sequences: int  # rows with at least one trained token
