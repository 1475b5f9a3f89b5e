"""The critic of PPO: from a step's work to advantages, and then to a critic that knows better.

    estimate    values of all trained tokens -> GAE along each row -> advantages, whitened; returns
    learn       some updates of the critic towards the returns

Not in here: the model (`value_model`), the formulas (`gae`, `critic_loss`), the policy's own step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedModel

from agentrl.configs import CriticConfig, OptimizerConfig
from agentrl.training.batch import MicroBatch
from agentrl.training.critic_loss import (
    CriticStatistics,
    Moments,
    explained_variance,
    value_loss,
)
from agentrl.training.gae import generalised_advantages, outcome_rewards, whitened
from agentrl.training.optimizer import make_optimizer, make_scheduler
from agentrl.training.parallel import Mesh, clip_grad_norm, parallelise
from agentrl.training.value_model import attach_values, state_values
from agentrl.training.work import StepWork


@dataclass(frozen=True)
class Verdict:
    """What the critic says of a step, before it learns: [N] float32 of each micro-batch."""

    values: Sequence[Tensor]
    returns: Sequence[Tensor]
    advantages: Sequence[Tensor]  # whitened over the global batch; 0 where nothing is trained
    value_mean: float
    return_mean: float
    explained_variance: float


class Critic:
    """The critic in training. Every rank makes one and makes the same calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        config: CriticConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        bf16: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Shards `model`, from `load_value_model`, in place, as the policy is sharded.

        `optimizer` is the policy's, from which the critic has all but the learning rate.
        """
        parallelise(model, mesh, bf16=bf16, gradient_checkpointing=gradient_checkpointing)
        attach_values(model)
        own = replace(optimizer, learning_rate=config.critic_learning_rate)
        self.model = model
        self._mesh = mesh
        self._config = config
        self._max_grad_norm = optimizer.max_grad_norm
        self._optimizer = make_optimizer(model, own)
        self._scheduler = make_scheduler(self._optimizer, own, total_steps)

    def estimate(self, work: StepWork, outcomes: Sequence[float]) -> Verdict:
        """Advantages and returns of the step. `outcomes`: the reward of each of the rank's rows.

        Collective.
        """
        self.model.eval()
        batches: list[MicroBatch] = []

        def values_of(batch: MicroBatch) -> Tensor:
            batches.append(batch)
            return self._values(batch)

        by_batch = work.evaluate(values_of)
        sizes = [len(values) for values in by_batch]
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
        advantages[mask] = whitened(estimates.advantages, *moments[0])
        return Verdict(
            values=by_batch,
            returns=returns.split(sizes),
            advantages=advantages.split(sizes),
            value_mean=moments[1][0],
            return_mean=moments[2][0],
            explained_variance=explained_variance(moments[3][1], moments[2][1]),
        )

    def learn(self, work: StepWork, verdict: Verdict) -> CriticStatistics:
        """Update the critic towards the returns of `verdict`, `critic_updates` times. Collective.

        Raises `FloatingPointError` if a gradient is not finite, and leaves the weights alone.
        """
        self.model.train()
        for _ in range(self._config.critic_updates):
            loss = torch.zeros((), dtype=torch.float64, device=self._mesh.device)

            def share(number: int, batch: MicroBatch) -> Tensor:
                terms = value_loss(
                    self._values(batch), verdict.values[number], verdict.returns[number],
                    self._config.value_clip,
                )  # fmt: skip
                part = torch.where(batch.mask, terms, 0.0).sum() / work.totals.tokens
                loss.add_(part.detach())
                return self._mesh.scale_for_mean_reduction(part)

            work.train(share)
            grad_norm = clip_grad_norm(self.model, self._max_grad_norm)
            if not math.isfinite(grad_norm):
                raise FloatingPointError(
                    f"the critic's gradient norm is {grad_norm}: its weights were left as they "
                    "are; the rewards of this step or --critic_learning_rate are the place to look"
                )
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._scheduler.step()
        torch.distributed.all_reduce(loss, group=self._mesh.dp_group)
        return CriticStatistics(
            value_loss=float(loss),
            value_mean=verdict.value_mean,
            return_mean=verdict.return_mean,
            explained_variance=verdict.explained_variance,
            critic_grad_norm=grad_norm,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint must hold of the critic; sharded, not copied. Collective."""
        model, optimizer = get_state_dict(self.model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of a critic of the same model gave. Collective."""
        set_state_dict(
            self.model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._scheduler.load_state_dict(state["scheduler"])

    def _values(self, batch: MicroBatch) -> Tensor:
        """Of the states of the batch's trained tokens [N]."""
        return state_values(self.model, batch)
