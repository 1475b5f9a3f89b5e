"""Losses with a clipped ratio: PPO's surrogate, of tokens and of sequences.

GRPO, Dr.GRPO, DAPO, REINFORCE++ and PPO share one surrogate and differ in the advantage, the clip
range and the length normalisation that go with it (`configs/losses.py`).
"""

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs, Scope, TokenLoss, depends_on
from agentrl.training.losses.ratio import (
    bounded_exp,
    capped,
    outside_clip_range,
    proximal_logprobs,
    sequence_mean,
    token_ratio,
)


def clipped_surrogate(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """The clipped surrogate of PPO, token by token.

        L = -min(r A, clip(r, 1 - epsilon, 1 + epsilon + epsilon_higher) A)

    PPO, arXiv 1707.06347, equation 7. GRPO: DeepSeekMath, arXiv 2402.03300, equation 3, whose KL
    term is `--beta`; there it is the mean over a sequence's tokens and then over sequences, and
    `GRPO` here is the mean over all tokens of the step. Dr.GRPO, arXiv 2503.20783: without the
    group's deviation, and with a constant in place of the sequence's length. DAPO, arXiv
    2503.14476, equation 8: the wider upper range, the mean over tokens. REINFORCE++, arXiv
    2501.03262: advantages normalised over the global batch.
    """
    return _clip(token_ratio(inputs), inputs.advantages, config)


@depends_on(Scope.SEQUENCE)
def gspo(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Group sequence policy optimisation: the ratio, and so the clip, is that of a sequence.

        L = -min(s A, clip(s, 1 - epsilon, 1 + epsilon + epsilon_higher) A)
        s = exp(mean over the sequence's tokens of log r)

    arXiv 2507.18071, equations 5 and 7; a sequence is a row with all its turns and segments. The
    mean over tokens of a sequence, then over sequences, makes it the paper's. Its old policy is
    the trainer's (`--proximal_policy recompute`): the range is narrower than the difference that
    rounding makes between trainer and sampler. The paper's sequence has one advantage. A row whose
    turns have several is computed as by `gspo_token`: the gradient of s would give each token the
    mean advantage of the row, and so reinforce the malformed turns of a right one.
    """
    log_ratio = inputs.logprobs - proximal_logprobs(inputs)
    ratio = bounded_exp(sequence_mean(log_ratio, inputs))
    ratio = torch.where(_has_one_advantage(inputs), ratio, _of_each_token(ratio, inputs))
    return _clip(ratio, inputs.advantages, config)


@depends_on(Scope.SEQUENCE)
def gspo_token(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """GSPO whose gradient is each token's own: for advantages that differ within a sequence.

        L_t = -min(s_t A_t, clip(s_t) A_t),   s_t = sg[s] pi_t / sg[pi_t]

    arXiv 2507.18071, equations 13 and 14. Equal to `gspo` where a sequence has one advantage.
    """
    log_ratio = inputs.logprobs - proximal_logprobs(inputs)
    ratio = bounded_exp(sequence_mean(log_ratio, inputs))
    return _clip(_of_each_token(ratio, inputs), inputs.advantages, config)


def _of_each_token(ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The sequence's ratio [N], with the gradient of each token's own logprob."""
    return ratio.detach() * (inputs.logprobs - inputs.logprobs.detach()).exp()


def _has_one_advantage(inputs: LossInputs) -> Tensor:
    """Whether the trained tokens of each token's row all have the same advantage, [N] bool."""
    rows, row = torch.unique(inputs.sequence, return_inverse=True)
    none = inputs.advantages.new_full((len(rows),), torch.inf)
    trained = torch.where(inputs.mask, inputs.advantages, torch.inf)
    lowest = none.scatter_reduce(0, row, trained, "amin")
    trained = torch.where(inputs.mask, inputs.advantages, -torch.inf)
    highest = (-none).scatter_reduce(0, row, trained, "amax")
    return (lowest == highest)[row]


def _clip(ratio: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """The surrogate of a ratio [N] with gradient, under the options that change it.

    `beta1`, `beta2`: tokens that the clip takes out keep a bounded gradient,

        L = -beta1 (1 - epsilon) r / sg[r] A where r < 1 - epsilon and A < 0
        L = -beta2 (1 + epsilon + epsilon_higher) r / sg[r] A where r is above that and A > 0

    CE-GPPO, arXiv 2509.20712, equation 8 (over GRPO: CE-GRPO).
    """
    low, high = config.clip_range
    weight, over_cap = capped(ratio, advantages, config)
    token_losses = -torch.minimum(weight * advantages, ratio.clamp(low, high) * advantages)
    too_low, too_high = outside_clip_range(ratio, advantages, config)
    one = ratio / ratio.detach()
    if config.beta1 is not None:
        token_losses = torch.where(too_low, -config.beta1 * low * one * advantages, token_losses)
    if config.beta2 is not None:
        token_losses = torch.where(too_high, -config.beta2 * high * one * advantages, token_losses)
    return TokenLoss(token_losses, ratio.detach(), too_low, too_high | over_cap)
