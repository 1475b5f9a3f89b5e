"""One optimizer step: sequences of one rank -> micro-batches -> gradients -> update and statistics.

Shared by the trainer and by supervised training. Every rank calls `train_step` together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from agentrl.training.batch import MicroBatch
from agentrl.training.losses import BatchTotals
from agentrl.training.objective import Objective
from agentrl.training.parallel import Mesh, clip_grad_norm
from agentrl.training.program import make_program, run_program
from agentrl.training.sequences import TrainingSequence, count_totals
from agentrl.training.statistics import RunningStatistics, StepStatistics


@dataclass(frozen=True)
class StepOptions:
    """What a step needs beside the loss."""

    micro_batch_tokens: int  # of one forward pass, padding included
    pad_to_multiple_of: int = 1
    loss_seq_chunk_size: int = 1024  # tokens whose logits exist at once
    max_grad_norm: float = 1.0


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    rows: Sequence[Sequence[TrainingSequence]],
    objective: Objective,
    options: StepOptions,
    mesh: Mesh,
) -> StepStatistics:
    """Train on `rows` (this rank's, each as its sequences) and update the weights once.

    The result is the same on every rank, and but for rounding the same for any number of ranks and
    any micro-batch size.
    """
    program = make_program(
        model, rows, options.micro_batch_tokens, options.pad_to_multiple_of, mesh
    )
    totals = _global_totals(count_totals(rows), mesh)
    if totals.tokens == 0:
        raise ValueError("a step has no trained token in any of its rows")
    model.train()
    running = RunningStatistics(mesh.device)

    def consume(number: int, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        del number
        inputs = batch.loss_inputs(logprobs, entropy)
        share, token_loss = objective.share(inputs, totals)
        running.add(share.detach(), token_loss, inputs)
        return mesh.scale_for_mean_reduction(share)

    run_program(model, program, options.loss_seq_chunk_size, objective.with_entropy, consume)
    grad_norm = clip_grad_norm(model, options.max_grad_norm)
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient norm is {grad_norm}: the weights were left as they are; the rows of "
            "this step or the learning rate before it are the place to look"
        )
    learning_rate = float(scheduler.get_last_lr()[0])
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return running.reduce(totals, grad_norm, learning_rate, len(program.batches), mesh.dp_group)


def _global_totals(local: BatchTotals, mesh: Mesh) -> BatchTotals:
    """The sums over data-parallel ranks. Collective."""
    counts = torch.tensor([local.tokens, local.sequences], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(counts, group=mesh.dp_group)
    tokens, sequences = counts.tolist()
    return BatchTotals(tokens, sequences)
