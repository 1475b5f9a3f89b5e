"""Ratios of policies, of tokens and of sequences.

In this package `r = pi / p` is the ratio of the trained policy `pi` to the proximal policy `p`, on
which the clip range is centred, that of `--proximal_policy`. For most losses it is `mu`, the policy
that sampled the token, with the sampler's logprobs. The trainer makes one optimizer update per
batch, so that the ratio to PPO's "old policy" would always be 1. With `mu` the clip range bounds
the distance to the sampled policy, which staleness and different rounding cause.
"""

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs

# exp(20) is 5e8: larger ratios are noise and must not overflow
_MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log ratio, clamped to be finite."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def proximal_logprobs(inputs: LossInputs) -> Tensor:
    """log p [N] of the proximal policy."""
    if inputs.proximal_logprobs is None:
        return inputs.behaviour_logprobs
    return inputs.proximal_logprobs


def token_ratio(inputs: LossInputs) -> Tensor:
    """The ratio r = pi / p [N]."""
    return bounded_exp(inputs.logprobs - proximal_logprobs(inputs))


def sampler_log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / mu) [N] between trainer and sampler, clamped, without gradient."""
    difference = inputs.logprobs.detach() - inputs.behaviour_logprobs
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sequence_sum(values: Tensor, inputs: LossInputs) -> Tensor:
    """The sum of `values` [N] over the trained tokens of each token's row [N].

    It needs all tokens of a row: a loss that calls it must declare `Scope.SEQUENCE`.
    """
    rows, row = torch.unique(inputs.sequence, return_inverse=True)
    sums = values.new_zeros(len(rows))
    return sums.index_add(0, row, torch.where(inputs.mask, values, 0.0))[row]


def rest_sum(values: Tensor, inputs: LossInputs) -> Tensor:
    """The sum of `values` [N] over the trained tokens of its row from each token on [N].

    `inputs.place` must be given. As for `sequence_sum`, the loss must declare `Scope.SEQUENCE`.
    """
    assert inputs.place is not None, "the order of the tokens of a row is needed"
    rows, row = torch.unique(inputs.sequence, return_inverse=True)
    by_place = inputs.place.argsort(stable=True)
    order = by_place[row[by_place].argsort(stable=True)]
    # float64, because the sum runs over all rows.
    ordered = torch.where(inputs.mask, values, 0.0)[order].double()
    until = ordered.cumsum(0)
    ends = ordered.new_zeros(len(rows)).index_add(0, row[order], ordered).cumsum(0)
    rest = torch.empty_like(ordered)
    rest[order] = ends[row[order]] - until + ordered
    return rest.to(values.dtype)


def sequence_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """The mean of `values` [N] over the trained tokens of each token's row [N]."""
    return sequence_sum(values, inputs) / inputs.sequence_tokens


def capped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The ratio [N] under the caps of the flags, and whether a cap took effect, [N] bool.

    `rollout_is_threshold` caps every ratio (truncated importance sampling, TRL's `delta`);
    with `--rollout_is` it caps those weights instead. `dual_clip` caps the ratios of tokens with a
    negative advantage: the max(..., c A) of dual-clip PPO, arXiv 1912.09729, equation 5, which
    keeps a token that has become likely from dominating the step.
    """
    cap = torch.full_like(advantages, torch.inf)
    if config.weight_cap is not None and config.rollout_is is None:
        cap = cap.clamp(max=config.weight_cap)
    if config.dual_clip is not None:
        cap = torch.where(advantages < 0, cap.clamp(max=config.dual_clip), cap)
    # Not `torch.minimum`, which halves the gradient where both are equal: on policy at a cap of 1.
    above = ratio.detach() > cap
    return torch.where(above, cap, ratio), above


def outside_clip_range(
    ratio: Tensor, advantages: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Tokens [N] below, and above, the clip range whose advantage moves them further away.

    Only these lose their gradient by clipping; a token that moves back into the range keeps it.
    """
    low, high = config.clip_range
    ratio = ratio.detach()
    return (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)
