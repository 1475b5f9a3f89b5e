"""The figures of a trainer: sums of its steps, and the last one."""

from dataclasses import replace

import pytest
from exposed_samples import Samples

from agentrl.databases.row_ledger import RowCounts, RowHeader
from agentrl.training.run.metrics import StepMetrics, StepTimes, step_metrics
from agentrl.training.run.trainer_figures import OF_STEP, TrainerFigures
from agentrl.training.step.statistics import StepStatistics

STATISTICS = StepStatistics(
    loss=0.5, grad_norm=2.0, learning_rate=1e-3, ratio_mean=1.0, ratio_min=0.5, ratio_max=2.0,
    clip_fraction=0.25, clip_fraction_low=0.05, clip_fraction_high=0.2, truncated_fraction=0.0,
    left_out_fraction=0.1, mismatch_kl=0.01, mismatch_kl_k1=0.02, effective_sample_size=0.9,
    entropy=None, negative_logprob=0.7, reference_kl=None, staleness_mean=0.75, staleness_max=7,
    staleness_histogram=(30, 6, 0, 0, 0, 0, 0, 4), n_train_tokens=40, n_micro_batches=2,
    grad_norms=None,
)  # fmt: skip
TIMES = StepTimes(
    step_seconds=4.0, train_seconds=1.0, wait_seconds=0.5, publish_seconds=0.25, save_seconds=0.05,
    stall_seconds=0.1,
)  # fmt: skip
ROWS = [
    RowHeader(
        id=str(n), group_order=n, n_tokens=30, n_train_tokens=20, cost=1.0, prefix_hash="",
        reward=float(n),
    )
    for n in range(2)
]  # fmt: skip


def line(step: int, statistics: StepStatistics = STATISTICS) -> StepMetrics:
    return step_metrics(step, step - 1, statistics, ROWS, 1.5, TIMES, RowCounts(3, 0), 0)


def test_steps_are_summed_and_the_last_one_is_shown() -> None:
    figures = TrainerFigures(max_steps=9, step=4)
    before = Samples.of(figures)
    assert before("agentrl_step") == 4 and before("agentrl_steps_total") == 0
    assert "agentrl_policy_version" not in before.names and "agentrl_loss" not in before.names
    began = before("agentrl_last_step_timestamp_seconds")

    last = line(6, replace(STATISTICS, loss=0.25, staleness_histogram=(0, 40, 0, 0, 0, 0, 0, 0)))
    for each in (line(5), last):
        figures.trained(each, each.step + 1)
    after = Samples.of(figures)
    assert after("agentrl_step") == 6 and after("agentrl_policy_version") == 7
    assert after("agentrl_steps_total") == 2 and after("agentrl_trained_rows_total") == 4
    assert after("agentrl_trained_tokens_total") == 80
    assert after("agentrl_last_step_timestamp_seconds") >= began
    phases = {"train": 2.0, "wait": 1.0, "publish": 0.5, "save": 0.1, "other": 4.4}
    assert after.by("agentrl_phase_seconds_total", "phase") == pytest.approx(phases)
    assert sum(phases.values()) == pytest.approx(2 * TIMES.step_seconds)
    buckets = [30, 76, 76, 76, 76, 76, 76, 80]
    ends = [*(f"{bound}.0" for bound in range(7)), "+Inf"]
    found = [after("agentrl_trained_token_staleness_bucket", le=end) for end in ends]
    assert found == buckets
    assert after("agentrl_trained_token_staleness_sum") == 0.75 * 40 + 0.75 * 40
    for field, figure in OF_STEP.items():
        value = getattr(last, field)
        assert value is None or after(figure.name) == value
    assert {"agentrl_entropy", "agentrl_reference_kl"}.isdisjoint(after.names)


def test_a_step_that_left_the_weights_counts_apart() -> None:
    figures = TrainerFigures(max_steps=9)
    figures.skipped(1, 0, TIMES)
    after = Samples.of(figures)
    assert after("agentrl_skipped_steps_total") == 1 and after("agentrl_steps_total") == 0
    assert after("agentrl_step") == 1
    assert after("agentrl_phase_seconds_total", phase="train") == 1.0
