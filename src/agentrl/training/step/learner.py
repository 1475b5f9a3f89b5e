"""The learner: the sharded policy with optimizer and schedule, the critic and the reference.

A step changes policy and critic, and a checkpoint has their state (`Learner.state_dict`). The
reference policy is sharded like the policy and computes the same micro-batches. The trainer and
supervised training supply the rows.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from agentrl.configs import ConfigError, LearnerConfig, ModelConfig
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.batch_form import BatchForm, batch_form, use_batch_form
from agentrl.training.model.loading import empty_model, fill
from agentrl.training.model.lora import has_adapter
from agentrl.training.model.prepare import prepare_model
from agentrl.training.model.value_loading import empty_value_model, fill_value_model
from agentrl.training.parallel import Mesh, weights_are_finite
from agentrl.training.parallel.compilation import uncompiled
from agentrl.training.step.auxiliary import AuxiliaryModels
from agentrl.training.step.critic import Critic
from agentrl.training.step.culprits import NonFiniteGradient, find_culprits
from agentrl.training.step.kept_logprobs import KeptLogprobs, KeptTokens
from agentrl.training.step.objective import Objective, StepObjective
from agentrl.training.step.optimizer import (
    load_optimizer,
    make_optimizer,
    make_scheduler,
    missing_moments,
)
from agentrl.training.step.partial_gradients import sum_partial_gradients
from agentrl.training.step.preference_objective import PreferenceObjective
from agentrl.training.step.probe import probe
from agentrl.training.step.reference import Reference, ReferenceLogprobs, StoredReference
from agentrl.training.step.schedule import forget_passes, go_on, make_schedule
from agentrl.training.step.state_offload import StateOffload
from agentrl.training.step.statistics import StepStatistics
from agentrl.training.step.train_step import gradient_is_finite, look, train_step

logger = logging.getLogger(__name__)


class Learner:
    """The policy in training. All ranks make one and make the same calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        config: LearnerConfig,
        total_steps: int,
        *,
        reference: ModelConfig | None = None,
        reference_in_rows: bool = False,
        value_start: ModelConfig | None = None,
        keeps_logprobs: bool = False,
    ) -> None:
        """Shard the models in place. `model` has float32 weights, the same on every rank.

        If `config.model` names a folder, `model` is an `empty_model` and gets its weights from
        there after sharding. `reference`: folder of the reference policy, if the loss needs one
        that is not `model` without its adapter. `reference_in_rows`: rows bring the logprobs of the
        reference, see `StoredReference`. `value_start`: folder of the critic's start
        weights, for PPO. `keeps_logprobs`: see `kept_tokens`. Policy and reference are probed,
        and take micro-batches in the form in which they are computed right. Raises `ConfigError` if
        there is none or if a model cannot be divided by `mesh`, and `RuntimeError` if a parameter
        is not sharded as expected.
        """
        self._prepare = prepare = partial(
            prepare_model,
            mesh=mesh,
            compute=config.compute,
            trees=config.model.attends_over_trees,
        )
        self._home = home = torch.device("cpu") if config.compute.param_offload else mesh.device
        prepare(model)
        if config.model.model_name_or_path is not None:
            fill(model, config.model, mesh, home)
        _probe(model, mesh, config, "--model_name_or_path")
        self.model = model
        self.mesh = mesh
        self._config = config
        self.critic: Critic | None = None
        if value_start is not None:
            value_model = empty_value_model(value_start)
            prepare(value_model)
            fill_value_model(value_model, value_start, mesh, home)
            if batch_form(model) is not BatchForm.TREE:
                use_batch_form(value_model, batch_form(model), model.config._attn_implementation)
            _check_alike(model, value_model, "--critic_model_name_or_path")
            with uncompiled(config.compute):
                sum_partial_gradients(value_model, mesh)  # the probe does so for the policy
            self.critic = Critic(value_model, mesh, config.critic, config.optimizer, total_steps)
            total_steps -= config.critic.critic_warmup_steps
        self.optimizer = make_optimizer(model, config.optimizer)
        self.scheduler = make_scheduler(self.optimizer, config.optimizer, total_steps)
        self._objective = _objective(config)
        self._models = [model]
        if self.critic is not None:
            self._models.append(self.critic.model)
        asked: ReferenceLogprobs | None = None
        if reference_in_rows:
            asked = StoredReference()
        elif self._objective.with_reference:
            asked = loaded = self.load_reference(reference)
            if loaded.model is not model:
                self._models.append(loaded.model)
        self._auxiliary = AuxiliaryModels(asked, self.critic)
        self._keeps_logprobs = keeps_logprobs
        # Of each of this rank's rows in the last step, where they are kept. They are the same on
        # all processes that share the rows.
        self.kept_tokens: Sequence[KeptTokens] = ()
        self._optimizers = [self.optimizer]
        if self.critic is not None:
            self._optimizers.append(self.critic.optimizer)
        self._offload = StateOffload(mesh.device)

    def load_reference(self, start: ModelConfig | None) -> Reference:
        """The reference policy of the folder; of None this policy without its adapter. Collective.

        Raises `ConfigError` if it cannot compute the micro-batches of this policy.
        """
        assert start or has_adapter(self.model), "a policy is no reference of its own"
        model, flag = self.model, "--reference_model_name_or_path"
        if start is not None:
            model = empty_model(start).requires_grad_(False)
            self._prepare(model)
            fill(model, start, self.mesh, self._home)
            _probe(model, self.mesh, self._config, flag)
            _check_alike(self.model, model, flag)
        return Reference(model, self._config.compute.loss_seq_chunk_size)

    def step(
        self,
        rows: Sequence[Sequence[TrainingSequence]],
        between_passes: Callable[[], None] = go_on,
    ) -> StepStatistics:
        """Train on this rank's rows, each as its sequences, and update the weights once.

        `between_passes` is called after each pass, until the weights are updated. If it raises, it
        must on all ranks alike; the caller then calls `leave_step`. Raises `NonFiniteGradient` if
        the gradient of the policy or of the critic is not finite: no weights were changed.
        """
        kept = KeptLogprobs() if self._keeps_logprobs else None
        self.kept_tokens = ()
        try:
            statistics = train_step(
                self.model, self.optimizer, self.scheduler, rows, self._objective, self._config,
                self.mesh, self._auxiliary, between_passes, kept,
            )  # fmt: skip
        except NonFiniteGradient:
            self.leave_step()
            raise
        if kept is not None:
            self.kept_tokens = kept.of_rows(len(rows))
        return statistics

    def look(self, rows: Sequence[Sequence[TrainingSequence]]) -> StepStatistics:
        """What a step on this rank's rows would say of them; nothing is trained. Collective."""
        return look(self.model, rows, self._objective, self._config, self.mesh, self._auxiliary)

    def culprits(
        self, ids: Sequence[Sequence[str]], mine: Sequence[Sequence[TrainingSequence]]
    ) -> dict[str, str]:
        """Which rows of a step, each alone, have a gradient that is not finite: whose it is, by id.

        `ids`: of the rows of each data-parallel rank; `mine`: this rank's rows. Collective. Raises
        `FloatingPointError` if it is the weights that are not finite.
        """
        _check_weights(self.model, "the policy's", "--learning_rate")
        finite = {"its gradient": self._policy_is_finite}
        if self.critic is not None:
            _check_weights(self.critic.model, "the critic's", "--critic_learning_rate")
            finite["the critic's gradient of it"] = self._critic_is_finite
        found: dict[str, str] = {}
        for gradient, is_finite in finite.items():
            for row in self._search(is_finite, ids, mine):
                found.setdefault(row, gradient)
        return found

    def _search(
        self,
        is_finite: Callable[[Sequence[Sequence[TrainingSequence]]], bool],
        ids: Sequence[Sequence[str]],
        mine: Sequence[Sequence[TrainingSequence]],
    ) -> list[str]:
        def holds(places: Sequence[tuple[int, int]]) -> bool:
            return is_finite([mine[at] for rank, at in places if rank == self.mesh.dp_rank])

        everywhere = [(rank, place) for rank, rows in enumerate(ids) for place in range(len(rows))]
        return [ids[rank][place] for rank, place in find_culprits(holds, everywhere)]

    def _policy_is_finite(self, rows: Sequence[Sequence[TrainingSequence]]) -> bool:
        return gradient_is_finite(
            self.model, rows, self._objective, self._config, self.mesh, self._auxiliary
        )

    def _critic_is_finite(self, rows: Sequence[Sequence[TrainingSequence]]) -> bool:
        compute = self._config.compute
        schedule = make_schedule(
            self.model, rows, compute.token_budget, compute.pad_to_multiple_of, self.mesh
        )
        self._auxiliary.outputs(schedule, rows)
        try:
            self._auxiliary.add_gradient(schedule)
        except NonFiniteGradient:
            return False
        finally:
            self.leave_step()
        return True

    def leave_step(self) -> None:
        """Discard the gradients of an interrupted step. The weights have not changed."""
        forget_passes(self.model)
        if self.critic is not None:
            forget_passes(self.critic.model)

    def offload(self) -> None:
        """Move all models, gradients and optimizer states to host memory, until `bring_back`.

        Meanwhile only `state_dict` may be called.
        """
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        self._offload.offload(self._state_tensors())

    def bring_back(self) -> None:
        """Move what was offloaded back to the device."""
        self._offload.bring_back()

    def _state_tensors(self) -> Iterator[Tensor]:
        """All that stays on the device between steps."""
        for model in self._models:
            for parameter in model.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for optimizer in self._optimizers:
            for moments in optimizer.state.values():
                yield from (value for value in moments.values() if isinstance(value, Tensor))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, sharded and not copied. Collective.

        The weights are under `model`, by their names in the model. With an adapter these are only
        the adapter's weights.
        """
        self._make_moments()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        named = self.model.named_parameters(remove_duplicate=False)
        for name in [name for name, parameter in named if not parameter.requires_grad]:
            del model[name]
        state = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}
        if self.critic is not None:
            state["critic"] = self.critic.state_dict()
        on_host: dict[str, Any] = self._offload.on_host(state)
        return on_host

    def _make_moments(self) -> None:
        """Make the state of an optimizer that has not updated yet: where that of the others is."""
        for optimizer in self._optimizers:
            for tensors in missing_moments(optimizer):
                if self._offload.is_away:
                    self._offload.offload(tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the `state_dict` of a learner of the same model. Collective.

        Learning rate, weight decay, betas, epsilon and schedule of this learner stay.
        """
        # Not strict, because frozen weights are not in the state.
        load_optimizer(self.model, self.optimizer, self.scheduler, state, strict=False)
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])


def _objective(config: LearnerConfig) -> StepObjective:
    if config.preference is None:
        return Objective(config.loss)
    return PreferenceObjective(config.preference)


def _probe(model: PreTrainedModel, mesh: Mesh, config: LearnerConfig, flag: str) -> None:
    """Let `model` take micro-batches in the first form that is right for it. Collective.

    `flag`: the one that gave the model. Raises `ConfigError` if no form is right.
    """
    longest = config.longest_row or config.compute.token_budget
    verdict = probe(model, mesh, config.compute, longest, trees=config.model.attends_over_trees)
    kind = type(model).__name__.removeprefix("FSDP")
    if verdict.difference is None:
        raise ConfigError(f"{flag}: {kind} cannot be trained: {verdict.sentence}")
    level = logging.WARNING if verdict.failed else logging.INFO
    logger.log(level, "%s is %s", kind, verdict.sentence)


def _check_alike(policy: PreTrainedModel, other: PreTrainedModel, flag: str) -> None:
    """Raise `ConfigError` if `other` cannot compute the micro-batches of the policy."""
    forms = list(BatchForm)
    if forms.index(batch_form(other)) > forms.index(batch_form(policy)):
        raise ConfigError(
            f"{flag}: {type(other).__name__} takes sequences as {batch_form(other)} and the policy "
            f"as {batch_form(policy)}; give a model of the policy's family"
        )
    sizes = [model.config.get_text_config().vocab_size for model in (policy, other)]
    if sizes[0] > sizes[1]:
        raise ConfigError(
            f"{flag}: its vocabulary has {sizes[1]} tokens and the policy's {sizes[0]}; give a "
            "model with the policy's tokenizer"
        )


def _check_weights(model: PreTrainedModel, whose: str, flag: str) -> None:
    """Raises `FloatingPointError` if weights are not finite. Collective."""
    if not weights_are_finite(model):
        raise FloatingPointError(
            f"{whose} weights are not finite any more: go on from an earlier checkpoint, with a "
            f"lower {flag}"
        )
