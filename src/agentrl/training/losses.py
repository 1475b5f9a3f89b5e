"""Losses: pure functions of per-token tensors, and their normalisation over the global batch.

Not in here: models, ranks, micro-batches. A loss function gives one term per token; `normalise`
turns terms into a scalar whose sum over all micro-batches and ranks is the loss of the step. The
weights it uses depend on global counts only, so that any split of a batch gives the same loss.

The ratio in all of this is `r = pi / mu`: the policy as it is trained now over the policy that
sampled the token, with the sampler's own logprobs. The trainer makes one optimizer update per
batch, so that the "old policy" of PPO is the current one and its ratio would always be 1; `mu`
takes its place, and the clip range bounds how far the trainer moves from what was sampled,
whether because of staleness or because sampler and trainer round differently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from agentrl.configs import LossConfig

# exp(20) is 5e8: a ratio beyond is noise, and must not become infinite and then NaN
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """What the loss knows of N tokens. All tensors are [N]."""

    logprobs: Tensor  # float32, of the policy being trained; carries the gradient
    behaviour_logprobs: Tensor  # float32, the sampler's
    advantages: Tensor  # float32
    mask: Tensor  # bool, the tokens that are trained
    staleness: Tensor  # int >= 0, steps that the trained weights are newer than the sampler's
    sequence_tokens: Tensor  # float32, trained tokens of the token's whole row
    entropy: Tensor | None = None  # float32, of the policy at the token


@dataclass(frozen=True)
class TokenLoss:
    """A loss before normalisation. All tensors are [N]; all but `terms` are detached."""

    terms: Tensor  # float32, 0 where a token is not trained
    ratio: Tensor  # float32, pi / mu
    clipped: Tensor  # bool, trained tokens that get no gradient because of the clip range


class Normalisation(StrEnum):
    """How the terms of a batch become one number. Each divides by counts of the global batch."""

    TOKEN = "token"  # mean over all trained tokens
    SEQUENCE = "sequence"  # mean over the tokens of a sequence, then over sequences
    NONE = "none"  # no length normalisation: sum over tokens, mean over sequences


@dataclass(frozen=True)
class BatchTotals:
    """Counts over all ranks and micro-batches of one optimizer step."""

    tokens: int  # trained tokens
    sequences: int  # rows with at least one trained token


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / mu) [N], bounded."""
    difference = inputs.logprobs - inputs.behaviour_logprobs
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clip_range(config: LossConfig) -> tuple[float, float]:
    """Lower and upper bound of the ratio."""
    higher = config.epsilon if config.epsilon_higher is None else config.epsilon_higher
    return 1.0 - config.epsilon, 1.0 + higher


def decayed_advantages(inputs: LossInputs, config: LossConfig) -> Tensor:
    """A * out_of_date_decay ** staleness [N]; tokens of the trained weights keep theirs."""
    if config.out_of_date_decay is None:
        return inputs.advantages
    return inputs.advantages * config.out_of_date_decay**inputs.staleness


def grpo(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Group-relative policy optimisation with PPO's token-level clip.

        L = -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_higher) * A),   r = pi / mu

    DeepSeekMath, arXiv 2402.03300, equation 3, without its KL term; the asymmetric range is
    DAPO's clip-higher, arXiv 2503.14476, equation 10. `importance_weight_cap_ratio` c bounds r
    before the clip; where A < 0 that is the dual clip max(min(rA, clip(r)A), cA) of arXiv
    1912.09729, which keeps one unlikely token from dominating the step. `strict_in_bound` leaves
    out every token whose ratio is out of the clip range, whatever the sign of its advantage.
    """
    low, high = clip_range(config)
    advantages = decayed_advantages(inputs, config)
    ratio = log_ratio(inputs).exp()
    weight = ratio
    if config.importance_weight_cap_ratio is not None:
        weight = weight.clamp(max=config.importance_weight_cap_ratio)
    clipped_terms = ratio.clamp(low, high) * advantages
    terms = -torch.minimum(weight * advantages, clipped_terms)
    clipped = _pushed_out(ratio, advantages, low, high)
    return _token_loss(terms, ratio, clipped, inputs, config)


def minirl(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """MiniRL: REINFORCE with a token-level importance weight and a clip mask.

        L = -M * sg[r] * A * log pi,   r = pi / mu
        M = 0 where A > 0 and r > 1 + epsilon_higher, or A < 0 and r < 1 - epsilon; else 1

    arXiv 2512.01374 (Stabilizing Reinforcement Learning with LLMs), where the mask's ratio is
    taken to the old policy: with one update per batch that is mu, see the module. Its gradient
    without mask is that of the expected reward to first order around mu. The paper uses no length
    normalisation. `importance_weight_cap_ratio` c truncates the weight to min(r, c) (truncated
    importance sampling); the gradient keeps flowing through log pi.
    """
    low, high = clip_range(config)
    advantages = decayed_advantages(inputs, config)
    ratio = log_ratio(inputs).detach().exp()
    weight = ratio
    if config.importance_weight_cap_ratio is not None:
        weight = weight.clamp(max=config.importance_weight_cap_ratio)
    clipped = _pushed_out(ratio, advantages, low, high)
    terms = torch.where(clipped, 0.0, -weight * advantages * inputs.logprobs)
    return _token_loss(terms, ratio, clipped, inputs, config)


def cross_entropy(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Supervised training on the trained tokens: L = -log pi.

    Advantages and behaviour logprobs play no part; the clip options do not apply.
    """
    del config
    ratio = log_ratio(inputs).detach().exp()
    clipped = torch.zeros_like(inputs.mask)
    return TokenLoss(torch.where(inputs.mask, -inputs.logprobs, 0.0), ratio, clipped)


LossFunction = Callable[[LossInputs, LossConfig], TokenLoss]

LOSS_FUNCTIONS: dict[str, LossFunction] = {
    "GRPO": grpo,
    "MINIRL": minirl,
    "CrossEntropy": cross_entropy,
}


def normalisation_of(config: LossConfig) -> Normalisation:
    """The normalisation that the flags name.

    MINIRL has none by definition, whatever `token_level_loss` says.
    """
    if config.skip_length_normalization or config.loss_calculator == "MINIRL":
        return Normalisation.NONE
    return Normalisation.TOKEN if config.token_level_loss else Normalisation.SEQUENCE


def normalise(
    terms: Tensor, sequence_tokens: Tensor, normalisation: Normalisation, totals: BatchTotals
) -> Tensor:
    """This part's share of the global batch's loss, a scalar.

    `terms` [N]; `sequence_tokens` [N] is how many trained tokens the token's whole sequence has,
    wherever they are computed. The sum of the results over every part of the batch is the loss.
    Tokens that a loss leaves out (clip mask, `strict_in_bound`) stay in the counts: leaving many
    out makes the step smaller, and the counts are known before any forward pass.
    """
    if normalisation is Normalisation.TOKEN:
        return terms.sum() / max(totals.tokens, 1)
    if normalisation is Normalisation.SEQUENCE:
        return (terms / sequence_tokens).sum() / max(totals.sequences, 1)
    return terms.sum() / max(totals.sequences, 1)


def _pushed_out(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Tokens [N] whose ratio is out of the range in the direction that their advantage pushes."""
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


def _token_loss(
    terms: Tensor, ratio: Tensor, clipped: Tensor, inputs: LossInputs, config: LossConfig
) -> TokenLoss:
    low, high = clip_range(config)
    ratio = ratio.detach()
    kept = inputs.mask
    if config.strict_in_bound:
        out = (ratio < low) | (ratio > high)
        clipped = clipped | out
        kept = kept & ~out
    return TokenLoss(torch.where(kept, terms, 0.0), ratio, clipped.detach() & inputs.mask)
