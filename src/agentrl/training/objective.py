"""The loss that the flags describe: a loss function, its layers, its normalisation."""

from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses import (
    LOSS_FUNCTIONS,
    BatchTotals,
    LossInputs,
    Scope,
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

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy that is wanted is trained, and must carry its gradient."""
        return False

    @property
    def with_reference(self) -> bool:
        """Whether `LossInputs.reference_logprobs` are wanted."""
        return False

    @property
    def scope(self) -> Scope:
        """How much of the batch `share` must see at once, to be exact."""
        return Scope.TOKEN

    def share(self, inputs: LossInputs, totals: BatchTotals) -> tuple[Tensor, TokenLoss]:
        """The scalar to differentiate, whose sum over all parts is the loss, and its terms."""
        token_loss = self._function(inputs, self._config)
        share = normalise(token_loss.terms, inputs.sequence_tokens, self._normalisation, totals)
        return share, token_loss
