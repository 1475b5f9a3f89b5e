"""The models beside the policy in a step: the reference policy and the critic."""

from collections.abc import Sequence
from dataclasses import replace

from agentrl.configs import Config, ModelConfig
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.model_folder import check_model_folder
from agentrl.training.step.critic import Critic, CriticEstimates, CriticGradient
from agentrl.training.step.critic_loss import NO_CRITIC, CriticStatistics
from agentrl.training.step.passes import AuxiliaryOutputs
from agentrl.training.step.reference import ReferenceLogprobs
from agentrl.training.step.schedule import Schedule


def reference_start(config: Config) -> ModelConfig | None:
    """The folder of the reference policy; None if it is unused or the policy without its adapter.

    It is never a checkpoint, so that a resume does not change the reference. Raises `ConfigError`
    if the path is no model folder.
    """
    folder = config.model.reference_model_name_or_path
    if not config.loss.beta or (config.lora.lora_rank and folder is None):
        return None
    if folder is not None:
        check_model_folder(folder, "--reference_model_name_or_path")
    return replace(config.model, model_name_or_path=folder or config.model.model_name_or_path)


def critic_start(config: Config) -> ModelConfig | None:
    """The folder of the critic's start weights; None if the loss is not PPO."""
    if config.loss.loss_calculator != "PPO":
        return None
    folder = config.critic.critic_model_name_or_path or config.model.model_name_or_path
    return replace(config.model, model_name_or_path=folder)


class AuxiliaryModels:
    """The reference policy and the critic of a run. Each may be None."""

    def __init__(self, reference: ReferenceLogprobs | None, critic: Critic | None) -> None:
        self._reference = reference
        self._critic = critic
        self._estimates: CriticEstimates | None = None

    def outputs(
        self, schedule: Schedule, rows: Sequence[Sequence[TrainingSequence]]
    ) -> AuxiliaryOutputs:
        """Compute their outputs for a step's tokens. `rows`: the rows of `schedule`. Collective."""
        reference_logprobs = self._reference.logprobs(schedule) if self._reference else None
        if self._critic is None:
            return AuxiliaryOutputs(reference_logprobs)
        outcomes = [row[0].reward if row else 0.0 for row in rows]
        self._estimates = self._critic.estimate(schedule, outcomes)
        return AuxiliaryOutputs(
            reference_logprobs,
            advantages=self._estimates.advantages,
            policy_waits=self._critic.warms_up,
        )

    def add_gradient(self, schedule: Schedule) -> CriticGradient | None:
        """The critic's, if there is one, by what it said of `schedule`. Collective.

        Raises `NonFiniteGradient`.
        """
        if self._critic is None:
            return None
        assert self._estimates is not None, "it was asked first"
        return self._critic.add_gradient(schedule, self._estimates)

    def learn(self, schedule: Schedule, gradient: CriticGradient | None) -> CriticStatistics:
        """Train the critic, if there is one; `gradient`: from `add_gradient`. Collective."""
        if self._critic is None:
            return NO_CRITIC
        assert self._estimates is not None and gradient is not None, "it was asked first"
        return self._critic.learn(schedule, self._estimates, gradient)
