"""Losses that preserve the policy's entropy at the tokens that reduce it most.

These tokens have a high covariance of logprob and advantage, which is to first order the decrease
of the entropy in a step. Both losses are from The Entropy Mechanism of Reinforcement Learning for
Reasoning Language Models, arXiv 2505.22617.
"""

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.clipped import clipped_surrogate
from agentrl.training.losses.inputs import LossInputs, Scope, TokenLoss, depends_on
from agentrl.training.losses.ratio import capped, token_ratio

_NO_COVARIANCE = 1e-9  # with equal advantages the covariance is 0 up to rounding


@depends_on(Scope.BATCH)
def clip_cov(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Clip-Cov: the clipped surrogate, without gradient at a few tokens of high covariance.

        L = 0 at max(1, clip_cov_ratio N) tokens, drawn from those with
            clip_cov_lb < Cov < clip_cov_ub that the ratio's range has not clipped

    The draw is a function of the sampler's logprobs, so that it does not depend on how the batch is
    split and ordered.
    """
    loss = clipped_surrogate(inputs, config)
    covariance = _covariance(inputs)
    within = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub)
    candidates = within & inputs.mask & ~loss.clipped_low & ~loss.clipped_high
    count = min(_share(config.clip_cov_ratio, inputs), int(candidates.sum()))
    tickets = torch.where(candidates, _tickets(inputs), torch.iinfo(torch.int64).max)
    drawn = torch.zeros_like(inputs.mask)
    drawn[tickets.topk(count, largest=False).indices] = True
    token_losses = torch.where(drawn, 0.0, loss.token_losses)
    return TokenLoss(token_losses, loss.ratio, loss.clipped_low, loss.clipped_high | drawn)


@depends_on(Scope.BATCH)
def kl_cov(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """KL-Cov: the surrogate without clip, and a KL penalty at the tokens of highest covariance.

    L = -r A + ppo_kl_coef |log r| at the max(1, kl_cov_ratio N) tokens of highest Cov
    L = -r A elsewhere

    The penalty acts where the policy has moved: at r = 1 it and its gradient are 0, so that on
    policy, or around a recomputed policy, the loss is the plain policy gradient.
    """
    ratio, over_cap = capped(token_ratio(inputs), inputs.advantages, config)
    penalty = config.ppo_kl_coef * token_ratio(inputs).log().abs()
    covariance = torch.where(inputs.mask, _covariance(inputs), -torch.inf)
    chosen = torch.zeros_like(inputs.mask)
    chosen[covariance.topk(_share(config.kl_cov_ratio, inputs)).indices] = True
    chosen &= covariance > _NO_COVARIANCE
    token_losses = -ratio * inputs.advantages + torch.where(chosen, penalty, 0.0)
    none = torch.zeros_like(over_cap)
    return TokenLoss(token_losses, token_ratio(inputs).detach(), none, over_cap)


def _covariance(inputs: LossInputs) -> Tensor:
    """(log pi - mean log pi) (A - mean A) [N] float64, means over the batch's trained tokens."""
    count = inputs.mask.sum().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        values = values.double()
        return values - torch.where(inputs.mask, values, 0.0).sum() / count

    return centred(inputs.logprobs.detach()) * centred(inputs.advantages)


def _share(ratio: float, inputs: LossInputs) -> int:
    """Number of tokens in a share of the batch; at least one unless the share or batch is empty."""
    count = int(inputs.mask.sum())
    return min(count, max(1, int(ratio * count))) if ratio > 0 else 0


def _tickets(inputs: LossInputs) -> Tensor:
    """Pseudo-random numbers [N] that do not depend on the split of the batch."""
    bits = inputs.behaviour_logprobs.float().contiguous().view(torch.int32).to(torch.int64)
    return (bits * 2654435761) % 2**32
