"""Statistics of a step's tokens, summed over micro-batches and ranks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.training.losses import BatchTotals, LossInputs
from agentrl.training.losses.ratio import sampler_log_ratio
from agentrl.training.step.critic_loss import NO_CRITIC, CriticStatistics
from agentrl.training.step.kept_logprobs import KeptLogprobs
from agentrl.training.step.objective import TokenLosses

STALENESS_BUCKETS = 8  # 0, 1, ... 6, and 7 or more


@dataclass(frozen=True)
class StepStatistics(CriticStatistics):
    """Statistics over all trained tokens of the global batch.

    pi is the trained policy, mu the sampler's policy with the sampler's logprobs.
    """

    loss: float
    grad_norm: float  # before clipping
    learning_rate: float  # of this step
    ratio_mean: float  # of r = pi / mu
    ratio_min: float
    ratio_max: float
    clip_fraction: float  # share of tokens that were clipped
    clip_fraction_low: float  # because their ratio was too small
    clip_fraction_high: float  # because it was too large
    truncated_fraction: float  # tokens whose importance weight was capped (--rollout_is)
    left_out_fraction: float  # tokens left out by --rollout_rs or the band of ratios
    mismatch_kl: float  # E_mu[r - 1 - log r], an estimate of KL(mu || pi) that is never negative
    mismatch_kl_k1: float  # E_mu[-log r], the plain estimate of the same
    effective_sample_size: float  # (sum r)^2 / (n sum r^2): 1 on policy, small far off policy
    entropy: float | None  # with --log_entropy or --entropy_coef
    negative_logprob: float  # E_mu[-log pi]: of a batch on policy, an estimate of the entropy
    reference_kl: float | None  # estimate of KL(pi || reference), with --beta
    staleness_mean: float
    staleness_max: int
    staleness_histogram: tuple[int, ...]  # tokens of staleness 0, 1, ... 6, and 7 or more
    n_train_tokens: int
    n_micro_batches: int  # of each rank
    grad_norms: Mapping[str, float] | None  # of each layer before clipping, with --log_grad_norms


@dataclass(frozen=True, kw_only=True)
class PreferenceStatistics(StepStatistics):
    """Those of a step whose rows are pairs. Names and values are TRL's, means over pairs."""

    # beta log(pi / reference) of each answer, chosen and rejected; the margins, chosen - rejected;
    # and the accuracies, the share of pairs where the margin is above 0
    rewards: Mapping[str, float]
    logps: Mapping[str, float]  # log pi of each answer, chosen and rejected
    n_pairs: int


_SUMS = (
    "ratio", "ratio_squared", "clipped_low", "clipped_high", "truncated", "left_out", "k1", "k3",
    "negative_logprob", "entropy", "entropy_tokens", "reference_kl", "reference_tokens",
    "staleness", "in_order", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp",
)  # fmt: skip


class RunningStatistics:
    """Sums and extremes over micro-batches, kept on the device until the step ends."""

    def __init__(self, device: torch.device, kept: KeptLogprobs | None = None) -> None:
        """`kept`: is given the logprobs of all tokens that come by."""
        self._kept = kept
        size = 1 + len(_SUMS) + STALENESS_BUCKETS  # the loss first
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)
        # -min ratio, max ratio, max staleness: one MAX reduction serves all three
        self._maxima = torch.full((3,), -torch.inf, dtype=torch.float64, device=device)
        self._of_pairs = False

    @torch.no_grad()
    def add(self, share: Tensor, token_losses: TokenLosses, inputs: LossInputs) -> None:
        """Add one micro-batch: the result of `Objective.share`, and its inputs.

        All sums are masked. Selecting the trained tokens would synchronise the GPU.
        """
        self._of_pairs = self._of_pairs or token_losses.rewards is not None
        if self._kept is not None:
            self._kept.add(inputs)
        if len(inputs.mask) == 0:
            return
        log_ratio = sampler_log_ratio(inputs).double()
        ratio = log_ratio.exp()
        values = {
            "ratio": ratio,
            "ratio_squared": ratio.square(),
            "clipped_low": token_losses.clipped_low,
            "clipped_high": token_losses.clipped_high,
            "truncated": token_losses.truncated,
            "left_out": token_losses.left_out,
            "k1": -log_ratio,
            "k3": ratio - 1.0 - log_ratio,
            "negative_logprob": -inputs.logprobs,
            "staleness": inputs.staleness,
        }
        if inputs.entropy is not None:
            values |= {"entropy": inputs.entropy, "entropy_tokens": inputs.mask}
        if token_losses.reference_kl is not None:
            values |= {"reference_kl": token_losses.reference_kl, "reference_tokens": inputs.mask}
        if token_losses.rewards is not None and token_losses.in_order is not None:
            chosen = inputs.advantages > 0
            values |= {
                "in_order": token_losses.in_order,
                "chosen_reward": token_losses.rewards * chosen,
                "rejected_reward": token_losses.rewards * ~chosen,
                "chosen_logp": inputs.logprobs * chosen,
                "rejected_logp": inputs.logprobs * ~chosen,
            }
        zeros = torch.zeros_like(ratio)
        table = torch.stack([values.get(name, zeros).double() for name in _SUMS])
        buckets = torch.arange(STALENESS_BUCKETS, device=ratio.device)[:, None]
        histogram = inputs.staleness.clamp(max=STALENESS_BUCKETS - 1) == buckets
        table = torch.cat([table, histogram.double()])
        sums = torch.where(inputs.mask, table, 0.0).sum(dim=1)
        self._sums += torch.cat([share.double()[None], sums])
        extremes = torch.stack([-ratio, ratio, inputs.staleness.double()])
        part = torch.where(inputs.mask, extremes, -torch.inf).amax(dim=1)
        self._maxima = torch.maximum(self._maxima, part)

    def reduce(
        self,
        totals: BatchTotals,
        grad_norm: float,
        learning_rate: float,
        n_micro_batches: int,
        dp_group: dist.ProcessGroup,
        grad_norms: Mapping[str, float] | None = None,
        critic: CriticStatistics = NO_CRITIC,
    ) -> StepStatistics:
        """The statistics of the step, the same on every rank. Collective over `dp_group`."""
        dist.all_reduce(self._sums, group=dp_group)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX, group=dp_group)
        loss, *values = self._sums.tolist()
        sums = dict(zip(_SUMS, values[: len(_SUMS)], strict=True))
        minus_ratio_min, ratio_max, staleness_max = self._maxima.tolist()

        def mean(name: str) -> float:
            return float(sums[name]) / totals.tokens

        whole = StepStatistics(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ratio_mean=mean("ratio"),
            ratio_min=-minus_ratio_min,
            ratio_max=ratio_max,
            clip_fraction=mean("clipped_low") + mean("clipped_high"),
            clip_fraction_low=mean("clipped_low"),
            clip_fraction_high=mean("clipped_high"),
            truncated_fraction=mean("truncated"),
            left_out_fraction=mean("left_out"),
            mismatch_kl=mean("k3"),
            mismatch_kl_k1=mean("k1"),
            effective_sample_size=sums["ratio"] ** 2 / (totals.tokens * sums["ratio_squared"]),
            entropy=mean("entropy") if sums["entropy_tokens"] else None,
            negative_logprob=mean("negative_logprob"),
            reference_kl=mean("reference_kl") if sums["reference_tokens"] else None,
            staleness_mean=mean("staleness"),
            staleness_max=int(staleness_max),
            staleness_histogram=tuple(int(count) for count in values[len(_SUMS) :]),
            n_train_tokens=totals.tokens,
            n_micro_batches=n_micro_batches,
            grad_norms=grad_norms,
            **asdict(critic),
        )
        return _of_pairs(whole, sums, totals.sequences) if self._of_pairs else whole


def _of_pairs(
    whole: StepStatistics, sums: Mapping[str, float], n_pairs: int
) -> PreferenceStatistics:
    chosen, rejected = (sums[f"{side}_reward"] / n_pairs for side in ("chosen", "rejected"))
    return PreferenceStatistics(
        **vars(whole),
        rewards={
            "chosen": chosen,
            "rejected": rejected,
            "accuracies": sums["in_order"] / n_pairs,
            "margins": chosen - rejected,
        },
        logps={side: sums[f"{side}_logp"] / n_pairs for side in ("chosen", "rejected")},
        n_pairs=n_pairs,
    )
