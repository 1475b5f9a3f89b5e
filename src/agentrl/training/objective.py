"""The loss that the flags describe: a loss function, its layers, its normalisation."""

from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses import (
    LOSS_FUNCTIONS,
    BatchTotals,
    LossInputs,
    TokenLoss,
    normalisation_of,
    normalise,
)


class Objective:
    """From the tokens of a part of the batch to that part's share of the loss."""

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        self._function = LOSS_FUNCTIONS[config.loss_calculator]
        self._normalisation = normalisation_of(config)

    @property
    def with_entropy(self) -> bool:
        """Whether the entropy of the policy is wanted."""
        return self._config.log_entropy

    def share(self, inputs: LossInputs, totals: BatchTotals) -> tuple[Tensor, TokenLoss]:
        """The scalar to differentiate, whose sum over all parts is the loss, and its terms."""
        token_loss = self._function(inputs, self._config)
        share = normalise(token_loss.terms, inputs.sequence_tokens, self._normalisation, totals)
        return share, token_loss
