"""Losses whose ratio is a detached weight on the policy gradient."""

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs, TokenLoss
from agentrl.training.losses.ratio import capped, sampler_log_ratio, token_ratio


def minirl(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """MiniRL: REINFORCE with a token-level importance weight and a mask.

        L = -M sg[pi / mu] A log pi

    arXiv 2512.01374 (Stabilizing Reinforcement Learning with LLMs), sections 2 and 4: the weight
    is taken to the sampler's policy mu, and the mask's r = pi / p to the old policy as the trainer
    computes it, so that different rounding masks nothing. Its gradient without mask is that of the
    expected reward to first order around mu. The paper sums over tokens, here divided by a
    constant. The mask M is the band of `band.py`: in the paper the clip range, and with
    `--strict_in_bound` or `--importance_weight_cap_ratio` that of the original AgentRL around mu.
    """
    ratio = token_ratio(inputs).detach()
    weight, over_cap = capped(sampler_log_ratio(inputs).exp(), inputs.advantages, config)
    return TokenLoss(_weighted(weight, inputs), ratio, torch.zeros_like(over_cap), over_cap)


def reinforce(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """REINFORCE with a token-level importance weight, which is 1 on the sampler's own policy.

        L = -sg[r] A log pi

    The estimator of RLOO (arXiv 2402.14740), ReMax (arXiv 2310.10505, algorithm 1) and
    OPO (arXiv 2505.23585), which differ in the baseline of A. Their log pi is that of
    the whole sequence, the sum over its tokens, here divided by a constant.
    """
    ratio = token_ratio(inputs).detach()
    weight, over_cap = capped(ratio, inputs.advantages, config)
    return TokenLoss(_weighted(weight, inputs), ratio, torch.zeros_like(over_cap), over_cap)


def cispo(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """CISPO: the weight is clipped and not the token, so that every token keeps its gradient.

        L = -sg[min(r, 1 + clip_ratio_high)] A log pi

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5, without a lower bound, as there. TRL's
    `epsilon_high` is the bound itself, 1 + clip_ratio_high.
    """
    ratio = token_ratio(inputs).detach()
    _, high = config.clip_range
    weight, over_cap = capped(ratio.clamp(max=high), inputs.advantages, config)
    clipped = over_cap | (ratio > high)
    return TokenLoss(_weighted(weight, inputs), ratio, torch.zeros_like(clipped), clipped)


def gpg(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Group policy gradient: the policy gradient itself, without ratio or clip.

        L = -A log pi

    arXiv 2504.02546. Its factor alpha, the share of rows that have an advantage, is 1
    here: rows without are left out before a step is filled (`--drop_zero_advantage`). The weight
    for what other policies sampled is `--rollout_is`.
    """
    del config
    ratio = token_ratio(inputs).detach()
    none = torch.zeros_like(inputs.mask)
    return TokenLoss(_weighted(torch.ones_like(ratio), inputs), ratio, none, none)


def sapo(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Soft adaptive policy optimisation: a smooth gate in place of the clip.

        L = -4 / tau sigmoid(tau (r - 1)) A,   tau = sapo_temperature_pos where A > 0, else _neg

    arXiv 2511.20347. The gradient's weight is 1 at r = 1 and fades on both sides, faster for a
    larger tau.
    """
    ratio = token_ratio(inputs)
    weight, over_cap = capped(ratio, inputs.advantages, config)
    tau = torch.where(
        inputs.advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg
    )
    token_losses = -4.0 / tau * torch.sigmoid(tau * (weight - 1.0)) * inputs.advantages
    return TokenLoss(token_losses, ratio.detach(), torch.zeros_like(over_cap), over_cap)


def _weighted(weight: Tensor, inputs: LossInputs) -> Tensor:
    """-weight A log pi [N]: its gradient by log pi is -weight A."""
    return -weight * inputs.advantages * inputs.logprobs
