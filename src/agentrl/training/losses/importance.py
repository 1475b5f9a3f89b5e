"""Importance weights and masks for the mismatch between sampler and trainer: layers over any loss.

Their ratio is rho = p / mu if the proximal policy p is not the sampler's policy mu, because only
MINIRL contains this ratio; otherwise it is pi / mu. It has no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs, Scope
from agentrl.training.losses.ratio import (
    bounded_exp,
    sampler_log_ratio,
    sequence_mean,
    sequence_sum,
)


@dataclass(frozen=True)
class Correction:
    """The factors of the token losses. All tensors are [N]."""

    weight: Tensor  # float32, importance weight
    truncated: Tensor  # bool, whether the weight was capped
    kept: Tensor  # bool, whether the token stays in the loss


def proximal_policy(inputs: LossInputs, config: LossConfig) -> Tensor | None:
    """log p [N] of `--proximal_policy`; None where that is the sampler's policy.

    `recompute`: the policy as it was before this step's update, which with one update a step is
    the current one, sg[pi]. The loss's ratio is then 1 in value, and the clip range never takes
    effect: what is off policy is for `--rollout_is` to deal with. Decoupled PPO, arXiv 2110.00641;
    AReaL, arXiv 2505.24298. It is the default of the losses whose papers take their ratio to the
    trainer's own old policy and whose range is narrow against rounding: GSPO, MINIRL.

    `loglinear`: between sampler and current policy by staleness d,

        log p = a log mu + (1 - a) log pi,   a = 1 / d, and 0 where d = 0

    A-3PO, arXiv 2512.06547.
    """
    if config.centre == "behaviour":
        return None
    current = inputs.logprobs.detach()
    if config.centre == "recompute":
        return current
    share = torch.where(inputs.staleness > 0, 1.0 / inputs.staleness.clamp(min=1), 0.0)
    return share * inputs.behaviour_logprobs + (1.0 - share) * current


def correction(inputs: LossInputs, config: LossConfig) -> Correction:
    """The layers `--rollout_is` (weights, truncated at `--rollout_is_threshold`) and
    `--rollout_rs` (masks), with the ratio of

        token      rho_t
        sequence   product over the row's tokens
        geometric  their geometric mean

    Truncated importance sampling: fengyao.notion.site/off-policy-rl. Masks of tokens (IcePop):
    arXiv 2510.18855; of sequences, by the ratio or its geometric mean: richardli.xyz/rl-collapse.
    The flags have the names of verl's rollout correction.
    """
    ones = torch.ones_like(inputs.advantages)
    weight, truncated, kept = ones, torch.zeros_like(inputs.mask), torch.ones_like(inputs.mask)
    if inputs.proximal_logprobs is None:
        log_ratio = sampler_log_ratio(inputs)
    else:
        log_ratio = inputs.proximal_logprobs - inputs.behaviour_logprobs
    if config.rollout_is is not None:
        weight = _ratio(log_ratio, config.rollout_is, inputs)
        if config.weight_cap is not None:
            truncated = weight > config.weight_cap
            weight = weight.clamp(max=config.weight_cap)
    if config.rollout_rs is not None:
        ratio = _ratio(log_ratio, config.rollout_rs, inputs)
        upper, lower = config.rollout_rs_threshold, config.rollout_rs_threshold_lower
        kept = (ratio <= upper) & (ratio >= (1.0 / upper if lower is None else lower))
    return Correction(weight, truncated, kept)


def correction_scope(config: LossConfig) -> Scope:
    """The scope of these layers."""
    levels = {config.rollout_is, config.rollout_rs}
    return Scope.SEQUENCE if levels & {"sequence", "geometric"} else Scope.TOKEN


def _ratio(log_ratio: Tensor, level: str, inputs: LossInputs) -> Tensor:
    if level == "sequence":
        return bounded_exp(sequence_sum(log_ratio, inputs))
    if level == "geometric":
        return bounded_exp(sequence_mean(log_ratio, inputs))
    assert level == "token", level
    return bounded_exp(log_ratio)
