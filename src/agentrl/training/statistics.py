"""What a step says of its tokens: sums over micro-batches and ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.training.losses import BatchTotals, LossInputs, TokenLoss, log_ratio


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


class RunningStatistics:
    """Sums and extremes over micro-batches, kept on the device until the step ends."""

    def __init__(self, device: torch.device) -> None:
        self.with_entropy = False
        # loss, ratio, clipped, kl, entropy, staleness
        self.sums = torch.zeros(6, dtype=torch.float64, device=device)
        # -min ratio, max ratio, max staleness: one MAX reduction serves all three
        self.maxima = torch.full((3,), -torch.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        share: Tensor,
        token_loss: TokenLoss,
        inputs: LossInputs,
    ) -> None:
        """The share of one micro-batch, from `Objective.share`, and what it was made of."""
        mask = inputs.mask
        ratio = token_loss.ratio[mask].double()
        if len(ratio) == 0:
            return
        staleness = inputs.staleness[mask].double()
        clipped = token_loss.clipped_low | token_loss.clipped_high
        kl = ratio - 1.0 - log_ratio(inputs).detach()[mask].double()
        entropy_sum = kl.new_zeros(())
        if inputs.entropy is not None:
            self.with_entropy = True
            entropy_sum = inputs.entropy.detach()[mask].double().sum()
        self.sums += torch.stack(
            [share.double(), ratio.sum(), clipped.sum().double(), kl.sum(), entropy_sum,
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
        dp_group: dist.ProcessGroup,
    ) -> StepStatistics:
        """The statistics of the step, the same on every rank. Collective over `dp_group`."""
        dist.all_reduce(self.sums, group=dp_group)
        dist.all_reduce(self.maxima, op=dist.ReduceOp.MAX, group=dp_group)
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
            entropy=entropy / totals.tokens if self.with_entropy else None,
            staleness_mean=staleness / totals.tokens,
            staleness_max=int(staleness_max),
            n_train_tokens=totals.tokens,
            n_micro_batches=n_micro_batches,
        )
