"""The models beside the policy in a step: who is asked before it, and who learns after it."""

from collections.abc import Sequence
from dataclasses import replace

from agentrl.configs import Config, ModelConfig
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.model_folder import check_model_folder
from agentrl.training.step.critic import Critic, CriticEstimates, CriticGradient
from agentrl.training.step.critic_loss import NO_CRITIC, CriticStatistics
from agentrl.training.step.passes import AuxiliaryOutputs
from agentrl.training.step.reference import Reference
from agentrl.training.step.schedule import Schedule


def reference_start(config: Config) -> ModelConfig | None:
    """Where the reference policy is, if the loss wants one that is not the policy's adapter off.

    A folder, and not the weights of a checkpoint: a resume changes no reference. Raises
    `ConfigError` if it is no folder of a model.
    """
    folder = config.model.reference_model_name_or_path
    if not config.loss.beta or (config.lora.lora_rank and folder is None):
        return None
    if folder is not None:
        check_model_folder(folder, "--reference_model_name_or_path")
    return replace(config.model, model_name_or_path=folder or config.model.model_name_or_path)


def critic_start(config: Config) -> ModelConfig | None:
    """Where the critic starts, if the loss is PPO."""
    if config.loss.loss_calculator != "PPO":
        return None
    folder = config.critic.critic_model_name_or_path or config.model.model_name_or_path
    return replace(config.model, model_name_or_path=folder)


class AuxiliaryModels:
    """The reference and the critic of a run, each of which there may be or not."""

    def __init__(self, reference: Reference | None, critic: Critic | None) -> None:
        self._reference = reference
        self._critic = critic
        self._estimates: CriticEstimates | None = None

    def outputs(
        self, schedule: Schedule, rows: Sequence[Sequence[TrainingSequence]]
    ) -> AuxiliaryOutputs:
        """What they say of a step's tokens. `rows`: those of `schedule`. Collective."""
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
