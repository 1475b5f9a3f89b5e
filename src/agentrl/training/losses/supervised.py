"""The loss of supervised training."""

import torch

from agentrl.configs import LossConfig
from agentrl.training.losses.inputs import LossInputs, TokenLoss
from agentrl.training.losses.ratio import token_ratio


def cross_entropy(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Supervised training on the trained tokens: L = -log pi.

    Advantages and behaviour logprobs are not used, and layers that use them do not apply.
    """
    del config
    none = torch.zeros_like(inputs.mask)
    return TokenLoss(-inputs.logprobs, token_ratio(inputs).detach(), none, none)
