"""One optimizer step: sequences of one rank -> micro-batches -> gradients -> update and statistics.

Shared by the trainer and by supervised training. Every rank calls `train_step` together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from agentrl.training.batch import (
    MicroBatch,
    TrainingSequence,
    collate,
    count_totals,
    placeholder,
)
from agentrl.training.logprobs import token_logprobs
from agentrl.training.losses import BatchTotals
from agentrl.training.objective import Objective
from agentrl.training.parallel import Mesh, clip_grad_norm
from agentrl.training.planner import pack_sequences, split_to
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
    device = mesh.device
    sequences = [sequence for row in rows for sequence in row]
    row_of = [number for number, row in enumerate(rows) for _ in row]
    plan = pack_sequences(
        [len(sequence) for sequence in sequences],
        options.micro_batch_tokens,
        options.pad_to_multiple_of,
    )
    totals, n_micro_batches = _agree(count_totals(rows), len(plan), mesh)
    if totals.tokens == 0:
        raise ValueError("a step has no trained token in any of its rows")
    model.train()
    running = RunningStatistics(device)
    for indices in split_to(plan, n_micro_batches):
        batch = (
            collate(
                [sequences[index] for index in indices],
                [row_of[index] for index in indices],
                options.pad_to_multiple_of,
                device,
            )
            if indices
            else placeholder(device)
        )
        _accumulate(model, batch, totals, objective, options, mesh, running)
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
    return running.reduce(totals, grad_norm, learning_rate, n_micro_batches, mesh.dp_group)


def _accumulate(
    model: PreTrainedModel,
    batch: MicroBatch,
    totals: BatchTotals,
    objective: Objective,
    options: StepOptions,
    mesh: Mesh,
    running: RunningStatistics,
) -> None:
    logprobs, entropy = token_logprobs(
        model,
        batch.input_ids,
        batch.positions,
        batch.targets,
        batch.temperatures,
        options.loss_seq_chunk_size,
        objective.with_entropy,
    )
    inputs = batch.loss_inputs(logprobs, entropy)
    share, token_loss = objective.share(inputs, totals)
    mesh.scale_for_mean_reduction(share).backward()
    running.add(share.detach(), token_loss, inputs)


def _agree(local: BatchTotals, micro_batches: int, mesh: Mesh) -> tuple[BatchTotals, int]:
    """Sum the counts over ranks, and take the most micro-batches that any rank has (at least 1)."""
    counts = torch.tensor([local.tokens, local.sequences], dtype=torch.int64, device=mesh.device)
    most = torch.tensor(max(micro_batches, 1), dtype=torch.int64, device=mesh.device)
    dist.all_reduce(counts, group=mesh.dp_group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.dp_group)
    tokens, sequences = counts.tolist()
    return BatchTotals(tokens, sequences), int(most)
