"""The critic of PPO: estimates the advantages of a step, and is trained on its returns.

    estimate      values of all trained tokens -> GAE along each row -> returns, normalized
                  advantages
    add_gradient  gradient of the value loss, before any weights of the step are changed
    learn         `--critic_updates` updates towards the returns

`value_head` has the model, and `gae` and `critic_loss` have the formulas.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import PreTrainedModel

from agentrl.configs import CriticConfig, OptimizerConfig
from agentrl.training.attention import SharedPrefix
from agentrl.training.data.batch import MicroBatch
from agentrl.training.model.value_head import state_values
from agentrl.training.parallel import Mesh, clip_grad_norm
from agentrl.training.step.critic_loss import (
    CriticStatistics,
    Moments,
    explained_variance,
    value_loss,
)
from agentrl.training.step.culprits import NonFiniteGradient
from agentrl.training.step.gae import generalised_advantages, normalized, outcome_rewards
from agentrl.training.step.optimizer import load_optimizer, make_optimizer, make_scheduler
from agentrl.training.step.schedule import Schedule, forget_passes, run_schedule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CriticEstimates:
    """The critic's estimates for a step before its update.

    `values`, `returns` and `advantages` have one [N] float32 tensor for each micro-batch.
    """

    values: Sequence[Tensor]
    returns: Sequence[Tensor]
    advantages: Sequence[Tensor]  # normalized over the global batch; 0 where nothing is trained
    value_mean: float
    return_mean: float
    explained_variance: float


@dataclass(frozen=True)
class CriticGradient:
    """The gradient of the next update. The parameters' `grad` have it, clipped."""

    loss: Tensor  # this rank's part of the value loss, [] float64
    norm: float  # before clipping


class Critic:
    """The critic in training. All ranks make one and make the same calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        config: CriticConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
    ) -> None:
        """`model`: an `empty_value_model`, prepared by `prepare_model`, with loaded weights.

        `optimizer`: the policy's settings, which the critic shares except for the learning rate.
        """
        own = replace(optimizer, learning_rate=config.critic_learning_rate)
        self.model = model
        self._mesh = mesh
        self._config = config
        self._max_grad_norm = optimizer.max_grad_norm
        self.optimizer = make_optimizer(model, own)
        self._scheduler = make_scheduler(self.optimizer, own, total_steps)

    @property
    def warms_up(self) -> bool:
        """Whether the next step trains the critic only."""
        return self._scheduler.last_epoch < self._config.critic_warmup_steps

    @torch.no_grad()
    def estimate(self, schedule: Schedule, outcomes: Sequence[float]) -> CriticEstimates:
        """Compute values, returns and advantages of the step. Collective.

        `outcomes`: the rewards of this rank's rows.
        """
        self.model.eval()
        by_batch: list[Tensor] = []

        def collect(number: int, batch: MicroBatch, values: Tensor) -> None:
            by_batch.append(values[batch.prediction])

        run_schedule(self.model, schedule, self._values, collect)
        batches = schedule.batches
        mask = torch.cat([batch.mask for batch in batches])
        values = torch.cat(by_batch)
        sequence = torch.cat([batch.sequence for batch in batches])[mask]
        place = torch.cat([batch.place for batch in batches])[mask]
        rewards = outcome_rewards(
            torch.tensor(outcomes, dtype=torch.float32, device=mask.device), sequence, place
        )
        estimates = generalised_advantages(
            rewards, values[mask], sequence, place,
            gamma=self._config.gae_gamma, lam=self._config.gae_lambda,
        )  # fmt: skip
        error = estimates.returns - values[mask]
        moments = Moments(
            estimates.advantages, values[mask], estimates.returns, error, group=self._mesh.dp_group
        )
        returns, advantages = torch.zeros_like(values), torch.zeros_like(values)
        returns[mask] = estimates.returns
        advantages[mask] = normalized(estimates.advantages, *moments[0])
        sizes = [len(part) for part in by_batch]
        return CriticEstimates(
            values=by_batch,
            returns=returns.split(sizes),
            advantages=advantages.split(sizes),
            value_mean=moments[1][0],
            return_mean=moments[2][0],
            explained_variance=explained_variance(moments[3][1], moments[2][1]),
        )

    def add_gradient(self, schedule: Schedule, estimates: CriticEstimates) -> CriticGradient:
        """Compute the gradient of the value loss towards the returns of `estimates`. Collective.

        Raises `NonFiniteGradient`; the caller then calls `forget_passes`.
        """
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=self._mesh.device)

        def share(number: int, batch: MicroBatch, values: Tensor) -> Tensor:
            token_losses = value_loss(
                values[batch.prediction], estimates.values[number], estimates.returns[number],
                self._config.value_clip,
            )  # fmt: skip
            part = torch.where(batch.mask, token_losses, 0.0).sum() / schedule.totals.tokens
            loss.add_(part.detach())
            return self._mesh.scale_for_mean_reduction(part)

        run_schedule(self.model, schedule, self._values, share)
        norm = clip_grad_norm(self.model, self._max_grad_norm)
        if not math.isfinite(norm):
            raise NonFiniteGradient(
                f"the critic's gradient norm is {norm}: the weights were left as they are; the "
                "rewards of this step or --critic_learning_rate are the place to look"
            )
        return CriticGradient(loss, norm)

    def learn(
        self, schedule: Schedule, estimates: CriticEstimates, gradient: CriticGradient
    ) -> CriticStatistics:
        """Update the critic towards the returns of `estimates`, `critic_updates` times. Collective.

        `gradient`: that of the first update, from `add_gradient`. The policy is already updated,
        so a later gradient that is not finite ends the updates and not the step.
        """
        self._update()
        for done in range(1, self._config.critic_updates):
            try:
                gradient = self.add_gradient(schedule, estimates)
            except NonFiniteGradient as error:
                forget_passes(self.model)
                logger.warning("after %d of --critic_updates %d: %s",
                               done, self._config.critic_updates, error)  # fmt: skip
                break
            self._update()
        self._scheduler.step()
        loss = gradient.loss
        dist.all_reduce(loss, group=self._mesh.dp_group)
        return CriticStatistics(
            value_loss=float(loss),
            value_mean=estimates.value_mean,
            return_mean=estimates.return_mean,
            explained_variance=estimates.explained_variance,
            critic_grad_norm=gradient.norm,
        )

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The critic's state for a checkpoint, sharded and not copied. Collective."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the `state_dict` of a critic of the same model; see `Learner`."""
        load_optimizer(self.model, self.optimizer, self._scheduler, state)

    def _values(self, batch: MicroBatch, prefix: SharedPrefix | None) -> Tensor:
        """Values [M] of the states of the batch's predictions."""
        return state_values(self.model, batch, prefix)
