"""What a step says of its tokens, on numbers computed by hand."""

import math

import pytest
import torch
from accelerate import Accelerator
from loss_inputs import inputs, part

from agentrl.configs import LossConfig
from agentrl.training.losses import BatchTotals, LossInputs
from agentrl.training.parallel import make_mesh
from agentrl.training.step.objective import Objective
from agentrl.training.step.statistics import RunningStatistics, StepStatistics


def statistics_of(given: LossInputs, *, parts: int = 1, **flags: object) -> StepStatistics:
    """Of these tokens, in so many micro-batches and an empty one."""
    mesh = make_mesh(Accelerator(cpu=True))
    objective = Objective(LossConfig(**flags))  # type: ignore[arg-type]
    totals = BatchTotals(tokens=int(given.mask.sum()), sequences=2)
    running = RunningStatistics(mesh.device)
    for number in range(parts + 1):
        some = part(given, torch.arange(len(given.mask)) % parts == number)
        share, token_losses = objective.share(some, totals)
        running.add(share.detach(), token_losses, some)
    return running.reduce(totals, 1.0, 1e-3, parts, mesh.dp_group)


@pytest.mark.parametrize("parts", [1, 3])
def test_figures_of_four_tokens_by_hand(parts: int) -> None:
    given = inputs(
        [1.0, 2.0, 0.5, 1.0, 99.0],
        [1.0, 1.0, -1.0, 0.0, 1.0],
        mask=[True, True, True, True, False],
        staleness=[0, 1, 9, 1, 5],
        reference=[1.0, 1.0, 2.0, 1.0, 1.0],
    )
    s = statistics_of(given, parts=parts, beta=1e-9, kl_estimator="k1", rollout_rs="token",
                      rollout_rs_threshold=1.9)  # fmt: skip
    assert (s.ratio_mean, s.ratio_min, s.ratio_max) == pytest.approx((1.125, 0.5, 2.0))
    assert (s.clip_fraction, s.clip_fraction_low, s.clip_fraction_high) == (0.5, 0.25, 0.25)
    assert s.left_out_fraction == 0.5  # 2 and 1/2 are beyond 1.9
    log_2 = math.log(2)
    assert s.mismatch_kl_k1 == pytest.approx(0.0, abs=1e-6)
    assert s.mismatch_kl == pytest.approx(((2 - 1 - log_2) + (0.5 - 1 + log_2)) / 4, rel=1e-5)
    # (1 + 2 + 1/2 + 1)^2 / (4 (1 + 4 + 1/4 + 1))
    assert s.effective_sample_size == pytest.approx(20.25 / 25)
    assert s.negative_logprob == pytest.approx(log_2, rel=1e-5)  # log 1/2 times ratios of product 1
    assert s.reference_kl == pytest.approx(log_2 / 4, rel=1e-5)
    assert s.staleness_histogram == (1, 2, 0, 0, 0, 0, 0, 1)
    assert (s.staleness_mean, s.staleness_max) == (2.75, 9)
    assert s.entropy is None and s.n_micro_batches == parts


def test_weights_that_were_cut_are_counted() -> None:
    given = inputs([1.0, 2.0, 0.5, 4.0], [1.0, 1.0, 1.0, 1.0])
    s = statistics_of(given, proximal_policy="recompute", rollout_is="token",
                      rollout_is_threshold=1.5)  # fmt: skip
    assert s.truncated_fraction == 0.5
    assert (s.left_out_fraction, s.clip_fraction) == (0.0, 0.0)
