"""The objective of rows that are pairs: a preference loss, the mean over the step's pairs."""

import torch
from torch import Tensor

from agentrl.configs.preferences import PreferenceConfig
from agentrl.training.losses import BatchTotals, LossInputs, Scope
from agentrl.training.losses.preference import PREFERENCE_LOSSES, pair_ratios
from agentrl.training.step.objective import TokenLosses


class PreferenceObjective:
    """Computes the share of the loss of a part of the batch, as `Objective` does."""

    with_entropy = False
    entropy_gradient = False
    with_reference = True
    scope = Scope.SEQUENCE  # a pair's loss depends on all tokens of both answers

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config
        self._function = PREFERENCE_LOSSES[config.loss_type]

    def share(self, inputs: LossInputs, totals: BatchTotals) -> tuple[Tensor, TokenLosses]:
        """Return this part's share of the loss, a scalar with gradient, and the token losses.

        The loss is the sum of the shares of all parts. Each token of a pair has the pair's loss.
        """
        pairs, pair = pair_ratios(inputs)
        losses = self._function(pairs, self._config)
        trained = pairs.chosen_tokens + pairs.rejected_tokens > 0  # a placeholder is no pair
        share = torch.where(trained, losses, 0.0).sum() / max(totals.sequences, 1)
        none = torch.zeros_like(inputs.mask)
        assert inputs.reference_logprobs is not None, "with_reference was not heeded"
        assert inputs.place is not None, "the first token of a pair is needed"
        ratio = (inputs.logprobs - inputs.reference_logprobs).detach()
        return share, TokenLosses(
            token_losses=torch.where(inputs.mask, losses.detach()[pair], 0.0),
            clipped_low=none,
            clipped_high=none,
            truncated=none,
            left_out=none,
            reference_kl=None,
            rewards=self._config.beta * ratio,
            in_order=(pairs.chosen > pairs.rejected)[pair] & inputs.mask & (inputs.place == 0),
        )
