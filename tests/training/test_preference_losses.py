"""Preference losses: numbers computed by hand, and the objective that is made of them."""

import math
from dataclasses import replace

import pytest
import torch
from loss_inputs import part, random_inputs

from agentrl.configs import ConfigError
from agentrl.configs.preferences import LOSS_TYPES, PreferenceConfig
from agentrl.training.losses import BatchTotals, LossInputs
from agentrl.training.losses.preference import PREFERENCE_LOSSES, PairRatios, pair_ratios
from agentrl.training.step.preference_objective import PreferenceObjective


def pairs(chosen: float, rejected: float, tokens: tuple[int, int] = (2, 4)) -> PairRatios:
    return PairRatios(
        torch.tensor([chosen], requires_grad=True),
        torch.tensor([rejected], requires_grad=True),
        torch.tensor([float(tokens[0])]),
        torch.tensor([float(tokens[1])]),
    )


LN3 = math.log(3.0)


# beta 0.5; c - r = 2 ln 3, so that sigmoid(beta (c - r)) = 3/4, with slope -beta / 4 by c.
@pytest.mark.parametrize(
    ("loss_type", "smoothing", "loss", "by_chosen", "by_rejected"),
    [
        ("sigmoid", 0.0, math.log(4 / 3), -0.125, 0.125),
        # c / 2 - r / 4 - 1 = ln 3 / 2 + ln 3 / 4 - 1
        ("ipo", 0.0, (0.75 * LN3 - 1) ** 2, 0.75 * LN3 - 1, -(0.75 * LN3 - 1) / 2),
        ("hinge", 0.0, 0.0, 0.0, 0.0),  # ln 3 is beyond the margin of 1
        # (0.75 ln(4/3) - 0.25 ln 4) / 0.5; slope -(0.75 / 4 + 0.25 * 3/4) / 0.5 * beta
        ("robust", 0.25, (0.75 * math.log(4 / 3) - 0.25 * math.log(4)) / 0.5, -0.375, 0.375),
        # (ln 3 - 1)^2 + (-ln 3 + 1)^2
        ("sppo_hard", 0.0, 2 * (LN3 - 1) ** 2, 2 * (LN3 - 1), -2 * (LN3 - 1)),
    ],
)
def test_losses_and_slopes_are_those_computed_by_hand(
    loss_type: str, smoothing: float, loss: float, by_chosen: float, by_rejected: float
) -> None:
    given = pairs(LN3, -LN3)
    config = PreferenceConfig(loss_type, beta=0.5, label_smoothing=smoothing)
    [value] = PREFERENCE_LOSSES[loss_type](given, config)
    slopes = torch.autograd.grad(value, [given.chosen, given.rejected])
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert [slope.item() for slope in slopes] == pytest.approx([by_chosen, by_rejected], abs=1e-6)


def test_the_hinge_pulls_within_the_margin() -> None:
    given = pairs(0.5, 0.0)
    [value] = PREFERENCE_LOSSES["hinge"](given, PreferenceConfig("hinge", beta=0.5))
    assert value.item() == pytest.approx(0.75)
    assert torch.autograd.grad(value, given.chosen)[0].item() == pytest.approx(-0.5)


def test_without_smoothing_robust_is_sigmoid() -> None:
    given = pairs(0.7, 0.1)
    of = [PREFERENCE_LOSSES[name](given, PreferenceConfig(name)) for name in ("robust", "sigmoid")]
    assert of[0].item() == pytest.approx(of[1].item())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_type": "dpo"}, "--loss_type dpo: is none of sigmoid, ipo"),
        ({"beta": 0.0}, "--beta 0: must be above 0"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "--label_smoothing 0.5: must be"),
        ({"label_smoothing": 0.1}, "--loss_type sigmoid does not use it, only robust"),
    ],
)
def test_values_without_meaning_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PreferenceConfig(**given)  # type: ignore[arg-type]


def pair_inputs(seed: int = 0) -> LossInputs:
    """Three pairs; each has some tokens of the chosen answer and then of the rejected one."""
    given = random_inputs([5, 3, 6], seed)
    signs = [1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0, -1.0, *[1.0] * 4, -1.0, -1.0]
    return replace(given, advantages=torch.tensor(signs), entropy=None)


def test_ratios_are_sums_over_the_trained_tokens_of_each_answer() -> None:
    mask = torch.ones(14, dtype=torch.bool)
    mask[1] = False  # of the first pair's chosen answer
    given = replace(pair_inputs(), mask=mask)
    ratios, pair = pair_ratios(given)
    each = (given.logprobs - given.reference_logprobs).tolist()
    assert pair.tolist() == [0] * 5 + [1] * 3 + [2] * 6
    assert ratios.chosen.tolist() == pytest.approx([each[0], each[5], sum(each[8:12])])
    assert ratios.rejected.tolist() == pytest.approx(
        [sum(each[2:5]), sum(each[6:8]), sum(each[12:])]
    )
    assert ratios.chosen_tokens.tolist() == [1, 1, 4]
    assert ratios.rejected_tokens.tolist() == [3, 2, 2]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_shares_of_pairs_add_up_to_the_loss_of_the_batch(loss_type: str) -> None:
    given, totals = pair_inputs(), BatchTotals(tokens=14, sequences=3)
    objective = PreferenceObjective(PreferenceConfig(loss_type, beta=0.3))
    whole, _ = objective.share(given, totals)
    parts = [
        objective.share(part(given, given.sequence == number), totals)[0] for number in range(3)
    ]
    ratios, _ = pair_ratios(given)
    mean = PREFERENCE_LOSSES[loss_type](ratios, PreferenceConfig(loss_type, beta=0.3)).mean()
    assert whole.item() == pytest.approx(mean.item(), rel=1e-6)
    assert sum(share.item() for share in parts) == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_placeholder_is_no_pair(loss_type: str) -> None:
    given = pair_inputs()
    nothing = replace(given, mask=torch.zeros_like(given.mask))
    share, _ = PreferenceObjective(PreferenceConfig(loss_type)).share(
        nothing, BatchTotals(tokens=14, sequences=3)
    )
    assert share.item() == 0.0
    assert torch.autograd.grad(share, given.logprobs)[0].abs().sum() == 0
