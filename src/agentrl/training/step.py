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

from agentrl.configs import LossConfig
from agentrl.training.batch import (
    MicroBatch,
    TrainingSequence,
    collate,
    count_totals,
    placeholder,
)
from agentrl.training.logprobs import token_logprobs
from agentrl.training.losses import (
    LOSS_FUNCTIONS,
    BatchTotals,
    TokenLoss,
    log_ratio,
    normalisation_of,
    normalise,
)
from agentrl.training.parallel import clip_grad_norm, scale_for_mean_reduction
from agentrl.training.planner import pack_sequences, split_to


@dataclass(frozen=True)
class StepOptions:
    """What a step needs beside the loss."""

    micro_batch_tokens: int  # of one forward pass, padding included
    pad_to_multiple_of: int = 1
    loss_seq_chunk_size: int = 1024  # tokens whose logits exist at once
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class StepStatistics:
    """Over all trained tokens of the global batch."""

    loss: float
    grad_norm: float  # before clipping
    learning_rate: float  # of this step
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    clip_fraction: float
    mismatch_kl: float  # E_mu[r - 1 - log r], an estimate of KL(mu || pi) that is never negative
    entropy: float | None
    staleness_mean: float
    staleness_max: int
    n_train_tokens: int
    n_micro_batches: int  # of each rank


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    rows: Sequence[Sequence[TrainingSequence]],
    loss: LossConfig,
    options: StepOptions,
) -> StepStatistics:
    """Train on `rows` (this rank's, each as its sequences) and update the weights once.

    The result is the same on every rank, and but for rounding the same for any number of ranks and
    any micro-batch size.
    """
    device = next(model.parameters()).device
    sequences = [sequence for row in rows for sequence in row]
    plan = pack_sequences(
        [len(sequence) for sequence in sequences],
        options.micro_batch_tokens,
        options.pad_to_multiple_of,
    )
    totals, n_micro_batches = _agree(count_totals(rows), len(plan), device)
    if totals.tokens == 0:
        raise ValueError("a step has no trained token in any of its rows")
    model.train()
    running = _RunningStatistics(device)
    for indices in split_to(plan, n_micro_batches):
        batch = (
            collate(
                [sequences[index] for index in indices],
                options.pad_to_multiple_of,
                device,
            )
            if indices
            else placeholder(device)
        )
        _accumulate(model, batch, totals, loss, options, running)
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
    return running.reduce(totals, grad_norm, learning_rate, n_micro_batches, loss.log_entropy)


def _accumulate(
    model: PreTrainedModel,
    batch: MicroBatch,
    totals: BatchTotals,
    config: LossConfig,
    options: StepOptions,
    running: "_RunningStatistics",
) -> None:
    logprobs, entropy = token_logprobs(
        model,
        batch.input_ids,
        batch.positions,
        batch.targets,
        batch.temperatures,
        options.loss_seq_chunk_size,
        config.log_entropy,
    )
    inputs = batch.loss_inputs(logprobs)
    token_loss = LOSS_FUNCTIONS[config.loss_calculator](inputs, config)
    share = normalise(token_loss.terms, batch.sequence_tokens, normalisation_of(config), totals)
    scale_for_mean_reduction(share).backward()
    running.add(share.detach(), token_loss, log_ratio(inputs).detach(), batch, entropy)


def _agree(local: BatchTotals, micro_batches: int, device: torch.device) -> tuple[BatchTotals, int]:
    """Sum the counts over ranks, and take the most micro-batches that any rank has (at least 1)."""
    counts = torch.tensor([local.tokens, local.sequences], dtype=torch.int64, device=device)
    most = torch.tensor(max(micro_batches, 1), dtype=torch.int64, device=device)
    dist.all_reduce(counts)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    tokens, sequences = counts.tolist()
    return BatchTotals(tokens, sequences), int(most)


class _RunningStatistics:
    """Sums and extremes over micro-batches, kept on the device until the step ends."""

    def __init__(self, device: torch.device) -> None:
        # loss, ratio, clipped, kl, entropy, staleness
        self.sums = torch.zeros(6, dtype=torch.float64, device=device)
        # -min ratio, max ratio, max staleness: one MAX reduction serves all three
        self.maxima = torch.full((3,), -torch.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        share: Tensor,
        token_loss: TokenLoss,
        log_ratios: Tensor,
        batch: MicroBatch,
        entropy: Tensor | None,
    ) -> None:
        mask = batch.mask
        ratio = token_loss.ratio[mask].double()
        if len(ratio) == 0:
            return
        staleness = batch.staleness[mask].double()
        kl = ratio - 1.0 - log_ratios[mask].double()
        entropy_sum = entropy[mask].double().sum() if entropy is not None else kl.new_zeros(())
        self.sums += torch.stack(
            [share.double(), ratio.sum(), token_loss.clipped.sum().double(), kl.sum(), entropy_sum,
             staleness.sum()]
        )  # fmt: skip
        part = torch.stack([-ratio.min(), ratio.max(), staleness.max()])
        self.maxima = torch.maximum(self.maxima, part)

    def reduce(
        self,
        totals: BatchTotals,
        grad_norm: float,
        learning_rate: float,
        n_micro_batches: int,
        with_entropy: bool,
    ) -> StepStatistics:
        dist.all_reduce(self.sums)
        dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX)
        loss, ratio, clipped, kl, entropy, staleness = self.sums.tolist()
        minus_ratio_min, ratio_max, staleness_max = self.maxima.tolist()
        return StepStatistics(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ratio_mean=ratio / totals.tokens,
            ratio_min=-minus_ratio_min,
            ratio_max=ratio_max,
            clip_fraction=clipped / totals.tokens,
            mismatch_kl=kl / totals.tokens,
            entropy=entropy / totals.tokens if with_entropy else None,
            staleness_mean=staleness / totals.tokens,
            staleness_max=int(staleness_max),
            n_train_tokens=totals.tokens,
            n_micro_batches=n_micro_batches,
        )
