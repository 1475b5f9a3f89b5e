"""The band of ratios: which tokens are left out because they are too far off policy.

    left out where A > 0 and r > 1 + (epsilon + epsilon_higher) k,  or  A < 0 and r < 1 - epsilon k

    k = c exp(-d staleness)   c: --importance_weight_cap_ratio, d: --out_of_date_decay
    k = 1                     with --strict_in_bound

The mask of the original AgentRL. The clip range of a surrogate stops a gradient where the ratio is
past it; the band, with c above 1, also takes out what CE-GPPO's betas keep of it and what a loss
without clip (MINIRL) has there.
"""

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs


def within_band(ratio: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor | None:
    """The tokens [N] that stay in the loss; None if the flags give no band.

    `ratio` [N]: that of the loss, of the token's sequence for GSPO.
    """
    if config.band is None:
        return None
    width = torch.full_like(ratio, config.band)
    if config.out_of_date_decay is not None and not config.is_strict:
        width = width * torch.exp(-config.out_of_date_decay * inputs.staleness)
    low, high = config.clip_range
    too_low = (inputs.advantages < 0) & (ratio < 1.0 - (1.0 - low) * width)
    too_high = (inputs.advantages > 0) & (ratio > 1.0 + (high - 1.0) * width)
    return ~(too_low | too_high)
