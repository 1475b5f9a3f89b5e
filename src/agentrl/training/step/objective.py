"""The loss that the flags describe: a loss function, its layers, its normalisation.

    advantages    KL penalty taken off -> normalized over the batch -> decayed by staleness
    ratio         around the proximal policy
    token losses  the loss function -> importance weights -> tokens left out
                  -> KL to the reference added -> entropy bonus taken off
    scalar        normalised over the global batch

Flags switch each layer on. All layers work with every loss function, except that a supervised loss
has no advantages and no ratio.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.configs.losses import loss_defaults
from agentrl.training.losses import (
    BatchTotals,
    LossInputs,
    Normalisation,
    Scope,
    TokenLoss,
    loss_function,
    normalise,
    scope_of,
)
from agentrl.training.losses.band import within_band
from agentrl.training.losses.divergence import kl_divergence
from agentrl.training.losses.importance import (
    Correction,
    correction,
    correction_scope,
    proximal_policy,
)
from agentrl.training.losses.ratio import rest_sum, sequence_sum

_SUPERVISED = "CrossEntropy"
_STD_FLOOR = 1e-8  # keeps a batch of equal advantages finite


@dataclass(frozen=True)
class TokenLosses:
    """The objective's result for N tokens. All tensors are [N] and detached."""

    token_losses: Tensor  # float32, before normalisation; 0 where a token is not trained
    clipped_low: Tensor  # bool, trained tokens whose ratio was clipped as too small
    clipped_high: Tensor  # bool, trained tokens whose ratio was clipped as too large
    truncated: Tensor  # bool, trained tokens whose importance weight was capped
    left_out: Tensor  # bool, trained tokens that a layer left out
    reference_kl: Tensor | None  # float32, estimate of KL(pi || reference), with --beta
    rewards: Tensor | None = None  # float32, beta log(pi / reference), of a preference loss
    in_order: Tensor | None = None  # bool, the first token of each pair that it orders right


class StepObjective(Protocol):
    """What a step minimises: `Objective`, or `PreferenceObjective` where rows are pairs."""

    @property
    def with_entropy(self) -> bool: ...

    @property
    def entropy_gradient(self) -> bool: ...

    @property
    def with_reference(self) -> bool: ...

    @property
    def scope(self) -> Scope: ...

    def share(self, inputs: LossInputs, totals: BatchTotals) -> tuple[Tensor, TokenLosses]: ...


class Objective:
    """Computes the share of the loss of a part of the batch."""

    def __init__(self, config: LossConfig) -> None:
        """Raises `ConfigError` if a user's loss function cannot be used."""
        self._config = config
        self._function = loss_function(config)
        self._normalisation = Normalisation(config.normalisation)
        self._kl_span = loss_defaults(config.loss_calculator).kl_span
        self._supervised = config.loss_calculator == _SUPERVISED

    @property
    def with_entropy(self) -> bool:
        """Whether `LossInputs.entropy` is needed."""
        return self._config.log_entropy or self.entropy_gradient

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy needs a gradient, for the entropy bonus."""
        return self._config.entropy_coef > 0

    @property
    def with_reference(self) -> bool:
        """Whether `LossInputs.reference_logprobs` are needed."""
        return self._config.beta > 0

    @property
    def scope(self) -> Scope:
        """The part of the batch that one call of `share` must have to be exact."""
        if self._supervised:
            return Scope.TOKEN
        return max(scope_of(self._function), correction_scope(self._config), self._kl_scope)

    @property
    def _kl_scope(self) -> Scope:
        """The part of the batch that the KL penalty in the advantages depends on."""
        if not self._config.kl_in_advantage:
            return Scope.TOKEN
        if self._config.normalizes_advantages:
            return Scope.BATCH
        return Scope.TOKEN if self._kl_span == "token" else Scope.SEQUENCE

    def share(self, inputs: LossInputs, totals: BatchTotals) -> tuple[Tensor, TokenLosses]:
        """Return this part's share of the loss, a scalar with gradient, and the token losses.

        The loss is the sum of the shares of all parts.
        """
        config = self._config
        divergence = None
        if config.beta > 0:
            assert inputs.reference_logprobs is not None, "with_reference was not heeded"
            divergence = kl_divergence(
                inputs.logprobs, inputs.reference_logprobs, config.divergence
            )
        if not self._supervised:
            inputs = self._prepared(inputs, totals, divergence)
        loss = self._function(inputs, config)
        token_losses, corrected = loss.token_losses, self._correction(inputs, loss)
        if corrected is not None:
            token_losses = torch.where(corrected.kept, token_losses * corrected.weight, 0.0)
        if divergence is not None and not config.kl_in_advantage:
            token_losses = token_losses + config.beta * divergence
        if self.entropy_gradient:
            assert inputs.entropy is not None, "with_entropy was not heeded"
            token_losses = token_losses - config.entropy_coef * inputs.entropy
        mask = inputs.mask
        token_losses = torch.where(mask, token_losses, 0.0)
        share = normalise(
            token_losses, inputs.sequence_tokens, self._normalisation, totals, config.divisor
        )
        none = torch.zeros_like(mask)
        return share, TokenLosses(
            token_losses=token_losses.detach(),
            clipped_low=loss.clipped_low & mask,
            clipped_high=loss.clipped_high & mask,
            truncated=none if corrected is None else corrected.truncated & mask,
            left_out=none if corrected is None else ~corrected.kept & mask,
            reference_kl=None if divergence is None else divergence.detach(),
        )

    def _prepared(
        self, inputs: LossInputs, totals: BatchTotals, divergence: Tensor | None
    ) -> LossInputs:
        """With the advantages and the proximal policy of the flags."""
        config = self._config
        advantages = inputs.advantages
        if config.kl_in_advantage and divergence is not None:
            # A penalty is part of the reward, so it comes before the normalization.
            advantages = advantages - config.beta * self._penalty(divergence.detach(), inputs)
            if config.normalizes_advantages:
                totals = _with_advantages(totals, advantages[inputs.mask])
        if config.normalizes_advantages:
            std = totals.advantage_std + _STD_FLOOR
            advantages = (advantages - totals.advantage_mean) / std
            if inputs.capped is not None:  # less far below 0 than the mean is not good
                advantages = torch.where(inputs.capped, advantages.clamp(max=0.0), advantages)
        if config.advantage_decay is not None:
            # Tokens of staleness 0 keep their advantage.
            advantages = advantages * config.advantage_decay**inputs.staleness
        return replace(
            inputs, advantages=advantages, proximal_logprobs=proximal_policy(inputs, config)
        )

    def _penalty(self, divergence: Tensor, inputs: LossInputs) -> Tensor:
        """The KL [N] that each token's advantage answers for, of the tokens' own [N]."""
        if self._kl_span == "sequence":
            return sequence_sum(divergence, inputs)
        return rest_sum(divergence, inputs) if self._kl_span == "rest" else divergence

    def _correction(self, inputs: LossInputs, loss: TokenLoss) -> Correction | None:
        """The importance weights, and the masks of `--rollout_rs` and the band of ratios."""
        if self._supervised:
            return None
        corrected = correction(inputs, self._config)
        within = within_band(loss.ratio, inputs, self._config)
        return corrected if within is None else replace(corrected, kept=corrected.kept & within)


def _with_advantages(totals: BatchTotals, advantages: Tensor) -> BatchTotals:
    """The totals of a batch whose trained tokens have these advantages [tokens]."""
    values = advantages.double()
    return replace(
        totals, advantages=float(values.sum()), squared_advantages=float(values.square().sum())
    )
