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

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs, TokenLoss
from agentrl.training.losses.normalisation import Normalisation

# exp(20) is 5e8: a ratio beyond is noise, and must not become infinite and then NaN
_MAX_LOG_RATIO = 20.0


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
    low_out, high_out = _pushed_out(ratio, advantages, low, high)
    return _token_loss(terms, ratio, low_out, high_out, inputs, config)


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
    low_out, high_out = _pushed_out(ratio, advantages, low, high)
    terms = torch.where(low_out | high_out, 0.0, -weight * advantages * inputs.logprobs)
    return _token_loss(terms, ratio, low_out, high_out, inputs, config)


def cross_entropy(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Supervised training on the trained tokens: L = -log pi.

    Advantages and behaviour logprobs play no part; the clip options do not apply.
    """
    del config
    ratio = log_ratio(inputs).detach().exp()
    none = torch.zeros_like(inputs.mask)
    return TokenLoss(torch.where(inputs.mask, -inputs.logprobs, 0.0), ratio, none, none)


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


def _pushed_out(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Tokens [N] whose ratio is below, and above, the range and is pushed on by the advantage."""
    return (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)


def _token_loss(
    terms: Tensor,
    ratio: Tensor,
    low_out: Tensor,
    high_out: Tensor,
    inputs: LossInputs,
    config: LossConfig,
) -> TokenLoss:
    ratio = ratio.detach()
    kept = inputs.mask
    if config.strict_in_bound:
        low, high = clip_range(config)
        low_out, high_out = ratio < low, ratio > high
        kept = kept & ~low_out & ~high_out
    return TokenLoss(
        torch.where(kept, terms, 0.0), ratio, low_out & inputs.mask, high_out & inputs.mask
    )
