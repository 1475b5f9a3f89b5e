"""The losses of the original AgentRL by its flags, on numbers computed by hand.

docs/from-agentrl.md says what each flag means. Around the clip range of 0.2 and 0.1, a band of 2
ends at 1 - 0.2 * 2 = 0.6 and 1 + (0.2 + 0.1) * 2 = 1.6.
"""

import math

import pytest
import torch
from loss_inputs import gradient, inputs

from agentrl.configs import LossConfig, parse_config
from agentrl.configs.familiar.original_defaults import original_layer
from agentrl.configs.parsing import config_of, given_values
from agentrl.training.losses import BatchTotals, LossInputs
from agentrl.training.step.objective import Objective, TokenLosses

RANGE = {"epsilon": 0.2, "epsilon_higher": 0.1}
BAND = {**RANGE, "importance_weight_cap_ratio": 2.0}


def computed(given: LossInputs, config: LossConfig) -> tuple[float, TokenLosses]:
    """The loss of a batch of these tokens, and what became of each."""
    totals = BatchTotals(int(given.mask.sum()), len(given.sequence[given.mask].unique()))
    share, losses = Objective(config).share(given, totals)
    share.backward()  # type: ignore[no-untyped-call]
    return share.item(), losses


def slopes(given: LossInputs, loss: str, **flags: object) -> list[float]:
    """The derivative of each token's loss by its logprob."""
    config = LossConfig(loss_calculator=loss, token_level_loss=True, **flags)  # type: ignore[arg-type]
    share, _ = Objective(config).share(given, BatchTotals(len(given.mask), 1))
    return gradient(share * len(given.mask), given)


def test_epsilon_higher_is_added_to_epsilon() -> None:
    config = parse_config(["--epsilon", "0.2", "--epsilon_higher", "0.08"]).loss
    assert config.clip_range == pytest.approx((0.8, 1.28))
    given = inputs([1.25, 1.3], [1.0, 1.0])
    assert slopes(given, "GRPO", epsilon=0.2, epsilon_higher=0.08) == pytest.approx([-1.25, 0.0])


def test_minirl_has_the_weighted_gradient_within_the_band_and_none_outside() -> None:
    given = inputs([1.5, 1.7, 0.65, 0.55, 1.7, 0.55], [2.0, 2.0, -2.0, -2.0, -2.0, 2.0])
    expected = [-3.0, 0.0, 1.3, 0.0, 3.4, -1.1]  # -r A; out only where A moves r further out
    assert slopes(given, "MINIRL", **BAND) == pytest.approx(expected)


def test_strict_in_bound_makes_the_clip_range_the_band() -> None:
    given = inputs([1.25, 1.35, 0.85, 0.75, 1.35, 0.75], [1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    strict = {**BAND, "strict_in_bound": True}
    expected = [-1.25, 0.0, 0.85, 0.0, 1.35, -0.75]
    assert slopes(given, "MINIRL", **strict) == pytest.approx(expected)
    assert slopes(given, "MINIRL", **RANGE, strict_in_bound=True) == pytest.approx(expected)


def test_out_of_date_decay_narrows_the_band_of_old_tokens_and_changes_no_advantage() -> None:
    # exp(-ln 2 * staleness) halves the width: the upper ends are 1.6, 1.3 and 1.15
    halved = {**BAND, "out_of_date_decay": math.log(2)}
    given = inputs([1.25] * 3 + [0.7] * 3, [1.0] * 3 + [-1.0] * 3, staleness=[0, 1, 2] * 2)
    # and the lower ones 0.6, 0.8 and 0.9
    expected = [-1.25, -1.25, 0.0, 0.7, 0.0, 0.0]
    assert slopes(given, "MINIRL", **halved) == pytest.approx(expected)


def test_ce_gppo_keeps_a_scaled_gradient_between_the_clip_range_and_the_end_of_the_band() -> None:
    given = inputs([1.0, 1.4, 1.7, 0.7, 0.5, 1.4], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    clipped = [-2.0, 0.0, 0.0, 0.0, 0.0, 2.8]
    assert slopes(given, "GRPO", **BAND) == pytest.approx(clipped)
    # beta2 * 1.3 * A = 0.5 * 1.3 * 2 and beta1 * 0.8 * A = 0.25 * 0.8 * 2
    kept = [-2.0, -1.3, 0.0, 0.4, 0.0, 2.8]
    assert slopes(given, "GRPO", **BAND, beta1=0.25, beta2=0.5) == pytest.approx(kept)
    strict = {**RANGE, "strict_in_bound": True, "beta1": 0.25, "beta2": 0.5}
    assert slopes(given, "GRPO", **strict) == pytest.approx(clipped)


def test_gspo_clips_and_leaves_out_whole_rows_by_their_ratio() -> None:
    # ratios of rows: sqrt(2 * 0.5) = 1, sqrt(2 * 0.98) = 1.4, and 1.7, past the band's 1.6
    given = inputs([2.0, 0.5, 2.0, 0.98, 1.7], [1.0] * 5, rows=[2, 2, 1])
    config = LossConfig(loss_calculator="GSPO", token_level_loss=True, **BAND)
    loss, losses = computed(given, config)
    assert losses.token_losses.tolist() == pytest.approx([-1.0, -1.0, -1.3, -1.3, 0.0])
    assert losses.left_out.tolist() == [False] * 4 + [True]
    assert loss == pytest.approx(-(1.0 + 1.0 + 1.3 + 1.3) / 5)
    # each of the first row's losses has the ratio of the row: -s A / 2 from both
    assert given.logprobs.grad is not None
    assert (5 * given.logprobs.grad).tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("flags", "loss"),
    [
        # rows of 2 tokens with A = 1 and of 3 tokens with A = 2, on policy: -A each
        (["--token_level_loss", "true"], -(2 * 1 + 3 * 2) / 5),
        (["--token_level_loss", "false"], -(1 + 2) / 2),
        (["--token_level_loss", "false", "--skip_length_normalization", "true"], -(2 + 6) / 2),
    ],
    ids=["over tokens", "over rows", "the sum of a row"],
)
def test_means_over_tokens_over_rows_and_sums(flags: list[str], loss: float) -> None:
    given = inputs([1.0] * 5, [1.0, 1.0, 2.0, 2.0, 2.0], rows=[2, 3])
    config = parse_config(["--loss_calculater", "GRPO", *flags]).learner.loss
    assert computed(given, config)[0] == pytest.approx(loss)


def test_the_flags_of_its_minirl_script_make_its_loss() -> None:
    script = [
        "--loss_calculater", "MINIRL", "--token_level_loss", "false", "--strict_in_bound", "true",
        "--skip_length_normalization", "true",
    ]  # fmt: skip
    values = given_values(script, "test")
    config = config_of({**original_layer(values), **values}).learner.loss
    assert config.clip_range == pytest.approx((0.8, 1.3))
    # -r A, without a bound for A < 0, or nothing: A > 0 and r > 1.3, A < 0 and r < 0.8
    given = inputs([1.2, 1.4, 9.0, 0.7, 0.7], [1.0, 1.0, -1.0, -1.0, 1.0], rows=[2, 3])
    computed(given, config)
    assert given.logprobs.grad is not None
    expected = [-1.2 / 2, 0.0, 9.0 / 2, 0.0, -0.7 / 2]  # a sum, and the mean over two rows
    assert given.logprobs.grad.tolist() == pytest.approx(expected)


def test_its_grpo_leaves_a_band_of_four_widths_by_default() -> None:
    values = {"loss_calculator": "GRPO"}
    config = config_of({**original_layer(values), **values}).learner.loss
    # 1 + (0.2 + 0.1) * 4 = 2.2 and 1 - 0.2 * 4 = 0.2
    given = inputs([2.1, 2.3, 0.25, 0.15], [1.0, 1.0, -1.0, -1.0])
    _, losses = computed(given, config)
    assert losses.left_out.tolist() == [False, True, False, True]
    assert losses.token_losses.tolist() == pytest.approx([-1.3, 0.0, 0.8, 0.0])


def test_no_band_is_left_out_without_a_flag() -> None:
    given = inputs([9.0, 0.01], [1.0, -1.0])
    for loss in ("GRPO", "GSPO", "MINIRL"):
        assert not computed(given, LossConfig(loss_calculator=loss))[1].left_out.any()
    assert torch.isfinite(given.logprobs).all()
