"""One optimizer step: rows of one rank -> micro-batches -> gradients -> update and statistics.

Shared by the trainer and by supervised training. Every rank calls `train_step` together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from agentrl.configs import LearnerConfig
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.parallel import Mesh, clip_grad_norm, layer_grad_norms
from agentrl.training.step.auxiliary import AuxiliaryModels
from agentrl.training.step.critic_loss import NO_CRITIC
from agentrl.training.step.culprits import NonFiniteGradient
from agentrl.training.step.kept_logprobs import KeptLogprobs
from agentrl.training.step.objective import StepObjective
from agentrl.training.step.passes import NO_AUXILIARY_OUTPUTS, PolicyPasses
from agentrl.training.step.schedule import go_on, make_schedule
from agentrl.training.step.statistics import RunningStatistics, StepStatistics


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    rows: Sequence[Sequence[TrainingSequence]],
    objective: StepObjective,
    config: LearnerConfig,
    mesh: Mesh,
    auxiliary: AuxiliaryModels | None = None,
    between_passes: Callable[[], None] = go_on,
    kept: KeptLogprobs | None = None,
) -> StepStatistics:
    """Train on `rows` (this rank's, each as its sequences) and update the weights once.

    The result is the same on every rank, and but for rounding the same for any number of ranks and
    any micro-batch size. `between_passes` is called after each pass until the weights are updated;
    what it raises leaves the step. `kept` is given the logprobs of this rank's rows. Raises
    `NonFiniteGradient` if the gradient of the policy or of the critic is not finite. Either way all
    weights are as before, and the caller forgets what the passes have added to the gradients
    (`forget_passes`).
    """
    compute = config.compute
    schedule = make_schedule(
        model, rows, compute.token_budget, compute.pad_to_multiple_of, mesh, between_passes
    )
    outputs = auxiliary.outputs(schedule, rows) if auxiliary else NO_AUXILIARY_OUTPUTS
    model.train()
    running = RunningStatistics(mesh.device, kept)
    passes = PolicyPasses(model, schedule, objective, compute.loss_seq_chunk_size, mesh, outputs)
    grad_norms, grad_norm, learning_rate = None, 0.0, 0.0
    if outputs.policy_waits:
        passes.look(running)
    else:
        passes.add_gradients(running)
        if config.optimizer.log_grad_norms:
            grad_norms = layer_grad_norms(model)
        grad_norm = clip_grad_norm(model, config.optimizer.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(
                f"the gradient norm is {grad_norm}: the weights were left as they are; the rows of "
                "this step or the learning rate before it are the place to look"
            )
    # Before the policy is updated: a step that is not finite for one model is none for the other.
    critic_gradient = auxiliary.add_gradient(schedule) if auxiliary else None
    if not outputs.policy_waits:
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    critic = NO_CRITIC
    if auxiliary:
        # The policy is updated, so the step is no longer interrupted.
        critic = auxiliary.learn(replace(schedule, between_passes=go_on), critic_gradient)
    return running.reduce(
        schedule.totals,
        grad_norm,
        learning_rate,
        len(schedule.batches),
        mesh.dp_group,
        grad_norms,
        critic,
    )


def look(
    model: PreTrainedModel,
    rows: Sequence[Sequence[TrainingSequence]],
    objective: StepObjective,
    config: LearnerConfig,
    mesh: Mesh,
    auxiliary: AuxiliaryModels,
) -> StepStatistics:
    """The statistics of `rows` (this rank's) with the present weights. Collective."""
    compute = config.compute
    schedule = make_schedule(model, rows, compute.token_budget, compute.pad_to_multiple_of, mesh)
    outputs = auxiliary.outputs(schedule, rows)
    model.eval()
    running = RunningStatistics(mesh.device)
    PolicyPasses(model, schedule, objective, compute.loss_seq_chunk_size, mesh, outputs).look(
        running
    )
    return running.reduce(schedule.totals, 0.0, 0.0, len(schedule.batches), mesh.dp_group)


def gradient_is_finite(
    model: PreTrainedModel,
    rows: Sequence[Sequence[TrainingSequence]],
    objective: StepObjective,
    config: LearnerConfig,
    mesh: Mesh,
    auxiliary: AuxiliaryModels | None = None,
) -> bool:
    """Whether the policy's gradient on `rows` alone (this rank's) is; nothing is updated.

    It is where the policy waits for its critic to warm up. Collective, with the same answer on
    every rank.
    """
    compute = config.compute
    schedule = make_schedule(model, rows, compute.token_budget, compute.pad_to_multiple_of, mesh)
    outputs = auxiliary.outputs(schedule, rows) if auxiliary else NO_AUXILIARY_OUTPUTS
    if outputs.policy_waits:
        return True
    model.train()
    passes = PolicyPasses(model, schedule, objective, compute.loss_seq_chunk_size, mesh, outputs)
    passes.add_gradients(RunningStatistics(mesh.device))
    norm = clip_grad_norm(model, config.optimizer.max_grad_norm)
    model.zero_grad(set_to_none=True)
    return math.isfinite(norm)
