"""Ratios of policies, of tokens and of sequences.

In all of this package `r = pi / p`: the policy as it is trained now over the proximal policy, which
the clip range is around. That is `mu`, the policy that sampled the token, with the sampler's own
logprobs, unless `--proximal_policy` says otherwise. The trainer makes one optimizer update per
batch, so that the "old policy" of PPO is the current one and its ratio would always be 1; `mu`
takes its place, and the clip range bounds how far the trainer moves from what was sampled,
whether because of staleness or because sampler and trainer round differently.
"""

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs

# exp(20) is 5e8: a ratio beyond is noise, and must not become infinite and then NaN
_MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The ratio, finite whatever its logarithm is."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def proximal_logprobs(inputs: LossInputs) -> Tensor:
    """log p [N], of the policy that the clip range is around."""
    if inputs.proximal_logprobs is None:
        return inputs.behaviour_logprobs
    return inputs.proximal_logprobs


def token_ratio(inputs: LossInputs) -> Tensor:
    """r [N]."""
    return bounded_exp(inputs.logprobs - proximal_logprobs(inputs))


def sampler_log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / mu) [N], bounded, without gradient: how far the trainer is from the sampler."""
    difference = inputs.logprobs.detach() - inputs.behaviour_logprobs
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sequence_sum(values: Tensor, inputs: LossInputs) -> Tensor:
    """The sum of `values` [N] over the trained tokens of each token's row [N].

    Right only where all of the row is here: a loss that calls it has `Scope.SEQUENCE`.
    """
    rows, row = torch.unique(inputs.sequence, return_inverse=True)
    sums = values.new_zeros(len(rows))
    return sums.index_add(0, row, torch.where(inputs.mask, values, 0.0))[row]


def sequence_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """The mean of `values` [N] over the trained tokens of each token's row [N]."""
    return sequence_sum(values, inputs) / inputs.sequence_tokens


def capped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The ratio [N] under the caps of the flags, and which tokens they took effect on [N] bool.

    `importance_weight_cap_ratio` bounds every ratio (truncated importance sampling, TRL's
    `delta`), unless it belongs to the weights of `--rollout_is`. `dual_clip` bounds those of
    tokens with a negative advantage: the max(..., c A) of dual-clip PPO, arXiv 1912.09729,
    equation 5, which keeps one token that has become likely from dominating the step.
    """
    cap = torch.full_like(advantages, torch.inf)
    if config.importance_weight_cap_ratio is not None and config.rollout_is is None:
        cap = cap.clamp(max=config.importance_weight_cap_ratio)
    if config.dual_clip is not None:
        cap = torch.where(advantages < 0, cap.clamp(max=config.dual_clip), cap)
    return torch.minimum(ratio, cap), ratio.detach() > cap


def outside_clip_range(
    ratio: Tensor, advantages: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Tokens [N] whose ratio is below, and above, the clip range, and pushed on by their advantage.

    Only these lose their gradient to a clip: a token that comes back into the range keeps it.
    """
    low, high = config.clip_range
    ratio = ratio.detach()
    return (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)
